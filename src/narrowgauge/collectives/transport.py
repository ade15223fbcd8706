"""Messages between ranks: tagged point-to-point on a process group of our own.

Gloo's own collectives cannot sum narrow floats, use one direction of the link at a time
(``all_to_all_single``) or send twice the needed bytes (``reduce_scatter``); point-to-point messages
whose receives are posted first use both directions and only the needed bytes. The group is our own,
so that tags and timeouts belong to us alone; ``new_group`` does not inherit a timeout.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


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
        self._global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._messages = self._new_group()
        # Agreements are made by the calling thread while another sends messages: on one group their
        # order could differ between ranks.
        self._agreements = self._new_group()
        self._next_tag = 0

    def _new_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            self._global_ranks, self.timeout, "gloo", use_local_synchronization=True
        )
        return group

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks send to the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def reserve_tags(self, count: int) -> int:
        """The first of ``count`` tags not used by a recent message; equal on all ranks."""
        first = self._next_tag
        self._next_tag = (first + count) % 2**30
        return first

    def send(self, message: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Start sending ``message`` (contiguous); it must not change until the work is done."""
        with self._explained("sending to", [to]):
            work = dist.isend(message, self._global_ranks[to], group=self._messages, tag=tag)
        assert work is not None
        return work

    def receive(self, message: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Start receiving into ``message`` (contiguous)."""
        with self._explained("receiving from", [source]):
            work = dist.irecv(message, self._global_ranks[source], group=self._messages, tag=tag)
        assert work is not None
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
        """Replace ``values`` (int8) by their maximum over all ranks; for the pipeline's thread."""
        with self._explained("agreeing on scale exponents with", self.peers):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._messages)

    def all_reduce_sum(self, values: torch.Tensor) -> None:
        """Replace ``values`` (float32) by their sum over all ranks; for the calling thread."""
        with self._explained("measuring the round-off error with", self.peers):
            dist.all_reduce(values, group=self._agreements)

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
        digest = hashlib.sha256(description.encode()).digest()[:8]
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_digests = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._explained(f"comparing {subject} with", self.peers):
            dist.all_gather(all_digests, mine, group=self._agreements)
        different = [
            rank for rank, theirs in enumerate(all_digests) if not theirs.equal(all_digests[0])
        ]
        if different:
            raise CollectiveError(
                f"{subject} of ranks {different} differ from those of rank 0; all ranks must use "
                f"the same. Rank {self.rank} has {description[:500]}"
            )


def _done(work: dist.Work) -> bool:
    try:
        work.wait(timedelta(milliseconds=100))
    except RuntimeError:
        return False
    return True
