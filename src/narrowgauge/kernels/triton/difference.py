"""Triton's kernels for differences in blocks: see :mod:`narrowgauge.kernels.differences`."""

import triton
import triton.language as tl

from narrowgauge.kernels.triton.elementwise import load_packed, store_packed
from narrowgauge.kernels.triton.rounding import NAN, rounded_bits


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """``2**exponent`` as float32, subnormal ones too: by their bits, which nothing flushes."""
    subnormal = (exponent * 0 + 1) << tl.maximum(exponent + 149, 0)
    bits = tl.where(exponent < -126, subnormal, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fitting_exponents(
    magnitude: tl.tensor, TOP_EXPONENT: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """Of the largest power of two under which these magnitudes, as bits, stay finite."""
    field = magnitude >> 23
    significand = magnitude & 0x7FFFFF
    normal = significand.to(tl.float32).to(tl.int32, bitcast=True)
    subnormal = field == 0
    exponent = tl.where(subnormal, (normal >> 23) - (126 + 149), field - 126)
    fraction = tl.where(subnormal, normal & 0x7FFFFF, significand)
    fitting = TOP_EXPONENT - exponent - (fraction >= LIMIT).to(tl.int32)
    fitting = tl.minimum(tl.maximum(fitting, -127), 127)
    return tl.where(magnitude == 0, 0, fitting)


@triton.jit(do_not_specialize=["numel"])
def encode_difference(
    master: tl.tensor, replica: tl.tensor, scales: tl.tensor, codes: tl.tensor, numel: tl.tensor,
    limits: tl.tensor,
    to: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, TOP_EXPONENT: tl.constexpr,
    LIMIT: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Scales and packed codes of ``master - replica``; ``limits``: half a step, the tolerance."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0).to(tl.int64)
    place = tile * TILE + tl.arange(0, TILE)
    valid = place < numel
    ahead = tl.load(master + place, mask=valid, other=0.0)
    bits = (ahead - tl.load(replica + place, mask=valid, other=0.0)).to(tl.int32, bitcast=True)
    largest = tl.max(tl.reshape(bits & 0x7FFFFFFF, (ROWS, BLOCK)), 1)
    if SCALED:
        exponent = fitting_exponents(largest, TOP_EXPONENT, LIMIT)
        reach = 0 - exponent
    else:
        exponent = tl.zeros_like(largest)
        reach = (largest >> 23) - 127
    escaped = largest >= 0x7F800000
    half_step, share = tl.load(limits), tl.load(limits + 1)
    magnitude = ahead.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(tl.reshape(magnitude, (ROWS, BLOCK)), 1).to(tl.float32, bitcast=True)
    change = half_step * power_of_two(tl.minimum(reach, 127))
    bound = tl.where(share < float("inf"), share * most, share)
    escaped = escaped | ((change <= bound) == 0)

    block = tile * ROWS + tl.arange(0, ROWS)
    scale = tl.where(escaped, 255, 127 - exponent)
    tl.store(scales + block, scale.to(tl.uint8), mask=block * BLOCK < numel)
    spread = tl.reshape(tl.broadcast_to(exponent[:, None], (ROWS, BLOCK)), (TILE,))
    lost = tl.reshape(tl.broadcast_to(escaped.to(tl.int32)[:, None], (ROWS, BLOCK)), (TILE,))
    word = tl.zeros((TILE,), tl.uint32)
    code = rounded_bits(bits, spread, word, to, "nearest-even")
    code = tl.where(valid & (lost == 0), code, 0)
    store_packed(code, codes, tile, numel, to.bits, TILE)


@triton.jit(do_not_specialize=["numel"])
def apply_difference(
    scales: tl.tensor, codes: tl.tensor, replica: tl.tensor, table: tl.tensor, numel: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """``replica += table[code] * 2**(scale - 127)``, and 0 where the scale is 255."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = place < numel
    code = load_packed(codes, place, numel, BITS, TILE)
    scale = tl.load(scales + place // BLOCK, mask=valid, other=0).to(tl.int32)
    power = tl.where(scale == 255, 0.0, power_of_two(tl.minimum(scale, 254) - 127))
    total = tl.load(replica + place, mask=valid, other=0.0)
    total += tl.load(table + code, mask=valid, other=0.0) * power
    bits = tl.where(total != total, NAN, total.to(tl.int32, bitcast=True))
    tl.store(replica + place, bits.to(tl.float32, bitcast=True), mask=valid)
