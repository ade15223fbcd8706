"""Sums of vectors in a narrow format: how two are added, and in which order N of them.

Here an addition is what one node of a cluster does to a message before it passes it on: both
numbers are in the format, and so is their sum, the exact one rounded once. Float32 vectors hold
numbers of every format, so plain torch operations and one rounding do; where the rounding inside of
a float32 addition would show, it is done in float64, or rounded to odd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat, IntFormat
from narrowgauge.kernels import odd_sum
from narrowgauge.rounding import quantize_
from narrowgauge.scaling import LARGEST_EXPONENT, NON_FINITE, fitting_exponents

OrderLike: TypeAlias = Literal["sequential", "ring", "tree"] | tuple[Literal["hierarchical"], int]


LOWEST_EXPONENT = -149  # of a scale, which is a float32 and in no message that is really sent
PIECE = 64 * 1024
"""Elements that are taken through all their additions together, so that they stay in the cache."""


@dataclass
class Partial:
    """A sum under way: numbers of the format, and with Kahan's summation what they lost."""

    sum: Tensor
    lost: Tensor | None = None


class Arithmetic:
    """Casts and additions of flat vectors.

    Args:
        format: what every intermediate is rounded to.
        compensated: Kahan's summation, per element.
        segments: ``None``: numbers are rounded as they are. Else int64, one for each element, below
            ``count``: elements of the same segment are a message, which is scaled by the largest
            power of two under which its largest magnitude stays finite, rounded, and scaled back.
        count: number of segments.
    """

    def __init__(
        self,
        format: FloatFormat | IntFormat,
        compensated: bool,
        segments: Tensor | None = None,
        count: int = 0,
    ) -> None:
        self.format, self.compensated = format, compensated
        self._segments, self._count = segments, count
        self._exact_in_float32 = format.name == "fp32"  # whose rounding float32 does by itself
        if isinstance(format, IntFormat):
            self._dtype = torch.float32
        else:
            # Float32's own rounding goes unseen below 11 bits of mantissa (Figueroa, 1995), unless
            # its overflow to infinity or its underflow, of what is scaled, comes before: half of
            # the smallest step must be a normal number.
            finest = format.min_exponent - format.mantissa_bits
            deep = format.max_exponent >= 127 and not format.has_infinity
            deep = deep or (segments is not None and (format.exponent_bits > 6 or finest < -125))
            narrow = format.mantissa_bits <= 10 and not deep
            self._dtype = torch.float32 if narrow else torch.float64

    def cast(self, gradient: Tensor) -> Partial:
        """A float32 gradient as a node sends it; its memory may be used for that."""
        if self._exact_in_float32:
            return Partial(gradient)
        return Partial(self._rounded(gradient.to(self._dtype)))

    def add(self, total: Partial, other: Partial) -> Partial:
        """The sum of both; ``total``'s memory may be used for it.

        With Kahan's summation ``y = Q(other - c)``, ``t = Q(total + y)`` and the new ``c`` is
        ``Q(Q(t - total) - y)``, where ``c`` is what ``total`` lost; if ``other`` is a sum that lost
        something too, then ``Q`` of both. What is not finite counts as 0.
        """
        if not self.compensated:
            return Partial(self._rounded(self._plus(total.sum, other.sum, reuse=True)))
        lost, y = total.lost, other.sum
        if lost is None:
            lost = other.lost
        elif other.lost is not None:
            lost = self._rounded(self._plus(lost, other.lost))
        if lost is not None:
            y = self._rounded(self._plus(y, -lost))
        t = self._rounded(self._plus(total.sum, y))
        gained = self._rounded(self._plus(t, -total.sum))
        lost = self._rounded(self._plus(gained, -y))
        return Partial(t, torch.where(lost.isfinite(), lost, 0.0))

    def _plus(self, x: Tensor, y: Tensor, reuse: bool = False) -> Tensor:
        if self._segments is not None:
            return odd_sum(x, y)  # numbers under different scales: not even float64 holds all sums
        return x.add_(y) if reuse else x + y

    def _rounded(self, exact: Tensor) -> Tensor:
        if self._exact_in_float32:
            return exact
        if self._segments is None:
            return quantize_(exact, self.format)
        # As integers, where NaN is the largest of all.
        whole = torch.int32 if exact.dtype == torch.float32 else torch.int64
        magnitudes = exact.abs().view(whole)
        largest = magnitudes.new_zeros(self._count).scatter_reduce_(
            0, self._segments, magnitudes, "amax"
        )
        exponents = fitting_exponents(
            largest.view(exact.dtype).double(), self.format, LOWEST_EXPONENT, LARGEST_EXPONENT
        )
        scales = powers_of_two(exponents).to(exact.dtype)[self._segments]
        return quantize_(exact * scales, self.format).div_(scales)


def powers_of_two(exponents: Tensor) -> Tensor:
    """``2**exponents`` in float64; NaN for what is not finite."""
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents.cpu())
    scales = scales.to(exponents.device)
    return scales.masked_fill_(exponents == NON_FINITE, torch.nan)


class Order(Protocol):
    """Takes the nodes' gradients, in the order of ranks, and makes one sum of them."""

    def push(self, gradient: Tensor) -> None:
        """The next rank's float32 gradient; the memory is handed over until the result is there."""

    def result(self) -> Tensor:
        """The sum of all ranks. What comes next belongs to another sum."""


class Sequential:
    """Rank 0, then 1 is added, then 2, …; holds one sum."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._total: Partial | None = None

    def push(self, gradient: Tensor) -> None:
        """See :class:`Order`."""
        partial, total = self._arithmetic.cast(gradient), self._total
        self._total = partial if total is None else self._arithmetic.add(total, partial)

    def take(self) -> Partial:
        """The sum, and what it lost."""
        total, self._total = self._total, None
        assert total is not None
        return total

    def result(self) -> Tensor:
        """See :class:`Order`."""
        return self.take().sum


class Tree:
    """Neighbours in pairs, then pairs of pairs, …; holds as many sums as the tree has levels.

    A rank without a neighbour moves up as it is, so 5 ranks give ((0+1)+(2+3))+4.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._levels: list[tuple[int, Partial]] = []

    def push(self, gradient: Tensor) -> None:
        """See :class:`Order`."""
        partial, level = self._arithmetic.cast(gradient), 0
        while self._levels and self._levels[-1][0] == level:
            partial = self._arithmetic.add(self._levels.pop()[1], partial)
            level += 1
        self._levels.append((level, partial))

    def result(self) -> Tensor:
        """See :class:`Order`."""
        total = self._levels.pop()[1]
        while self._levels:
            total = self._arithmetic.add(self._levels.pop()[1], total)
        return total.sum


class Ring:
    """The vector is cut into one chunk per rank; chunk ``c`` starts at rank ``c`` and goes round.

    So its sum is ``((c + (c+1)) + …) + (c-1)``. Holds the vectors of all ranks, since the last ones
    come first in some chunk. Chunks are of equal length, the last ones shorter or empty.

    Args:
        arithmetic: its format and whether it compensates count, not its segments.
        ranks: how many.
        numel: of the vector.
        tensors: ``None``, or for scales per message: int64, the tensor each element belongs to.
            Then a message is a tensor's part of one chunk.
    """

    scales: Tensor | None = None
    """If set before the result: float32 powers of two that gradients are multiplied by first."""

    def __init__(
        self, arithmetic: Arithmetic, ranks: int, numel: int, tensors: Tensor | None = None
    ) -> None:
        self._arithmetic, self._ranks, self._numel = arithmetic, ranks, numel
        self._length = -(-numel // ranks)
        self._segments, self._count = None, 0
        if tensors is not None:
            padded = self._by_chunk(tensors)
            self._segments = padded * ranks + torch.arange(ranks, device=tensors.device)[:, None]
            self._count = int(self._segments.max()) + 1 if numel else 0
        self._pushed = 0
        self._sums: Tensor | None = None
        self._lost: Tensor | None = None
        self._cast = True

    def push(self, gradient: Tensor) -> None:
        """See :class:`Order`."""
        self._sums, self._cast = self._stored(self._sums, gradient), True
        self._pushed += 1

    def push_partial(self, partial: Partial) -> None:
        """The next rank's, which is in the format already."""
        self._sums, self._cast = self._stored(self._sums, partial.sum), False
        if self._arithmetic.compensated:
            lost = torch.zeros_like(partial.sum) if partial.lost is None else partial.lost
            self._lost = self._stored(self._lost, lost)
        self._pushed += 1

    def _stored(self, rows: Tensor | None, row: Tensor) -> Tensor:
        if rows is None:
            rows = row.new_zeros(self._ranks, self._ranks * self._length)
        rows[self._pushed, : self._numel] = row
        return rows

    def result(self) -> Tensor:
        """See :class:`Order`."""
        self._pushed = 0
        scales = None if self.scales is None else self._by_chunk(self.scales)
        parts = [self._sum(chunks, columns, scales) for chunks, columns in self._pieces()]
        return torch.cat(parts)[: self._numel]

    def _by_chunk(self, x: Tensor) -> Tensor:
        padding = self._ranks * self._length - self._numel
        return torch.nn.functional.pad(x, (0, padding)).view(self._ranks, self._length)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Chunks and their columns, a few chunks at a time or part of one."""
        some = max(1, PIECE // max(1, self._length))
        width = self._length if self._segments is not None or some > 1 else PIECE
        for first in range(0, self._ranks, some):
            for column in range(0, self._length, width) if self._length else (0,):
                yield slice(first, min(first + some, self._ranks)), slice(column, column + width)

    def _sum(self, chunks: slice, columns: slice, scales: Tensor | None) -> Tensor:
        arithmetic = self._arithmetic
        if self._segments is not None:
            segments = self._segments[chunks].flatten()
            arithmetic = Arithmetic(
                arithmetic.format, arithmetic.compensated, segments, self._count
            )
        scale = None if scales is None else scales[chunks, columns].flatten()
        starts = torch.arange(chunks.start, chunks.stop)
        total: Partial | None = None
        for hop in range(self._ranks):
            ranks = (starts + hop) % self._ranks
            partial = Partial(self._part(self._sums, ranks, starts, columns))
            if self._cast:
                partial = arithmetic.cast(partial.sum if scale is None else partial.sum.mul_(scale))
            elif self._lost is not None:
                partial.lost = self._part(self._lost, ranks, starts, columns)
            total = partial if total is None else arithmetic.add(total, partial)
        assert total is not None
        return total.sum

    def _part(self, rows: Tensor | None, ranks: Tensor, chunks: Tensor, columns: slice) -> Tensor:
        """A copy of these columns of each rank's chunk, side by side."""
        assert rows is not None
        cut = rows.view(self._ranks, self._ranks, self._length)[:, :, columns]
        return cut[ranks.to(rows.device), chunks.to(rows.device)].flatten()


class Hierarchical:
    """Groups of ``k`` ranks are summed one after the other; their sums then go round a ring.

    Source: APS (arXiv 1911.08907), hierarchical all-reduce. The last group may be smaller.
    """

    def __init__(self, group: Sequential, k: int, ring: Ring) -> None:
        self._group, self._k, self._ring, self._members = group, k, ring, 0

    def push(self, gradient: Tensor) -> None:
        """See :class:`Order`."""
        self._group.push(gradient)
        self._members += 1
        if self._members == self._k:
            self._close()

    def result(self) -> Tensor:
        """See :class:`Order`."""
        if self._members:
            self._close()
        return self._ring.result()

    def _close(self) -> None:
        self._ring.push_partial(self._group.take())
        self._members = 0


def check_order(order: object, ranks: int) -> None:
    """Raise ``ValueError`` unless ``order`` is one for so many ranks."""
    if order in ("sequential", "ring", "tree"):
        return
    if isinstance(order, tuple) and len(order) == 2 and order[0] == "hierarchical":
        k = order[1]
        if isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= ranks:
            return
        raise ValueError(f"order is {order!r}; a group has 1 to {ranks} ranks, the number of nodes")
    raise ValueError(
        f"order is {order!r}; allowed: 'sequential', 'ring', 'tree', ('hierarchical', k) with "
        "groups of k ranks"
    )


def make_order(
    order: OrderLike,
    ranks: int,
    sizes: Sequence[int],
    format: FloatFormat | IntFormat,
    *,
    compensated: bool,
    local: bool,
    device: torch.device,
) -> Order:
    """The order of a sum over ``ranks`` flat vectors, each made of tensors of these ``sizes``.

    With ``local`` every message is scaled by a power of two of its own, per tensor.
    """
    tensors = None
    if local:
        index = torch.arange(len(sizes), device=device)
        tensors = index.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=device))
    arithmetic = Arithmetic(format, compensated, tensors, len(sizes))
    if order == "sequential":
        return Sequential(arithmetic)
    if order == "tree":
        return Tree(arithmetic)
    if order == "ring":
        return Ring(arithmetic, ranks, sum(sizes), tensors)
    k = order[1]
    assert isinstance(k, int)
    ring = Ring(arithmetic, -(-ranks // k), sum(sizes), tensors)
    return Hierarchical(Sequential(arithmetic), k, ring)
