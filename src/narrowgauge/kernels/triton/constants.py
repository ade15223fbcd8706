"""What a compiled kernel knows of a format: whole numbers, fixed when it is compiled.

A kernel is compiled anew for every format and rounding it meets (about a second, then cached on
disk by Triton). In return the compiler drops all that a format does not need.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass
from functools import cache

from narrowgauge.kernels.grid import Grid


@dataclass(frozen=True, repr=False)
class Constants:
    """A grid in the words of float32 or float64: :mod:`.rounding` uses them.

    Attributes:
        wide: words of 64 bits, float64; else of 32 bits, float32.
        code: results are codes; else the bits of values.
        word_mantissa, word_bias: of that float.
        magnitude, mantissa, infinity: masks and bits of that float.
        cap: the farthest shift of a significand, beyond which nothing is left of it.
        normalize: float32's subnormals must be told apart from normal numbers.
        m, min_exponent, bits, largest, signed, negative_zero, integer, subnormals: of the grid.
        top_exponent: every number from 2 to this power on overflows, whatever it is.
        least: ordinal of the smallest number that may come out; 1 where there is no zero.
        top, overflow, infinite, nan: results, without sign.
        sign: sign bit of results.
    """

    wide: bool
    code: bool
    word_mantissa: int
    word_bias: int
    magnitude: int
    mantissa: int
    infinity: int
    cap: int
    normalize: bool
    m: int
    min_exponent: int
    bits: int
    largest: int
    signed: bool
    negative_zero: bool
    integer: bool
    subnormals: bool
    top_exponent: int
    least: int
    top: int
    overflow: int
    infinite: int
    nan: int
    sign: int

    def __repr__(self) -> str:  # Triton makes names of functions and keys of caches from it
        return "grid_" + "_".join(str(int(each)).replace("-", "n") for each in astuple(self))


def _bits(value: float, wide: bool) -> int:
    if value != value:
        return 0x7FF8 << 48 if wide else 0x7FC00000  # the one NaN of all backends
    value_format, word_format = ("<d", "<q") if wide else ("<f", "<i")
    word: int = struct.unpack(word_format, struct.pack(value_format, value))[0]
    return word


@cache
def constants(grid: Grid, *, wide: bool, code: bool = False, scaled: bool = False) -> Constants:
    """The constants of a grid.

    Args:
        grid: see there.
        wide: for input in float64, else float32. Values of a grid that reaches below float32's
            normal numbers need it: see :func:`needs_wide`.
        code: for codes, else values.
        scaled: the input is multiplied by a power of two as it is rounded.
    """
    word_mantissa, word_bias = (52, 1023) if wide else (23, 127)
    low = grid.min_exponent < -126 or (grid.min_exponent == -126 and not grid.subnormals)
    _, above = math.frexp(grid.largest_value)
    fates = grid.code_for if code else lambda fate: _bits(grid.value_for(fate), wide)
    sign = grid.bits - 1 if code else (63 if wide else 31)
    return Constants(
        wide=wide,
        code=code,
        word_mantissa=word_mantissa,
        word_bias=word_bias,
        magnitude=2 ** (63 if wide else 31) - 1,
        mantissa=2**word_mantissa - 1,
        infinity=(2 * word_bias + 1) << word_mantissa,
        cap=62 if wide else 30,
        normalize=not wide and (scaled or low),
        m=grid.mantissa_bits,
        min_exponent=grid.min_exponent,
        bits=grid.bits,
        largest=grid.largest,
        signed=grid.signed,
        negative_zero=grid.negative_zero,
        integer=grid.integer,
        subnormals=grid.subnormals,
        top_exponent=max(above, grid.min_exponent),
        least=int(not grid.signed),
        top=fates("saturate"),
        overflow=fates(grid.overflow),
        infinite=fates(grid.infinite),
        nan=grid.nan_code if code else _bits(math.nan, wide),
        sign=2**sign if code else -(2**sign),  # of a signed word
    )


def needs_wide(grid: Grid) -> bool:
    """Whether values are not all normal numbers or multiples of one in float32's words."""
    return grid.min_exponent < -126
