"""How tensors are cut into messages.

A reduction works on one flat buffer in which several tensors lie one after the other, each with a
format of its own. The buffer is cut into *chunks* that travel through the pipeline one behind the
other; with more than two ranks a chunk is cut into one *piece* per rank, which that rank sums for
all. A piece is one message: first one exponent byte per *segment*, then the packed codes. Segments
are the parts of tensors inside a piece: no scale is ever shared between tensors. Cutting by bytes
rather than by tensors keeps the messages equal, at the price of more than one scale per tensor.
Tensors in block formats are cut between blocks; their scales lie with the codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from narrowgauge.formats import BlockFormat, Format
from narrowgauge.kernels.blocks import packed_size

Kind: TypeAlias = Literal["one-shot", "two-shot", "reduce-scatter", "all-gather", "float32"]

MESSAGE_BYTES = 1 << 19
"""Messages of about this size: small enough to overlap codec and wire, large enough that the cost
per message does not count."""

_ALIGNMENT = 16  # elements; vector kernels start at the beginning of a cache line


@dataclass(frozen=True)
class Segment:
    """Elements ``begin`` to ``end`` of the flat buffer, all of one tensor and format.

    ``offset`` and ``size`` are bytes: where their codes (and scales per block) lie in the message.
    """

    tensor: int
    begin: int
    end: int
    format: Format
    offset: int
    size: int


@dataclass(frozen=True)
class Piece:
    """One message: ``size`` bytes, ``len(segments)`` of them exponents."""

    segments: tuple[Segment, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """All messages of one reduction.

    Attributes:
        numel: elements in the flat buffer.
        sizes: elements per tensor.
        formats: format per tensor.
        chunks: per chunk its pieces: one (one-shot), or one per rank in rank order.
        kind: ``"one-shot"``: everybody sends everything to all. ``"two-shot"``: each rank sums its
            pieces and sends the sums to all. ``"reduce-scatter"`` and ``"all-gather"`` are the two
            halves of that, where the pieces of a rank are its shard: one of as many equal parts of
            the buffer as there are ranks. ``"float32"``: the buffer is summed as it is, uncut.
    """

    numel: int
    sizes: tuple[int, ...]
    formats: tuple[Format, ...]
    chunks: tuple[tuple[Piece, ...], ...]
    kind: Kind

    @property
    def steps(self) -> int:
        """Messages that wait for one another."""
        return 2 if self.kind == "two-shot" else 1


def cut(
    sizes: Sequence[int],
    formats: Sequence[Format],
    world_size: int,
    message_bytes: int,
    kind: Kind | None = None,
) -> Layout:
    """Cut tensors of ``sizes`` elements into messages of about ``message_bytes`` bytes.

    Without ``kind`` it is an all-reduce: two ranks exchange everything in one step (one-shot); more
    ranks reduce in two (two-shot), which needs the fewest bytes: 2(p-1)/p of the packed buffer per
    rank.
    """
    kind = kind or ("one-shot" if world_size <= 2 else "two-shot")
    if kind == "float32":
        return Layout(sum(sizes), tuple(sizes), tuple(formats), (), kind)
    pieces_per_chunk = 1 if kind == "one-shot" else world_size
    total_bytes = sum(s * f.bits for s, f in zip(sizes, formats, strict=True)) / 8
    chunk_count = max(1, round(total_bytes / (message_bytes * pieces_per_chunk)))
    if kind in ("reduce-scatter", "all-gather"):
        chunks = _shard_chunks(sizes, formats, world_size, chunk_count)
    else:
        shares = [share for share in _shares(chunk_count) for _ in range(pieces_per_chunk)]
        borders = _borders(sizes, formats, shares)
        pieces = [_piece(sizes, formats, begin, end) for begin, end in pairwise(borders)]
        chunks = tuple(
            tuple(pieces[first : first + pieces_per_chunk])
            for first in range(0, len(pieces), pieces_per_chunk)
        )
    return Layout(sum(sizes), tuple(sizes), tuple(formats), chunks, kind)


def shard_borders(numel: int, world_size: int) -> list[int]:
    """Where the shard of each rank begins, and the end: all of one size, but for the last."""
    size = -(-numel // world_size)
    return [min(rank * size, numel) for rank in range(world_size + 1)]


def _shard_chunks(
    sizes: Sequence[int], formats: Sequence[Format], world_size: int, chunk_count: int
) -> tuple[tuple[Piece, ...], ...]:
    """Pieces that lie in the shards of their ranks, as far into each shard in every chunk."""
    borders = shard_borders(sum(sizes), world_size)
    step = max(1, -(-borders[1] // chunk_count))
    step += -step % math.lcm(
        _ALIGNMENT, *(f.block_size for f in formats if isinstance(f, BlockFormat))
    )
    return tuple(
        tuple(
            _piece(sizes, formats, min(begin + offset, end), min(begin + offset + step, end))
            for begin, end in pairwise(borders)
        )
        for offset in range(0, max(borders[1], 1), step)
    )


def _shares(chunk_count: int) -> list[int]:
    """How large the chunks are, in proportion.

    The first and the last are small: nothing travels before the first is encoded, nor after the
    last has arrived.
    """
    if chunk_count < 4:
        return [1] * chunk_count
    return [1, 2, *[4] * (chunk_count - 2), 2, 1]


def _borders(sizes: Sequence[int], formats: Sequence[Format], shares: Sequence[int]) -> list[int]:
    """Element indices that cut the flat buffer into parts whose bytes are in these proportions."""
    bits_per_share = sum(s * f.bits for s, f in zip(sizes, formats, strict=True)) / sum(shares)
    targets = [bits_per_share * before for before in accumulate(shares)][:-1]
    borders = [0]
    begin, bits_before = 0, 0.0
    for size, format in zip(sizes, formats, strict=True):
        bits = size * format.bits
        while len(borders) <= len(targets) and bits_before + bits >= targets[len(borders) - 1]:
            index = begin + int((targets[len(borders) - 1] - bits_before) // format.bits)
            if isinstance(format, BlockFormat):
                index -= (index - begin) % math.lcm(_ALIGNMENT, format.block_size)
            else:
                index -= index % _ALIGNMENT
            borders.append(max(borders[-1], index))
        begin += size
        bits_before += bits
    return borders + [begin] * (len(shares) + 1 - len(borders))


def _piece(sizes: Sequence[int], formats: Sequence[Format], begin: int, end: int) -> Piece:
    parts = []
    tensor_begin = 0
    for tensor, (size, format) in enumerate(zip(sizes, formats, strict=True)):
        first, last = max(tensor_begin, begin), min(tensor_begin + size, end)
        if first < last:
            parts.append((tensor, first, last, format))
        tensor_begin += size
    offset = len(parts)  # one exponent byte each comes first
    segments = []
    for tensor, first, last, format in parts:
        size = packed_size(last - first, format)
        segments.append(Segment(tensor, first, last, format, offset, size))
        offset += size
    return Piece(tuple(segments), offset)
