"""Triton's kernels that go through a tensor once: rounding, packing, unpacking, magnitudes.

Floats come and go as integers of their bits, so that no load, store or conversion touches a NaN.
"""

import triton
import triton.language as tl

from narrowgauge.kernels.triton.rounding import NAN, random_words, rounded_bits


@triton.jit
def words_of_tile(
    key0: tl.tensor, key1: tl.tensor, rounding: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Random words of the program's tile, or zeros where none are wanted."""
    if rounding == "stochastic":
        first = tl.program_id(0).to(tl.int64) * (TILE // 4)
        return random_words(first + tl.arange(0, TILE // 4), key0, key1)
    return tl.zeros((TILE,), tl.uint32)


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def quantize(
    x: tl.tensor, out: tl.tensor, numel: tl.tensor,
    key0: tl.tensor, key1: tl.tensor,
    to: tl.constexpr, rounding: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """``out = round(x)``, as bits. A wide grid takes float32 through float64."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = words_of_tile(key0, key1, rounding, TILE)
    bits = tl.load(x + place, mask=place < numel, other=0)
    if to.wide and bits.dtype == tl.int32:
        value = bits.to(tl.float32, bitcast=True).to(tl.float64)
        wide = rounded_bits(value.to(tl.int64, bitcast=True), 0, word, to, rounding)
        value = wide.to(tl.float64, bitcast=True)
        narrow = value.to(tl.float32).to(tl.int32, bitcast=True)  # exact: formats lie in float32
        result = tl.where(value != value, NAN, narrow)
    else:
        result = rounded_bits(bits, 0, word, to, rounding)
    tl.store(out + place, result, mask=place < numel)


@triton.jit
def store_packed(
    code: tl.tensor, out: tl.tensor, tile: tl.tensor, numel: tl.tensor,
    BITS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile of codes as a little-endian stream; ``tile``, int64, numbers the tiles."""
    place = tile * TILE + tl.arange(0, TILE)
    BYTES: tl.constexpr = BITS // 8
    if BITS % 8 == 0:
        for byte in tl.static_range(BYTES):  # bytes, for `out` may begin at an odd address
            part = (code >> (8 * byte)).to(tl.uint8)
            tl.store(out + place * BYTES + byte, part, mask=place < numel)
    else:  # eight codes take as many bytes as each has bits
        GROUPS: tl.constexpr = TILE // 8
        eight = tl.reshape(code, (GROUPS, 8))
        first_bit = (tl.arange(0, 8) * BITS)[None, :]
        group = (tile * GROUPS + tl.arange(0, GROUPS)) * BITS
        size = (numel.to(tl.int64) * BITS + 7) // 8
        for byte in tl.static_range(BITS):
            left = tl.maximum(first_bit - 8 * byte, 0)
            right = tl.maximum(8 * byte - first_bit, 0)
            piece = ((eight << tl.minimum(left, 8)) >> tl.minimum(right, 16)) & 255
            at = group + byte
            tl.store(out + at, tl.sum(piece, 1).to(tl.uint8), mask=at < size)


@triton.jit
def load_packed(
    codes: tl.tensor, place: tl.tensor, numel: tl.tensor, BITS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The codes at places (int64) of a little-endian stream, int32; of float32, its bits."""
    size = (numel.to(tl.int64) * BITS + 7) // 8
    first_bit = place * BITS
    byte = first_bit // 8
    code = tl.zeros((TILE,), tl.int32)
    for each in tl.static_range((BITS + 14) // 8 if BITS % 8 else BITS // 8):
        part = tl.load(codes + byte + each, mask=(place < numel) & (byte + each < size), other=0)
        code |= part.to(tl.int32) << (8 * each)
    if BITS < 32:
        code = (code >> (first_bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
    return code


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def encode(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, spoilt: tl.tensor, numel: tl.tensor,
    key0: tl.tensor, key1: tl.tensor,
    to: tl.constexpr, rounding: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NAN: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Packed codes of ``x * scales``; and 1 into ``spoilt`` if NaN meets a format without it."""
    tile = tl.program_id(0).to(tl.int64)
    place = tile * TILE + tl.arange(0, TILE)
    valid = place < numel
    word = words_of_tile(key0, key1, rounding, TILE)
    bits = tl.load(x + place, mask=valid, other=0)
    unscaled = bits != bits
    exponent = tl.zeros_like(bits)
    if SCALED:
        if BLOCK:
            scale = tl.load(scales + place // BLOCK, mask=valid, other=0)
        else:
            scale = tl.load(scales) + tl.zeros((TILE,), tl.int32)
        scale = scale & 0x7FFFFFFF
        unscaled = scale > 0x7F800000
        exponent = ((scale >> 23) - 127).to(bits.dtype)
    code = rounded_bits(bits, exponent, word, to, rounding)
    code = tl.where(valid & (unscaled == 0), code, 0)
    if not HAS_NAN:
        lost = ((bits & to.magnitude) > to.infinity) & (unscaled == 0)
        tl.store(spoilt, 1, mask=tl.max(lost.to(tl.int32), 0) > 0)

    store_packed(code, out, tile, numel, to.bits, TILE)


@triton.jit(do_not_specialize=["numel", "factor"])
def decode(
    codes: tl.tensor, out: tl.tensor, table: tl.tensor, scales: tl.tensor, numel: tl.tensor,
    factor: tl.tensor,
    BITS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """``out = float32(table[code] * scales) * factor``, as bits.

    ``factor``: bits of a float32. A table, for it serves every format: up to 8 bits it stays in the
    first cache.
    """
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = place < numel
    code = load_packed(codes, place, numel, BITS, TILE)
    if BITS == 32:
        value = code.to(tl.float32, bitcast=True)
    else:
        value = tl.load(table + code, mask=valid, other=0.0)
    if SCALED:
        if BLOCK:
            value *= tl.load(scales + place // BLOCK, mask=valid, other=0.0)
        else:
            value *= tl.load(scales)
    value *= factor.to(tl.float32, bitcast=True)
    bits = tl.where(value != value, NAN, value.to(tl.int32, bitcast=True))
    tl.store(out + place, bits, mask=valid)


@triton.jit(do_not_specialize=["numel", "block_size"])
def largest_magnitudes(
    x: tl.tensor, out: tl.tensor, numel: tl.tensor, block_size: tl.tensor, blocks: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The largest magnitude's bits of each block; x: int32, bits. ROWS blocks a program."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (block * block_size)[:, None]
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, block_size, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        place = start + column
        bits = tl.load(x + place, mask=(column < block_size) & (place < numel), other=0)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(out + block, tl.max(most, 1), mask=block < blocks)
