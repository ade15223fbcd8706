"""Scales are the largest powers of two that keep a tensor's largest magnitude finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge import format_of
from narrowgauge.scaling import (
    LARGEST_EXPONENT,
    NON_FINITE,
    largest_exponents,
    needs_scale,
    scale_exponent,
    shared_exponents,
)

FORMATS = ["e5m2", "e4m3", "e4m3fn", "e4m3fnuz", "e3m4", "e3m0", "e2m1fn", "e2m3fn", "int8", "int4"]


def bits(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).abs().view(torch.int32)


def rounds_to_finite(value: float, name: str) -> bool:
    """Whether nearest-even rounding of ``value`` is finite, from the format's values."""
    values = [v for v in format_of(name).values().double().tolist() if math.isfinite(v)]
    positive = sorted({v for v in values if v >= 0})
    largest, before = positive[-1], positive[-2]
    # The next value the format would have, one more step of the same size (or twice it for a
    # format without mantissa, whose steps double).
    no_mantissa = name.endswith("m0")
    step = (largest - before) * (2 if no_mantissa else 1)
    middle = largest + step / 2
    if value != middle:
        return value < middle
    finite_codes = [
        code for code, v in enumerate(format_of(name).values().tolist()) if v == largest
    ]
    return finite_codes[0] % 2 == 0


@pytest.mark.parametrize("name", FORMATS)
@given(exponent=st.integers(-90, 90), mantissa=st.integers(0, 2**23 - 1))
def test_exponent_is_the_largest_that_stays_finite(name: str, exponent: int, mantissa: int) -> None:
    value = math.ldexp(1 + mantissa / 2**23, exponent)
    k = scale_exponent(value, format_of(name))
    assert rounds_to_finite(math.ldexp(value, k), name)
    assert not rounds_to_finite(math.ldexp(value, k + 1), name)


@pytest.mark.parametrize("name", FORMATS)
def test_magnitudes_at_the_overflow_threshold_are_exact(name: str) -> None:
    middle, inclusive = format_of(name).overflow_threshold
    assert scale_exponent(middle, format_of(name)) == (-1 if inclusive else 0)
    step = torch.tensor(middle, dtype=torch.float32)
    neighbours = [
        torch.nextafter(step, torch.tensor(0.0)).item(),
        torch.nextafter(step, torch.tensor(math.inf)).item(),
    ]
    assert [scale_exponent(value, format_of(name)) for value in neighbours] == [0, -1]


def test_zero_has_scale_one_and_non_finite_is_marked() -> None:
    exponents = [scale_exponent(value, format_of("e5m2")) for value in (0.0, math.nan, math.inf)]
    assert exponents == [0, NON_FINITE, NON_FINITE]


def test_tiny_magnitudes_stay_within_float32_powers_of_two() -> None:
    assert scale_exponent(2.0**-149, format_of("e5m2")) == LARGEST_EXPONENT


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 256])
@given(exponent=st.integers(-90, 90), mantissa=st.integers(0, 2**23 - 1))
def test_published_rule_is_the_ceiling_of_the_logarithm(
    world_size: int, exponent: int, mantissa: int
) -> None:
    value = math.ldexp(1 + mantissa / 2**23, exponent)
    (largest,) = largest_exponents(bits(value), world_size).tolist()
    product = value * world_size  # exact in float64
    assert 2.0 ** (largest - 1) < product <= 2.0**largest


def test_published_scale_brings_the_largest_exponent_to_the_top_of_the_format() -> None:
    agreed = torch.tensor([3, 129], dtype=torch.int32)
    assert shared_exponents(agreed, format_of("e5m2")).tolist() == [12, 15 - 129]
    assert shared_exponents(agreed, format_of("e3m0")).tolist() == [0, 3 - 129]


def test_all_zero_loses_and_non_finite_wins_the_agreement() -> None:
    zero, nan, infinity, one, tiny, huge = largest_exponents(
        bits(0.0, math.nan, math.inf, 1.0, 2.0**-149, torch.finfo(torch.float32).max), 4096
    )
    assert zero < tiny < one < huge < nan == infinity
    exponents = shared_exponents(torch.stack([zero, nan, one]), format_of("e5m2"))
    assert exponents.tolist() == [0, NON_FINITE, 15 - 12]


def test_formats_with_the_exponents_of_float32_need_no_scale() -> None:
    assert [needs_scale(format_of(name)) for name in ("bf16", "fp32", "e5m2", "int8", "fp16")] == [
        False,
        False,
        True,
        True,
        True,
    ]
