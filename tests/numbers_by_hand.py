"""Rounding by definition: exact comparison with a format's own list of values, one by one.

Slow and independent of the kernels: it knows nothing of bits, only ``format.value_of``.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from narrowgauge import FloatFormat, IntFormat


@cache
def magnitudes(format: FloatFormat | IntFormat) -> tuple[list[Fraction], list[int]]:
    """Magnitudes of a format and their codes, ascending, and one beyond the largest."""
    last = format.largest_code if isinstance(format, FloatFormat) else int(format.largest)
    numbers: dict[Fraction, int] = {}
    for code in range(last + 1):
        numbers.setdefault(Fraction(format.value_of(code)), code)
    values = sorted(numbers)
    codes = [numbers[value] for value in values]
    if isinstance(format, FloatFormat):
        exponent = max(format.max_exponent, format.min_exponent)
        spacing = Fraction(2) ** (exponent - format.mantissa_bits)
    else:
        spacing = Fraction(1)
    return [*values, values[-1] + spacing], [*codes, codes[-1] + 1]


def rounded(
    x: float, format: FloatFormat | IntFormat, rounding: str, overflow: str | None = None
) -> float:
    """``x`` rounded by definition."""
    signed = not isinstance(format, FloatFormat) or format.signed
    negative = math.copysign(1.0, x) < 0
    sign = -1.0 if negative else 1.0
    if math.isnan(x) or (not signed and (negative or x == 0)):
        return math.nan
    if math.isinf(x):
        if format.has_infinity:
            return x
        return math.nan if format.has_nan else sign * format.largest
    if rounding in ("up", "down"):
        rounding = "away" if (rounding == "up") != negative else "toward-zero"
    values, codes = magnitudes(format)
    magnitude = abs(Fraction(x))
    below = bisect.bisect_right(values, magnitude) - 1
    if below < 0:  # no zero: the smallest number
        chosen = 0
    elif below == len(values) - 1 or values[below] == magnitude:
        chosen = below
    else:
        low, high = magnitude - values[below], values[below + 1] - magnitude
        if rounding == "toward-zero":
            chosen = below
        elif rounding == "away":
            chosen = below + 1
        elif low == high and rounding == "nearest-even":
            # Both codes are even only around the gap of a format without subnormals: zero then.
            chosen = below + codes[below] % 2
        else:
            chosen = below + (low >= high)
    if chosen == len(values) - 1:
        fate = overflow or ("infinity" if format.has_infinity else "saturate")
        if rounding == "toward-zero" or isinstance(format, IntFormat):
            fate = "saturate"
        return {"infinity": sign * math.inf, "nan": math.nan}.get(fate, sign * format.largest)
    if values[chosen] == 0 and not format.has_negative_zero:
        return 0.0
    return sign * float(values[chosen])


def edges() -> torch.Tensor:
    """float32: every exponent with ties of every width, their neighbours, and both ends."""
    exponents = np.arange(255, dtype=np.uint32) << np.uint32(23)
    mantissas = {0, 1, 2**23 - 1, 2**23 - 2}
    for place in range(23):
        half = 2**place
        for kept in (0, 2 * half, 2**23 - 2 * half):  # below the tie: zeros, an odd code, all ones
            mantissas |= {kept + half, kept + half + 1, kept + half - 1}
    patterns = np.array(sorted(m for m in mantissas if m < 2**23), dtype=np.uint32)
    bits = (exponents[:, None] | patterns).ravel()
    specials = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=np.uint32)
    bits = np.concatenate([bits, specials])
    return torch.from_numpy(np.concatenate([bits, bits | np.uint32(2**31)]).view(np.float32))


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    """float32 of random bits: every kind of number."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return words.to(torch.int32).view(torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, any NaN counting as any other."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(as_integers) == b.contiguous().view(as_integers)
    return a.dtype == b.dtype and bool((equal | (a.isnan() & b.isnan())).all())
