"""Sums of vectors in a narrow format: how two are added, and in which order N of them.

Here an addition is what one node of a cluster does to a message before it passes it on: both
numbers are in the format, and so is their sum, the exact one rounded once. Float32 vectors hold
numbers of every format, so plain torch operations and one rounding do; where the rounding inside of
a float32 addition would show, it is done in float64, or rounded to odd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat, IntFormat
from narrowgauge.kernels import odd_sum
from narrowgauge.rounding import quantize_
from narrowgauge.scaling import NON_FINITE, fitting_exponents

OrderLike: TypeAlias = Literal["sequential", "ring", "tree"] | tuple[Literal["hierarchical"], int]


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
        segments: ``None``: numbers are rounded as they are. Else int64, one for each element:
            elements of the same segment are a message, which is scaled by the largest power of two
            under which its largest magnitude stays finite, rounded, and scaled back.
    """

    def __init__(
        self, format: FloatFormat | IntFormat, compensated: bool, segments: Tensor | None = None
    ) -> None:
        self._format = format
        self._compensated = compensated
        self._segments = segments
        self._count = 0 if segments is None or not len(segments) else int(segments.max()) + 1
        self._exact_in_float32 = format.name == "fp32"  # whose rounding float32 does by itself
        # Float32's own rounding goes unseen below 11 bits of mantissa (Figueroa, 1995), unless its
        # overflow to infinity comes before the format's own way to overflow.
        self._fits_float32 = isinstance(format, IntFormat) or (
            format.mantissa_bits <= 10 and (format.max_exponent < 127 or format.has_infinity)
        )

    def cast(self, gradient: Tensor) -> Partial:
        """A float32 gradient as a node sends it; its memory may be used for that."""
        if self._exact_in_float32:
            return Partial(gradient)
        exact = self._fits_float32 and self._segments is None
        return Partial(self._rounded(gradient if exact else gradient.double()))

    def add(self, total: Partial, other: Partial) -> Partial:
        """The sum of both; ``total``'s memory may be used for it.

        With Kahan's summation ``y = Q(other - c)``, ``t = Q(total + y)`` and the new ``c`` is
        ``Q(Q(t - total) - y)``, where ``c`` is what ``total`` lost; if ``other`` is a sum that lost
        something too, then ``Q`` of both. What is not finite counts as 0.
        """
        if not self._compensated:
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
            return quantize_(exact, self._format)
        segments = self._segments[: len(exact)]
        # As integers, where NaN is the largest of all.
        magnitudes = exact.abs().view(torch.int64)
        largest = magnitudes.new_zeros(self._count).scatter_reduce_(0, segments, magnitudes, "amax")
        scales = powers_of_two(fitting_exponents(largest.view(torch.float64), self._format))
        per_element = scales[segments]
        return quantize_(exact * per_element, self._format).div_(per_element)


def powers_of_two(exponents: Tensor) -> Tensor:
    """``2**exponents`` in float64; NaN for what is not finite."""
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents.cpu())
    scales = scales.to(exponents.device)
    return scales.masked_fill_(exponents == NON_FINITE, torch.nan)


class Order(Protocol):
    """Takes partial sums, in the order of ranks, and makes one of them."""

    arithmetic: Arithmetic

    def push(self, partial: Partial) -> None:
        """The next rank's; the memory is handed over."""

    def result(self) -> Partial:
        """The sum of all ranks."""


class Sequential:
    """Rank 0, then 1 is added, then 2, …; holds one sum."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self._total: Partial | None = None

    def push(self, partial: Partial) -> None:
        """See :class:`Order`."""
        total = self._total
        self._total = partial if total is None else self.arithmetic.add(total, partial)

    def result(self) -> Partial:
        """See :class:`Order`."""
        assert self._total is not None
        return self._total


class Tree:
    """Neighbours in pairs, then pairs of pairs, …; holds as many sums as the tree has levels.

    A rank without a neighbour moves up as it is, so 5 ranks give ((0+1)+(2+3))+4.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self._levels: list[tuple[int, Partial]] = []

    def push(self, partial: Partial) -> None:
        """See :class:`Order`."""
        level = 0
        while self._levels and self._levels[-1][0] == level:
            partial = self.arithmetic.add(self._levels.pop()[1], partial)
            level += 1
        self._levels.append((level, partial))

    def result(self) -> Partial:
        """See :class:`Order`."""
        total = self._levels[-1][1]
        for _, partial in reversed(self._levels[:-1]):
            total = self.arithmetic.add(partial, total)
        return total


class Ring:
    """The vector is cut into one chunk per rank; chunk ``c`` starts at rank ``c`` and goes round.

    So its sum is ``((c + (c+1)) + …) + (c-1)``. Holds the vectors of all ranks, since the last ones
    come first in some chunk. Chunks are of equal length, the last ones shorter or empty.

    Args:
        format: as in :class:`Arithmetic`.
        compensated: as there.
        ranks: how many.
        tensors: ``None``, or for scales per message: int64, the tensor each element belongs to.
            Then a message is a tensor's part of one chunk.
        numel: of the vector.
    """

    def __init__(
        self,
        format: FloatFormat | IntFormat,
        compensated: bool,
        ranks: int,
        tensors: Tensor | None,
        numel: int,
    ) -> None:
        self._ranks, self._numel, self._pushed = ranks, numel, 0
        self._chunk = -(-numel // ranks)
        segments = None
        if tensors is not None:
            padded = torch.nn.functional.pad(tensors, (0, self._chunk * ranks - numel))
            chunks = torch.arange(ranks, device=tensors.device).repeat_interleave(self._chunk)
            segments = padded * ranks + chunks
        self.arithmetic = Arithmetic(format, compensated, segments)
        self._sums: Tensor | None = None
        self._lost: Tensor | None = None

    def push(self, partial: Partial) -> None:
        """See :class:`Order`."""
        if self._sums is None:
            shape = (self._ranks, self._ranks * self._chunk)
            self._sums = partial.sum.new_zeros(shape)
            self._lost = None if partial.lost is None else partial.sum.new_zeros(shape)
        self._sums[self._pushed, : self._numel] = partial.sum
        if self._lost is not None and partial.lost is not None:
            self._lost[self._pushed, : self._numel] = partial.lost
        self._pushed += 1

    def result(self) -> Partial:
        """See :class:`Order`."""
        total = self._hop(0)
        for hop in range(1, self._ranks):
            total = self.arithmetic.add(total, self._hop(hop))
        lost = None if total.lost is None else total.lost[: self._numel]
        return Partial(total.sum[: self._numel], lost)

    def _hop(self, hop: int) -> Partial:
        """For each chunk what the rank adds that is ``hop`` ranks after its first."""
        assert self._sums is not None
        chunks = torch.arange(self._ranks, device=self._sums.device)
        ranks = (chunks + hop) % self._ranks

        def of(x: Tensor) -> Tensor:
            return x.view(self._ranks, self._ranks, self._chunk)[ranks, chunks].flatten()

        return Partial(of(self._sums), None if self._lost is None else of(self._lost))


class Hierarchical:
    """Groups of ``k`` ranks are summed one after the other; their sums then go round a ring.

    Source: APS (arXiv 1911.08907), hierarchical all-reduce. The last group may be smaller.
    """

    def __init__(self, group: Arithmetic, k: int, ring: Ring) -> None:
        self.arithmetic = group
        self._k, self._ring, self._members = k, ring, 0
        self._group = Sequential(group)

    def push(self, partial: Partial) -> None:
        """See :class:`Order`."""
        self._group.push(partial)
        self._members += 1
        if self._members == self._k:
            self._close()

    def result(self) -> Partial:
        """See :class:`Order`."""
        if self._members:
            self._close()
        return self._ring.result()

    def _close(self) -> None:
        self._ring.push(self._group.result())
        self._group, self._members = Sequential(self.arithmetic), 0


def check_order(order: object, ranks: int) -> None:
    """Raise ``ValueError`` unless ``order`` is one for so many ranks."""
    if order in ("sequential", "ring", "tree"):
        return
    if isinstance(order, tuple | list) and len(order) == 2 and order[0] == "hierarchical":
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
    whole = Arithmetic(format, compensated, tensors)
    if order == "sequential":
        return Sequential(whole)
    if order == "tree":
        return Tree(whole)
    if order == "ring":
        return Ring(format, compensated, ranks, tensors, sum(sizes))
    k = order[1]
    assert isinstance(k, int)
    return Hierarchical(whole, k, Ring(format, compensated, -(-ranks // k), tensors, sum(sizes)))
