"""The first message of a reduction: which one its sender makes, and what fits behind that.

Ranks that reduce different tensors must notice it before one receives into a buffer too small for
what comes, which would end the process. So every reduction begins with eight bytes that stand for
what is reduced and how, and every rank receives them with room for more: the numbers of a small
float32 reduction, or the first codes of a narrow one, follow in the same message, because for small
messages their number is what counts. The trade-off: some MB for every reduction under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from narrowgauge.collectives.layout import Layout
from narrowgauge.collectives.transport import CollectiveError, Transport

FINGERPRINT_BYTES = 8
REFUSAL = torch.full((FINGERPRINT_BYTES,), 255, dtype=torch.uint8, device="cpu")

_ROOM = 1 << 22
"""Bytes behind the fingerprint, over all ranks; must be the same for all versions that speak to one
another."""
_SMALL = 1 << 18
"""Elements, over all ranks, up to which float32 is sent to everybody in one step, not by Gloo in
several. Between two ranks that takes no more bytes either, so they do it with twice as many."""


def room(world_size: int) -> int:
    """Bytes that may follow a fingerprint."""
    return _ROOM // world_size


def carries(layout: Layout, agreed: bool, world_size: int) -> bool:
    """Whether the first message of each rank travels with its greeting.

    Args:
        layout: of the reduction.
        agreed: whether ranks agree on exponents first, for which they must have been greeted.
        world_size: number of ranks.
    """
    if layout.kind == "float32":
        return layout.numel <= (2 * _SMALL if world_size == 2 else _SMALL // world_size)
    if layout.kind == "all-gather" or agreed or not layout.numel:
        return False
    return max(piece.size for piece in layout.chunks[0]) <= room(world_size)


class GreetingBuffers:
    """Buffers in which the greetings of all peers arrive; used again by whatever comes next."""

    def __init__(self, peers: Sequence[int], world_size: int) -> None:
        self._peers = peers
        self._size = FINGERPRINT_BYTES + room(world_size)
        self._free: list[dict[int, torch.Tensor]] = []

    def take(self) -> dict[int, torch.Tensor]:
        """A buffer for each peer, whatever is in it."""
        if self._free:
            return self._free.pop()
        return {
            peer: torch.empty(self._size, dtype=torch.uint8, device="cpu") for peer in self._peers
        }

    def give_back(self, greetings: dict[int, torch.Tensor]) -> None:
        """What nobody reads any more."""
        self._free.append(greetings)


def headed(fingerprint: torch.Tensor, size: int) -> torch.Tensor:
    """A message that begins with the fingerprint and has room for ``size`` bytes after it."""
    message = torch.zeros(FINGERPRINT_BYTES + size, dtype=torch.uint8, device="cpu")
    message[:FINGERPRINT_BYTES] = fingerprint
    return message


def check(
    greetings: Mapping[int, torch.Tensor],
    fingerprint: torch.Tensor,
    description: str,
    transport: Transport,
) -> None:
    """Raise unless all ranks make the reduction that this one makes.

    Raises:
        CollectiveError: a rank refused its arguments, or passes others than this one.
    """
    named, own = transport.named, transport.named([transport.rank])
    theirs = {peer: greeting[:FINGERPRINT_BYTES] for peer, greeting in greetings.items()}
    refused = [peer for peer, it in theirs.items() if it.equal(REFUSAL)]
    if refused:
        raise CollectiveError(
            f"{named(refused)} refused the arguments of the compressed all-reduce that {own} "
            f"makes, or failed before it; look at the output of {named(refused)}"
        )
    different = [peer for peer, it in theirs.items() if not it.equal(fingerprint)]
    if different:
        raise CollectiveError(
            f"other tensors, formats, scale or op are passed to a compressed all-reduce by "
            f"{named(different)} than by {own}; all ranks must pass the same. {own} passes "
            f"{description[:500]}"
        )
