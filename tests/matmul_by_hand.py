"""Matrix products by definition, one element at a time, in whole numbers.

Independent of the kernels: a finite number is an integer, in units of 2**-320, so that sums and
products of float32 numbers are exact; zero is a float, for its sign; so are infinity and NaN.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TypeAlias

import torch

from narrowgauge import FloatFormat

UNIT = 320
Number: TypeAlias = int | float  # an int is never 0, a float is 0, infinite or NaN


def number_of(x: float) -> Number:
    """The exact number; its fraction of a unit, if there is one, raises."""
    if x == 0 or not math.isfinite(x):
        return x
    exact = Fraction(x) * 2**UNIT
    assert exact.denominator == 1
    return exact.numerator


def float_of(x: Number) -> float:
    return x if isinstance(x, float) else float(Fraction(x, 2**UNIT))


def sign_of(x: Number) -> float:
    return math.copysign(1.0, x)


def product(x: float, y: float) -> Number:
    if x == 0 or y == 0 or not (math.isfinite(x) and math.isfinite(y)):
        return x * y
    return number_of(x) * number_of(y) >> UNIT  # type: ignore[return-value]


def total(terms: list[Number]) -> Number:
    """The exact sum; a zero is negative only if all terms are −0."""
    special = [x for x in terms if isinstance(x, float) and not math.isfinite(x)]
    if special:
        return sum(special)
    exact = sum(x for x in terms if isinstance(x, int))
    if exact:
        return exact
    return -0.0 if all(x == 0 and sign_of(x) < 0 for x in terms) else 0.0


def rounded(x: Number, format: FloatFormat, rounding: str = "nearest-even") -> Number:
    """To nearest, ties to the even code, or toward zero; IEEE-like formats with subnormals."""
    if isinstance(x, float):
        if math.isinf(x):
            instead = math.nan if format.has_nan else number_of(math.copysign(format.largest, x))
            return x if format.has_infinity else instead
        return x
    magnitude, sign = abs(x), 1 if x > 0 else -1
    exponent = max(magnitude.bit_length() - 1 - UNIT, format.min_exponent)
    spacing = 1 << exponent - format.mantissa_bits + UNIT
    whole, rest = divmod(magnitude, spacing)
    # With mantissa bits code and significand are odd together; without, codes count exponents.
    odd = whole if format.mantissa_bits else whole and exponent - format.min_exponent + 1
    if rounding == "nearest-even":
        whole += 2 * rest > spacing or (2 * rest == spacing and odd % 2)
    result = whole * spacing
    if not result:
        return sign * 0.0
    largest = number_of(format.largest)
    if result > largest:
        if rounding == "toward-zero" or not format.has_infinity:
            return sign * largest
        return sign * math.inf
    return sign * result


def element(
    a: list[float],
    b: list[float],
    multiply: FloatFormat | None,
    accumulate: FloatFormat,
    compensated: bool,
    chunk: int,
    rounding: str = "nearest-even",
) -> float:
    """One element of the product, of operands that are already rounded."""

    def q(*terms: Number) -> Number:
        return rounded(total(list(terms)), accumulate, rounding)

    def negative(x: Number) -> Number:
        return -x

    products = [product(x, y) for x, y in zip(a, b, strict=True)]
    if multiply is not None:
        products = [rounded(x, multiply, rounding) for x in products]
    s: Number = 0.0
    c: Number = 0.0
    for first in range(0, len(products), chunk):
        some = products[first : first + chunk]
        if not compensated:
            s = q(s, *some)
            continue
        y = q(negative(c), *some)
        t = q(s, y)
        c = q(q(t, negative(s)), negative(y))
        c = 0.0 if isinstance(c, float) and not math.isfinite(c) else c
        s = t
    return float_of(s)


def matrix(a: torch.Tensor, b: torch.Tensor, *how: object) -> torch.Tensor:
    """The product of two matrices."""
    rows, columns = a.tolist(), b.t().tolist()
    values = [[element(row, column, *how) for column in columns] for row in rows]  # type: ignore[arg-type]
    return torch.tensor(values, dtype=torch.float32).view(a.shape[0], b.shape[1])
