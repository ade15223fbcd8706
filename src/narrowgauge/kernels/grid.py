"""What the kernels need to know about a format: a few integers instead of the format's whole story.

Every signed format orders its magnitudes by *ordinal*: 0 is zero, 1 the smallest number, and so on
up to the largest. For floating-point formats the ordinal is the code without its sign, for integers
the integer itself; so one description serves both, an integer format being a floating-point one
whose numbers are all "subnormal".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from narrowgauge.formats import BlockFormat, FloatFormat, IntFormat, format_of

ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic")
OVERFLOWS = ("infinity", "saturate", "nan")


@dataclass(frozen=True, eq=False)  # grid_of makes each once; compared by identity, which is fast
class Grid:
    """The numbers of one format, and what becomes of everything that is not among them.

    Attributes:
        name: of the format.
        mantissa_bits: without the hidden bit.
        min_exponent: below it the spacing no longer shrinks.
        bits: width of a code.
        largest: ordinal of the largest finite number.
        largest_value: that number.
        overflow: what a finite number beyond it becomes: ``"infinity"``, ``"saturate"``, ``"nan"``.
        infinite: what an infinite input becomes, in the same words.
        infinity_code, nan_code: without sign; 0 where the format has none.
        has_nan, negative_zero, subnormals, signed: as in :class:`FloatFormat`.
        integer: codes are two's complement.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    bits: int
    largest: int
    largest_value: float
    overflow: str
    infinite: str
    infinity_code: int
    nan_code: int
    has_nan: bool
    negative_zero: bool
    subnormals: bool
    signed: bool
    integer: bool

    def value_for(self, fate: str) -> float:
        """The magnitude that overflow or an infinite input turns into."""
        return {"infinity": math.inf, "nan": math.nan}.get(fate, self.largest_value)

    def code_for(self, fate: str) -> int:
        """The code, without sign, that overflow or an infinite input turns into."""
        return {"infinity": self.infinity_code, "nan": self.nan_code}.get(fate, self.largest_code)

    @property
    def largest_code(self) -> int:
        """Code of the largest number: its ordinal, and one less without a zero."""
        return self.largest if self.signed else self.largest - 1


@dataclass(frozen=True)
class Sums:
    """How products are made and added up; :func:`narrowgauge.matmul` explains.

    Attributes:
        multiply: what each product is rounded to; ``None``: nothing, they are exact.
        accumulate: what sums are rounded to.
        compensated: Kahan's summation.
        chunk: products added exactly before each rounding, at least 1.
        rounding: one of :data:`ROUNDINGS`, for all of them.
    """

    multiply: Grid | None
    accumulate: Grid
    compensated: bool
    chunk: int
    rounding: str


@dataclass(frozen=True, eq=False)  # compared by identity, as grids are
class DifferenceBlocks:
    """How differences are coded in blocks: see :mod:`narrowgauge.kernels.differences`.

    Attributes:
        grid: of the codes; it saturates.
        size: elements per block, a power of two from 16 to 1024.
        scaled: each block has a power of two of its own; else all have 2**0.
        top_exponent, limit: of the number from which on magnitudes would overflow, as ``frexp``
            gives them; the fraction as the 23 bits that float32 keeps of it.
        half_step: half of the distance of the largest elements, by which rounding may change a
            number under a scale of 1; without scales, as a share of the number's power of two.
    """

    grid: Grid
    size: int
    scaled: bool
    top_exponent: int
    limit: int
    half_step: float


def check_rounding(rounding: str) -> None:
    """Raise ``ValueError`` unless ``rounding`` is one of :data:`ROUNDINGS`."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}; allowed: {', '.join(map(repr, ROUNDINGS))}")


def check_overflow(overflow: str | None) -> None:
    """Raise ``ValueError`` unless ``overflow`` is ``None`` or one of :data:`OVERFLOWS`."""
    if overflow is not None and overflow not in OVERFLOWS:
        raise ValueError(
            f"overflow is {overflow!r}; allowed: None, {', '.join(map(repr, OVERFLOWS))}"
        )


@cache
def grid_of(name: str, overflow: str | None = None) -> Grid:
    """The grid of a scalar format.

    Args:
        name: of a :class:`FloatFormat` or :class:`IntFormat`.
        overflow: one of :data:`OVERFLOWS`; ``None`` means infinity where the format has one, else
            saturate.

    Raises:
        ValueError: the overflow is unknown, or the format lacks the value it asks for.
    """
    format = format_of(name)
    if isinstance(format, BlockFormat):
        raise ValueError(f"{name} is a block format; the kernels work on its elements' format")
    check_overflow(overflow)
    has = {"infinity": format.has_infinity, "nan": format.has_nan, "saturate": True}
    if overflow is not None and not has[overflow]:
        raise ValueError(
            f"overflow is {overflow!r}, but {name} has no {overflow.replace('nan', 'NaN')}; "
            f"allowed: None, {', '.join(repr(each) for each in OVERFLOWS if has[each])}"
        )
    default = "infinity" if format.has_infinity else "saturate"
    infinite = default if format.has_infinity or not format.has_nan else "nan"
    if isinstance(format, IntFormat):
        exponent = format.bits - 1
        return Grid(
            name, exponent, exponent, format.bits, int(format.largest), format.largest, "saturate",
            infinite, 0, 0, has_nan=False, negative_zero=False, subnormals=True, signed=True,
            integer=True,
        )  # fmt: skip
    assert isinstance(format, FloatFormat)
    return Grid(
        name,
        format.mantissa_bits,
        format.min_exponent,
        format.bits,
        format.largest_code + (not format.signed),
        format.largest,
        overflow or default,
        infinite,
        format.infinity_code or 0,
        format.nan_code or 0,
        format.has_nan,
        format.has_negative_zero,
        format.subnormals,
        format.signed,
        integer=False,
    )
