"""Messages between ranks: tagged point-to-point on a process group of our own.

Gloo's own collectives cannot sum narrow floats, use one direction of the link at a time
(``all_to_all_single``) or send twice the needed bytes (``reduce_scatter``); point-to-point messages
whose receives are posted first use both directions and only the needed bytes. The group is our own,
so that tags and timeouts belong to us alone; ``new_group`` does not inherit a timeout.
"""

from __future__ import annotations

import hashlib
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
        work = dist.isend(message, self._global_ranks[to], group=self._messages, tag=tag)
        assert work is not None
        return work

    def receive(self, message: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Start receiving into ``message`` (contiguous)."""
        work = dist.irecv(message, self._global_ranks[source], group=self._messages, tag=tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work, peer: int, phase: str) -> None:
        """Wait for a message.

        Raises:
            CollectiveError: naming the peer and the phase.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} {phase} rank {peer}: no answer within "
                f"{self.timeout.total_seconds():g} s, or the connection is gone. Look at the "
                f"output of rank {peer} first: it may have failed. ({str(error).splitlines()[0]})"
            ) from error

    def all_reduce_max(self, values: torch.Tensor) -> None:
        """Replace ``values`` (int8) by their maximum over all ranks."""
        try:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._messages)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} agreeing on scale exponents: a rank failed or did not answer "
                f"within {self.timeout.total_seconds():g} s. ({str(error).splitlines()[0]})"
            ) from error

    def agree(self, subject: str, description: str) -> None:
        """Check that all ranks pass the same ``description``; to be called by all at one point.

        Raises:
            CollectiveError: on every rank, naming those that differ from rank 0.
        """
        digest = hashlib.sha256(description.encode()).digest()[:8]
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_digests = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(all_digests, mine, group=self._agreements)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} comparing {subject} with the other ranks: one failed or did not "
                f"answer within {self.timeout.total_seconds():g} s. ({str(error).splitlines()[0]})"
            ) from error
        different = [
            rank for rank, theirs in enumerate(all_digests) if not theirs.equal(all_digests[0])
        ]
        if different:
            raise CollectiveError(
                f"{subject} of ranks {different} differ from those of rank 0; all ranks must use "
                f"the same. Rank {self.rank} has {description[:500]}"
            )
