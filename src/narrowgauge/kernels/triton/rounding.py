"""Rounding inside of Triton's kernels: on bits, as integers, after ``kernels/reference.py``.

Integers, so that nothing depends on how a GPU's floating-point units or its compiler treat
subnormal numbers and NaN, or on whether ``a * b + c`` becomes one instruction. The price is some
fifty instructions per number, where additions of magic numbers would need ten.

What is no integer here is exact on every GPU: whole numbers below 2**24 become float32, float64 is
multiplied by powers of two far inside of its exponents, and sums are followed by their error.
"""

import triton
import triton.language as tl

NAN: tl.constexpr = tl.constexpr(0x7FC00000)  # the one NaN of all backends; a GPU makes others


@triton.jit
def random_words(counter: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """The four words of each Philox4x32-7 block, side by side along the last dimension.

    ``counter``, int64, numbers the blocks; ``key0`` and ``key1``, int32, are the key's halves.
    """
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    first, second = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(low, high, zero, zero, first, second, 7)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def rounded_bits(
    bits: tl.tensor, exponent: tl.tensor, word: tl.tensor, to: tl.constexpr, rounding: tl.constexpr
) -> tl.tensor:
    """``x * 2**exponent`` rounded: codes, or the bits of values.

    Args:
        bits: of x: int32 for float32, int64 for float64.
        exponent: of the same dtype, or 0.
        word: random uint32 for stochastic rounding, else anything.
        to: :class:`.constants.Constants`.
        rounding: one of ``ROUNDINGS``.
    """
    negative = bits < 0
    magnitude = bits & to.magnitude
    field = magnitude >> to.word_mantissa
    significand = magnitude & to.mantissa
    e = tl.maximum(field, 1) - to.word_bias
    hidden = tl.where(field > 0, to.mantissa + 1, 0)
    if to.normalize:  # a subnormal number's significand, as a whole number, is a normal one
        normal = significand.to(tl.float32).to(tl.int32, bitcast=True)
        subnormal = field == 0
        e = tl.where(subnormal, (normal >> 23) - (127 + 149), e)
        significand = tl.where(subnormal, normal & to.mantissa, significand)
        hidden = tl.where(subnormal & (normal == 0), 0, to.mantissa + 1)
    significand = significand | hidden
    e = tl.minimum(e + exponent, to.top_exponent)  # beyond it ordinals would leave the word

    clamped = tl.maximum(e, to.min_exponent)
    shift = clamped - e + (to.word_mantissa - to.m)
    wider = tl.zeros_like(shift)
    if not to.subnormals:  # below the smallest normal number the spacing is that number itself
        wider = tl.where(e < to.min_exponent, to.m, 0)
        shift += wider
    capped = tl.minimum(shift, to.cap)
    kept = significand >> capped
    rest = significand - (kept << capped)
    ordinal = ((clamped - to.min_exponent) << to.m) + (kept << wider)

    toward_zero = negative
    if rounding == "nearest-even":
        odd = (ordinal + to.least) & 1  # of the code, which is one less without a zero
        increment = 2 * rest + odd > (tl.zeros_like(rest) + 1) << capped
    elif rounding == "nearest-away":
        increment = 2 * rest >= (tl.zeros_like(rest) + 1) << capped
    elif rounding == "stochastic":
        left = tl.maximum(32 - shift, 0)
        right = tl.minimum(tl.maximum(shift - 32, 0), to.cap)
        if to.wide:
            increment = ((rest << left) >> right) + word.to(tl.int64) >= 0x100000000
        else:  # the sum of two words carries if one is above what the other lacks of all ones
            fraction = (rest.to(tl.uint32) << tl.minimum(left, 31).to(tl.uint32)) >> right.to(
                tl.uint32
            )
            increment = word > (fraction ^ 0xFFFFFFFF)
    elif rounding == "up":
        increment = (rest != 0) & (negative == 0)
    elif rounding == "down":
        toward_zero = negative == 0
        increment = (rest != 0) & negative
    else:
        increment = rest != rest
    ordinal += increment.to(ordinal.dtype) << wider
    ordinal = tl.maximum(ordinal, to.least)

    result = ordinal - to.least if to.code else value_bits(ordinal, to)
    if rounding == "up" or rounding == "down":
        beyond = tl.where(toward_zero, to.top, to.overflow)
    elif rounding == "toward-zero":
        beyond = to.top
    else:
        beyond = to.overflow
    result = tl.where(ordinal > to.largest, beyond, result)
    result = tl.where(magnitude == to.infinity, to.infinite, result)

    if to.code and to.integer:
        result = tl.where(negative, 0 - result, result) & ((1 << to.bits) - 1)
    elif to.signed:
        signed = negative
        if not to.negative_zero:
            signed = signed & (result != 0)
        if not to.code:
            signed = signed & (result <= to.infinity)
        result = tl.where(signed, result | to.sign, result)
    invalid = magnitude > to.infinity
    if not to.signed:
        invalid = invalid | (magnitude == 0) | negative
    return tl.where(invalid, to.nan, result)


@triton.jit
def value_bits(ordinal: tl.tensor, to: tl.constexpr) -> tl.tensor:
    """The bits of the numbers with these ordinals, in the word."""
    normal = (ordinal << (to.word_mantissa - to.m)) + (
        (to.min_exponent + to.word_bias - 1) << to.word_mantissa
    )
    # Below the smallest normal number ordinals are whole multiples of this power of two.
    spacing: tl.constexpr = to.min_exponent - to.m
    if to.wide:
        power = (tl.zeros_like(ordinal) + ((spacing + 1023) << 52)).to(tl.float64, bitcast=True)
        small = (ordinal.to(tl.float64) * power).to(tl.int64, bitcast=True)
    else:
        floated = ordinal.to(tl.float32).to(tl.int32, bitcast=True) + (spacing << 23)
        # ... and below float32's own, bits: by integers too, lest a GPU flush them to zero.
        border: tl.constexpr = 1 << max(-126 - spacing, 0)
        small = tl.where(ordinal < border, ordinal << min(spacing + 149, 30), floated)
    return tl.where(ordinal < (1 << to.m), small, normal)


@triton.jit
def odd_sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """``x + y`` rounded to odd, in float64: see ``kernels/sums.hpp``."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    return to_odd(total, error)


@triton.jit
def to_odd(total: tl.tensor, error: tl.tensor) -> tl.tensor:
    """Of the neighbours of ``total + error`` that one whose last bit is 1, unless it is exact."""
    bits = total.to(tl.int64, bitcast=True)
    inexact = ((error < 0) | (error > 0)) & ((bits & 1) == 0)
    step = tl.where((bits < 0) == (error < 0), 1, -1)
    return (bits + tl.where(inexact, step, 0)).to(tl.float64, bitcast=True)
