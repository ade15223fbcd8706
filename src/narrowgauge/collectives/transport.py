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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_transports_made: dict[str, int] = {}  # by name of the group


class CollectiveError(RuntimeError):
    """A message of a compressed collective failed: a rank died, timed out, or disagrees."""


class Transport:
    """Point-to-point messages among the ranks of ``group``.

    Args:
        group: the ranks that talk to each other; ``None`` is the default group. All of them must
            create the transport at the same point of the program.
        timeout: how long a message may take before every waiting rank raises.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this rank is not in ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group "
                "first, or start the program with torchrun"
            )
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise RuntimeError("this rank is not a member of the given process group")
        self.world_size = dist.get_world_size(group)
        members = group or dist.group.WORLD
        assert members is not None
        # Members make their transports in the same order, so the count makes a name they share.
        number = _transports_made.get(members.group_name, 0)
        _transports_made[members.group_name] = number + 1
        store = PrefixStore(
            f"narrowgauge/{number}", dist.distributed_c10d._get_process_group_store(members)
        )
        with self._explained("connecting to", self.peers):
            self._messages = self._new_group(PrefixStore("messages", store))
            # Agreements are made by the calling thread while another sends messages: on one group
            # their order could differ between ranks.
            self._agreements = self._new_group(PrefixStore("agreements", store))
        self._next_number = 0

    def _new_group(self, store: Store) -> Any:  # torch's stubs lack the methods of groups
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout=self.timeout)

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks send to the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def reserve(self, count: int) -> int:
        """The first of ``count`` message numbers not used recently; equal on all ranks."""
        first = self._next_number
        self._next_number = first + count
        return first

    def send(self, message: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Start sending ``message`` (contiguous); it must not change until the work is done."""
        with self._explained("sending to", [to]):
            work: dist.Work = self._messages.send([message], to, tag)
        return work

    def receive(self, message: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Start receiving into ``message`` (contiguous)."""
        with self._explained("receiving from", [source]):
            work: dist.Work = self._messages.recv([message], source, tag)
        return work

    def wait(self, works: list[tuple[int, dist.Work]], phase: str) -> None:
        """Wait for messages, given as (peer, work).

        Raises:
            CollectiveError: naming the phase and all peers whose messages are missing.
        """
        missing: list[int] = []
        with self._explained(phase, missing):
            for number, (peer, work) in enumerate(works):
                try:
                    work.wait()
                except RuntimeError:
                    missing.append(peer)
                    missing += [later for later, other in works[number + 1 :] if not _done(other)]
                    raise

    def all_reduce_max(self, values: torch.Tensor) -> None:
        """Replace ``values`` (int32) by their maximum over all ranks; for the pipeline's thread."""
        with self._explained("agreeing on scale exponents with", self.peers):
            self._messages.allreduce([values], dist.ReduceOp.MAX).wait()

    def all_reduce_sum(self, values: torch.Tensor) -> None:
        """Replace ``values`` (float32) by their sum over all ranks; for the calling thread."""
        with self._explained("measuring the round-off error with", self.peers):
            self._agreements.allreduce([values]).wait()

    @contextmanager
    def _explained(self, doing: str, peers: list[int]) -> Iterator[None]:
        """Turn an error of torch inside into one that says who was waited for and why it failed."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = self.timeout.total_seconds()
            in_time = time.monotonic() - begin < 0.9 * seconds
            reason = "the connection is gone" if in_time else f"no answer within {seconds:g} s"
            names = f"rank {peers[0]}" if len(peers) == 1 else f"ranks {', '.join(map(str, peers))}"
            detail = str(error).splitlines()[0]
            raise CollectiveError(
                f"rank {self.rank} {doing} {names}: {reason}. Look at the output of {names} first: "
                f"a rank failed there, or stopped because another did. ({detail})"
            ) from error

    def agree(self, subject: str, description: str) -> None:
        """Check that all ranks pass the same ``description``; to be called by all at one point.

        Raises:
            CollectiveError: on every rank, naming those that differ from rank 0.
        """
        mine = fingerprint(description)
        all_digests = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._explained(f"comparing {subject} with", self.peers):
            self._agreements.allgather([all_digests], [mine]).wait()
        different = [
            rank for rank, theirs in enumerate(all_digests) if not theirs.equal(all_digests[0])
        ]
        if different:
            raise CollectiveError(
                f"{subject} of ranks {different} differ from those of rank 0; all ranks must use "
                f"the same. Rank {self.rank} has {description[:500]}"
            )


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
