"""Messages between ranks: tagged point-to-point on a process group of our own.

Gloo's own collectives cannot sum narrow floats, use one direction of the link at a time
(``all_to_all_single``) or send twice the needed bytes (``reduce_scatter``); point-to-point messages
whose receives are posted first use both directions and only the needed bytes. The group is our own,
so that tags and timeouts belong to us alone. It is made directly on the store of the user's group:
``new_group`` must be called by all ranks of the job or, with local synchronisation, names the group
by a count that differs between ranks once some of them have made other groups.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from narrowgauge.collectives.threads import yielding_loops

VERSION = 3
"""Of the bytes between ranks; raised with every change to them."""

_meetings: dict[str, int] = {}  # how often the members of a group met, by its name


class CollectiveError(RuntimeError):
    """A message of a compressed collective failed: a rank died, timed out, or disagrees."""


class Transport:
    """Point-to-point messages among the ranks of ``group``.

    Args:
        group: the ranks that talk to each other; ``None`` is the default group. All of them must
            create the transport at the same point of the program.
        timeout: how long a message may take before every waiting rank raises; ``None``: as long as
            in ``group``.
        among: the ranks of ``group`` that take part, in order, this one among them; ``None``: all.
            All ranks of ``group`` create a transport at that point, each among its own.
        settings: what must be the same on all ranks of ``group``, by name.

    Attributes:
        rank: this rank's number among those that take part; peers are counted likewise.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this rank is not in ``group``.
        CollectiveError: a rank did not come, refused its arguments, or runs another version.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None,
        among: Sequence[int] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        members = members_of(group)
        self.timeout = timeout_of(members) if timeout is None else timeout
        rank = dist.get_rank(group)
        if rank < 0:
            raise RuntimeError("this rank is not a member of the given process group")
        self._ranks = list(range(dist.get_world_size(group)) if among is None else among)
        self.rank = self._ranks.index(rank)
        self.world_size = len(self._ranks)
        meeting = _next_meeting(members)
        name = self._meet(meeting, rank, dist.get_world_size(group), settings or {})
        store = PrefixStore(f"{name}/from{self._ranks[0]}", meeting)
        with self.explained("connecting to", self.peers):
            self._messages = self._new_group(PrefixStore("messages", store))
            # Agreements are made by the calling thread while another sends messages: on one group
            # their order could differ between ranks.
            self._agreements = self._new_group(PrefixStore("agreements", store))
        self._next_number = 0

    def _meet(self, store: Store, own: int, count: int, settings: Mapping[str, str]) -> str:
        """Wait until all ranks of the group are here, and speak as we do; a name for this meeting.

        Where torchrun restarts a job, its store still holds what the dead ranks wrote. So everybody
        comes with a random number, and goes on when all have seen the same ones.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        others = [rank for rank in range(count) if rank != own]
        try:
            store.set(f"settings{own}", json.dumps(settings))
            store.set(f"rank{own}", f"version {VERSION} {secrets.token_hex(8)}")
            pause = 1e-3
            while True:
                answers = {rank: _read(store, f"rank{rank}") for rank in range(count)}
                missing = [rank for rank in others if not answers[rank]]
                for rank in others:
                    _check_answer(rank, answers[rank], own)
                if not missing:
                    view = hashlib.sha256("\n".join(answers.values()).encode()).hexdigest()[:16]
                    store.set(f"seen{own}", view)
                    missing = [rank for rank in others if _read(store, f"seen{rank}") != view]
                    if not missing:
                        _check_settings({r: _read(store, f"settings{r}") for r in range(count)})
                        return view
                if time.monotonic() > deadline:
                    raise CollectiveError(
                        f"rank {own} connecting to {_named(missing)}: no answer within "
                        f"{self.timeout.total_seconds():g} s. Look at the output of "
                        f"{_named(missing)} first"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except dist.DistError as error:
            raise CollectiveError(
                f"rank {own} connecting to {_named(others)}: the store in which ranks meet is "
                f"gone. Look at the output of rank 0 first, which may have held it. ({error})"
            ) from error

    def _new_group(self, store: Store) -> Any:  # torch's stubs lack the methods of groups
        with yielding_loops():
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout=self.timeout)

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks send to the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def named(self, ranks: Sequence[int]) -> str:
        """What messages call them: by their numbers in the group they came from."""
        return _named(sorted(self._ranks[rank] for rank in ranks))

    def reserve(self, count: int) -> int:
        """The first of ``count`` message numbers not used recently; equal on all ranks."""
        first = self._next_number
        self._next_number = first + count
        return first

    def send(self, message: torch.Tensor, to: int, tag: int, where: str = "") -> dist.Work:
        """Start sending ``message`` (contiguous); it must not change until the work is done."""
        with self.explained(f"{where}sending to", [to]):
            work: dist.Work = self._messages.send([message], to, tag)
        return work

    def receive(self, message: torch.Tensor, source: int, tag: int, where: str = "") -> dist.Work:
        """Start receiving into ``message`` (contiguous)."""
        with self.explained(f"{where}receiving from", [source]):
            work: dist.Work = self._messages.recv([message], source, tag)
        return work

    def wait(
        self, works: list[tuple[int, dist.Work]], phase: str, timeout: timedelta | None = None
    ) -> None:
        """Wait for messages, given as (peer, work), each once; ``None``: as long as they may take.

        Raises:
            CollectiveError: naming the phase and all peers whose messages are missing.
        """
        missing: list[int] = []
        with self.explained(phase, missing):
            for number, (peer, work) in enumerate(works):
                try:
                    work.wait(self.timeout if timeout is None else timeout)
                except RuntimeError:
                    missing.append(peer)
                    missing += [later for later, other in works[number + 1 :] if not _done(other)]
                    raise

    def all_reduce_max(self, values: torch.Tensor, where: str = "") -> None:
        """Replace ``values`` (int32) by their maximum over all ranks; for the pipeline's thread."""
        with self.explained(f"{where}agreeing on scale exponents with", self.peers):
            self._messages.allreduce([values], dist.ReduceOp.MAX).wait()

    def all_reduce_sum_in_order(self, values: torch.Tensor, where: str = "") -> None:
        """Replace ``values`` (float32) by their sum over all ranks; for the pipeline's thread."""
        with self.explained(f"{where}summing float32 with", self.peers):
            self._messages.allreduce([values]).wait()

    def start_all_reduce_sum(self, values: torch.Tensor) -> dist.Work:
        """Start what :meth:`all_reduce_sum` does."""
        work: dist.Work = self._agreements.allreduce([values])
        return work

    def all_reduce_sum(self, values: torch.Tensor, where: str = "") -> None:
        """Replace ``values`` (float32) by their sum over all ranks; for the calling thread."""
        with self.explained(f"{where}summing float32 with", self.peers):
            self._agreements.allreduce([values]).wait()

    def all_reduce_max_float64(self, values: torch.Tensor) -> None:
        """Replace ``values`` (float64) by their maximum over all ranks; for the calling thread."""
        with self.explained("agreeing on measured times with", self.peers):
            self._agreements.allreduce([values], dist.ReduceOp.MAX).wait()

    def barrier(self) -> None:
        """Wait until all ranks are here; for the calling thread."""
        with self.explained("waiting at a barrier for", self.peers):
            self._agreements.barrier().wait()

    @contextmanager
    def explained(self, doing: str, peers: list[int]) -> Iterator[None]:
        """Turn an error of torch inside into one that says who was waited for and why it failed."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = self.timeout.total_seconds()
            in_time = time.monotonic() - begin < 0.9 * seconds
            reason = "the connection is gone" if in_time else f"no answer within {seconds:g} s"
            names = self.named(peers)
            detail = str(error).splitlines()[0]
            raise CollectiveError(
                f"{self.named([self.rank])} {doing} {names}: {reason}. Look at the "
                f"output of {names} first: a rank failed there, or stopped because another did. "
                f"({detail})"
            ) from error

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The ``values`` (of one shape) of every rank, in rank order; for the calling thread."""
        everybodys = [torch.empty_like(values) for _ in range(self.world_size)]
        with self.explained("comparing with", self.peers):
            self._agreements.allgather([everybodys], [values]).wait()
        return everybodys


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def members_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default one.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group "
            "first, or start the program with torchrun"
        )
    members = group or dist.group.WORLD
    assert members is not None
    return members


def timeout_of(members: dist.ProcessGroup) -> timedelta:
    """How long the messages of a group may take, as it was created."""
    try:
        backend = members._get_backend(torch.device("cpu"))
        timeout: timedelta = backend.options._timeout
    except (RuntimeError, AttributeError):  # a group without a backend for the CPU
        return default_pg_timeout
    return timeout


def _next_meeting(members: dist.ProcessGroup) -> Store:
    """Where the members of a group meet; they do so in one order, so the count makes a name."""
    number = _meetings.get(members.group_name, 0)
    _meetings[members.group_name] = number + 1
    store = dist.distributed_c10d._get_process_group_store(members)
    return PrefixStore(f"narrowgauge/{number}", store)


def refuse(group: dist.ProcessGroup | None, error: Exception) -> None:
    """Tell ranks that come to the next meeting that this one will not, and why; do not wait."""
    rank = dist.get_rank(group)
    if rank >= 0:
        text = str(error).encode(errors="backslashreplace").decode()  # surrogates have no bytes
        _next_meeting(members_of(group)).set(f"rank{rank}", f"refused {_restarts()} {text}")


def _check_answer(rank: int, answer: str, own: int) -> None:
    kind, _, text = answer.partition(" ")
    number, _, text = text.partition(" ")
    if kind == "refused" and number == _restarts():  # not by a rank that died since
        raise CollectiveError(f"rank {rank} refused its arguments: {text}")
    if kind == "version" and number != str(VERSION):
        raise CollectiveError(
            f"rank {rank} speaks version {number}, rank {own} version {VERSION} of the bytes "
            "between ranks; install the same narrowgauge everywhere"
        )


def _check_settings(texts: Mapping[int, str]) -> None:
    """Raise unless the settings of all ranks, in JSON, are equal; on every rank with one text."""
    different = next((rank for rank, text in texts.items() if text != texts[0]), None)
    if different is None:
        return
    theirs, first = json.loads(texts[different]), json.loads(texts[0])
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    raise CollectiveError(
        "; ".join(
            f"{name} is {_short(theirs.get(name))} on rank {different}, {_short(first.get(name))} "
            "on rank 0"
            for name in names
        )
        + ". All ranks must use the same settings"
    )


def _short(text: str | None) -> str:
    if text is None:
        return "absent"
    return text if len(text) <= 200 else f"{text[:200]}…"


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _read(store: Store, key: str) -> str:
    """What lies under a key, or nothing yet."""
    return store.get(key).decode() if store.check([key]) else ""


def fingerprint(description: str) -> torch.Tensor:
    """Eight bytes (uint8) that stand for a description."""
    digest = hashlib.sha256(description.encode()).digest()[:8]
    return torch.tensor(list(digest), dtype=torch.uint8, device="cpu")


def tag_of(number: int, lane: int) -> int:
    """The tag of a message: its number within a lane of 0 to 2047.

    Messages in different lanes never meet, so ranks whose plans differ (each plan has a lane) never
    receive into buffers of the wrong size, which would end the process.
    """
    return lane << 20 | number % 2**20


def _done(work: dist.Work) -> bool:
    try:
        work.wait(timedelta(milliseconds=100))
    except RuntimeError:
        return False
    return True
