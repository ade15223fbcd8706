"""Block formats by definition: whole blocks in exact fractions, one number at a time.

Independent of the kernels: scales and quotients are fractions, which ``numbers_by_hand`` rounds by
comparison with the list of a format's values.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import torch

from narrowgauge import BlockFormat, FloatFormat, IntFormat
from tests import numbers_by_hand


def nearest(x: Fraction, format: FloatFormat | IntFormat) -> Fraction:
    """A magnitude to nearest-even, saturating."""
    values, codes = numbers_by_hand.magnitudes(format)
    below = bisect.bisect_right(values, x) - 1
    if below >= len(values) - 2:
        return values[-2]
    low, high = x - values[below], values[below + 1] - x
    up = low > high or (low == high and codes[below] % 2 == 1)
    return values[below + up]


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def float32(x: Fraction) -> Fraction:
    """To nearest-even, subnormals included; from the smallest one to the largest number."""
    spacing = Fraction(2) ** max(floor_log2(x) - 23, -149)
    whole, rest = divmod(x, spacing)
    whole += rest * 2 > spacing or (rest * 2 == spacing and whole % 2 == 1)
    return min(max(whole * spacing, spacing), Fraction(torch.finfo(torch.float32).max))


def scale_of(amax: Fraction, format: BlockFormat, own: Fraction) -> Fraction:
    element, scale = format.element, format.scale
    largest = Fraction(element.largest)
    if format.scale_rule in ("amax", "two-level"):
        return nearest(amax / largest / own, scale)
    smallest, greatest = Fraction(scale.smallest), Fraction(scale.largest)
    if format.scale_rule == "floor":
        if not amax:
            return smallest
        exponent = floor_log2(amax) - element.max_exponent
        return min(max(Fraction(2) ** exponent, smallest), greatest)
    if not amax:
        return Fraction(1)
    midpoint, inclusive = element.overflow_threshold
    power = Fraction(2) ** (floor_log2(amax / Fraction(midpoint)) - 1)
    while amax / power > Fraction(midpoint) or (inclusive and amax / power == Fraction(midpoint)):
        power *= 2
    return min(max(power, smallest), greatest)


def quantized(x: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """A flat float32 or float64 tensor, in float64."""
    numbers = [float(number) for number in x.tolist()]
    size = format.block_size
    blocks = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    largest = [max(map(abs, block)) if all(map(math.isfinite, block)) else None for block in blocks]
    top = Fraction(max((each for each in largest if each is not None), default=0.0))
    own = Fraction(1)
    if format.scale_rule == "two-level" and top:
        largest_element, largest_scale = (
            Fraction(each.largest) for each in (format.element, format.scale)
        )
        # Up to 2**32 the range of the scales is used, but always up to the largest element.
        reach = min(largest_element * largest_scale, max(largest_element, Fraction(2) ** 32))
        own = float32(top / reach)
    result: list[float] = []
    for block, amax in zip(blocks, largest, strict=True):
        if amax is None:
            result += [math.nan] * len(block)
            continue
        scale = scale_of(Fraction(amax), format, own)
        for number in block:
            magnitude = abs(Fraction(number))
            element = nearest(magnitude / scale / own, format.element) if scale else Fraction(0)
            sign = math.copysign(1.0, number)
            if isinstance(format.element, IntFormat) or not format.element.has_negative_zero:
                sign = sign if element else 1.0
            result.append(sign * float(element * scale * own))
    return torch.tensor(result, dtype=torch.float64)
