"""Triton's kernel for products of matrices whose every intermediate is rounded.

Each program makes a tile of the result, k ascending. All arithmetic is float64, where the product
of two float32 is exact and a sum of two numbers, rounded to odd, can be rounded once more without
harm; so any format, fused or not, takes the same few lines. The price: GPUs for gaming and for
inference have 32 to 64 times fewer units for float64 than for float32.

Were the compiler to make ``a * b + c`` one instruction, nothing would change, the product being
exact; it is told not to anyway (``enable_fp_fusion``).
"""

import triton
import triton.language as tl

from narrowgauge.kernels.triton.rounding import NAN, odd_sum, random_words, rounded_bits

SEQUENCE: tl.constexpr = tl.constexpr(256)  # columns that share a sequence of random words


@triton.jit
def rounded(
    x: tl.tensor,
    counter: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    to: tl.constexpr,
    rounding: tl.constexpr,
) -> tl.tensor:
    """float64 ``x`` rounded, as float64."""
    word = tl.zeros((), tl.uint32)
    if rounding == "stochastic":
        word = random_words(counter, key0, key1)
    bits = rounded_bits(x.to(tl.int64, bitcast=True), 0, word, to, rounding)
    return bits.to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["chunk", "roundings", "key0", "key1"])
def matmul(
    a: tl.tensor, b: tl.tensor, out: tl.tensor, spilt: tl.tensor,
    rows: tl.tensor, depth: tl.tensor, columns: tl.tensor,
    a_batch: tl.tensor, a_row: tl.tensor, a_column: tl.tensor,
    b_batch: tl.tensor, b_row: tl.tensor, b_column: tl.tensor,
    chunk: tl.tensor, roundings: tl.tensor, key0: tl.tensor, key1: tl.tensor,
    product: tl.constexpr, total: tl.constexpr, rounding: tl.constexpr,
    COMPENSATED: tl.constexpr, ONE_BY_ONE: tl.constexpr, WATCHED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """``out[i] = a[i] @ b[i]``, as bits.

    ``a`` and ``b`` are float32 of any strides; ``chunk`` products are added before each rounding,
    of which each element takes ``roundings``; products are rounded to ``product`` (None: not at
    all), sums to ``total``. ONE_BY_ONE says that the chunk is 1. If WATCHED, 1 is stored into
    ``spilt`` when two float64 do not hold the sum of a chunk.
    """
    panels = tl.cdiv(columns, COLUMNS)
    pieces = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    batch = (tile // (panels * pieces)).to(tl.int64)
    row = (tile // panels % pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first_column = (tile % panels * COLUMNS).to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)
    a += batch * a_batch + row[:, None] * a_row
    b += batch * b_batch + column[None, :] * b_column
    valid_a, valid_b = (row < rows)[:, None], (column < columns)[None, :]

    # Words are taken in the order of roundings; Philox counts blocks of four.
    sequence = (batch * rows + row)[:, None] * tl.cdiv(columns, SEQUENCE) + first_column // SEQUENCE
    counter = sequence * roundings * (SEQUENCE // 4) + first_column % SEQUENCE // 4
    counter = counter + tl.arange(0, COLUMNS // 4)[None, :]

    sums = tl.zeros((ROWS, COLUMNS), tl.float64)
    lost = sums
    inexact = sums != sums
    for first in range(0, depth, chunk):
        # Not "-lost": that is 0 - lost, which makes no -0.
        high = lost * -1.0 if COMPENSATED else sums
        if ONE_BY_ONE:
            left = tl.load(a + first * a_column, mask=valid_a, other=0.0).to(tl.float64)
            right = tl.load(b + first * b_row, mask=valid_b, other=0.0).to(tl.float64)
            x = left * right
            if product is not None:
                x = rounded(x, counter, key0, key1, product, rounding)
                counter += SEQUENCE // 4
            exact = odd_sum(high, x)
        else:
            low = tl.zeros((ROWS, COLUMNS), tl.float64)
            for k in range(first, tl.minimum(first + chunk, depth)):
                left = tl.load(a + k * a_column, mask=valid_a, other=0.0).to(tl.float64)
                right = tl.load(b + k * b_row, mask=valid_b, other=0.0).to(tl.float64)
                x = left * right
                if product is not None:
                    x = rounded(x, counter, key0, key1, product, rounding)
                    counter += SEQUENCE // 4
                # high + low + rest are the old high + low + x, exactly (Knuth)
                new = high + x
                part = new - high
                error = (high - (new - part)) + (x - part)
                high = new
                new = low + error
                part = new - low
                rest = (low - (new - part)) + (error - part)
                low = new
                if WATCHED:
                    inexact = inexact | (rest < 0) | (rest > 0)
            # The sign of an exact zero is that of `high`, and so is what is not finite.
            exact = tl.where((low == 0) | (high - high != 0), high, odd_sum(high, low))
        x = rounded(exact, counter, key0, key1, total, rounding)
        counter += SEQUENCE // 4
        if COMPENSATED:
            new = rounded(odd_sum(sums, x), counter, key0, key1, total, rounding)
            counter += SEQUENCE // 4
            change = rounded(odd_sum(new, sums * -1.0), counter, key0, key1, total, rounding)
            counter += SEQUENCE // 4
            lost = rounded(odd_sum(change, x * -1.0), counter, key0, key1, total, rounding)
            counter += SEQUENCE // 4
            lost = tl.where(lost - lost == 0, lost, 0.0)  # after an infinity there is none
            sums = new
        else:
            sums = x
    if WATCHED:
        wrong = tl.max(tl.max(inexact.to(tl.int32), 1), 0)
        tl.store(spilt, 1, mask=wrong > 0)
    bits = tl.where(sums != sums, NAN, sums.to(tl.float32).to(tl.int32, bitcast=True))
    place = (batch * rows + row)[:, None] * columns + column[None, :]
    tl.store(out + place, bits, mask=valid_a & valid_b)
