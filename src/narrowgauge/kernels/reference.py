"""The kernels in plain torch operations: slow, obvious, exact, and on any device.

They define the result; the native ones must give the same bits. Everything is done on the bits of
float64, as integers, so that no rounding of the machine's own takes part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, format_of, table_of
from narrowgauge.kernels.grid import DifferenceBlocks, Grid, Sums

_MANTISSA = 2**52 - 1
_MAGNITUDE = 2**63 - 1
_INFINITY = 0x7FF << 52
_WORD = 2**32 - 1


def random_words(numel: int, key: Tensor) -> Tensor:
    """One 32-bit random word per element, from Philox4x32-7 and nothing else.

    Seven rounds are the fewest that pass BigCrush (Salmon et al., 2011). Element ``i`` takes word
    ``i % 4`` of the block whose counter is ``(i // 4, 0)``, 64 bits each.

    Args:
        numel: how many.
        key: int64 of one element.

    Returns:
        int64 of shape ``(numel,)``, 0 to 2**32 - 1.
    """
    counter = torch.arange((numel + 3) // 4, dtype=torch.int64, device=key.device)
    return torch.stack(_philox(counter, key), 1).flatten()[:numel]


def _philox(counter: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block."""
    zero = torch.zeros_like(counter)
    x0, x1, x2, x3 = counter & _WORD, counter >> 32, zero, zero
    key0, key1 = key.reshape(()) & _WORD, (key.reshape(()) >> 32) & _WORD
    for _ in range(7):
        product0, product1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            ((product1 >> 32) & _WORD) ^ x1 ^ key0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ x3 ^ key1,
            product0 & _WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return x0, x1, x2, x3


def _round(
    x: Tensor, grid: Grid, rounding: str, words: Tensor | None, exponents: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ordinals of ``x * 2**exponents`` on an unbounded grid, and what they must be told apart by.

    Returns:
        ``(ordinal, negative, toward_zero, magnitude)``: int64, bool (sign), bool (rounded toward
        zero by decree, so that overflow gives the largest number), int64 (bits of |x| as float64).
    """
    m = grid.mantissa_bits
    bits = x.double().view(torch.int64)
    negative, magnitude = bits < 0, bits & _MAGNITUDE
    field = magnitude >> 52
    significand = (magnitude & _MANTISSA) | ((field > 0).long() << 52)
    exponent = field.clamp(min=1) - 1023 + exponents
    clamped = exponent.clamp(min=grid.min_exponent)
    # Without subnormals the spacing below the smallest normal number is that number itself.
    wider = (exponent < grid.min_exponent).long() * (0 if grid.subnormals else m)
    shift = clamped - exponent + 52 - m + wider
    capped = shift.clamp(max=62)
    kept = significand >> capped
    rest = significand - (kept << capped)
    ordinal = ((clamped - grid.min_exponent) << m) + (kept << wider)
    toward_zero = torch.zeros_like(negative)
    if rounding == "nearest-even":
        odd = (ordinal + (not grid.signed)) & 1  # of the code, which is one less without a zero
        increment = 2 * rest + odd > torch.ones_like(rest) << capped
    elif rounding == "nearest-away":
        increment = 2 * rest >= torch.ones_like(rest) << capped
    elif rounding == "stochastic":
        assert words is not None
        left, right = (32 - shift).clamp(min=0), (shift - 32).clamp(0, 63)
        increment = ((rest << left) >> right) + words >= 2**32
    else:
        away = {"up": ~negative, "down": negative, "toward-zero": toward_zero}[rounding]
        toward_zero = ~away
        increment = away & (rest != 0)
    return ordinal + (increment.long() << wider), negative, toward_zero, magnitude


def _words(x: Tensor, rounding: str, key: Tensor | None) -> Tensor | None:
    if rounding != "stochastic":
        return None
    assert key is not None
    return random_words(x.numel(), key.to(x.device))


def quantize(x: Tensor, grid: Grid, rounding: str, key: Tensor | None) -> Tensor:
    """Nearest (or otherwise rounded) numbers of the grid, in the dtype of ``x``.

    Args:
        x: float32 or float64, any shape.
        grid: the numbers to round to.
        rounding: see :func:`narrowgauge.quantize`.
        key: int64 of one element, for stochastic rounding.
    """
    return _quantize(x, grid, rounding, _words(x, rounding, key))


def _quantize(x: Tensor, grid: Grid, rounding: str, words: Tensor | None) -> Tensor:
    m = grid.mantissa_bits
    ordinal, negative, toward_zero, magnitude = _round(x.flatten(), grid, rounding, words, 0)
    if not grid.signed:
        ordinal = ordinal.clamp(min=1)
    ordinary = ordinal.clamp(max=grid.largest)
    normal = ((ordinary << (52 - m)) + ((grid.min_exponent + 1022) << 52)).view(torch.float64)
    subnormal = ordinary.double() * math.ldexp(1.0, grid.min_exponent - m)
    value = torch.where(ordinary < 2**m, subnormal, normal)
    overflows = (ordinal > grid.largest) & ~toward_zero
    value = torch.where(overflows, grid.value_for(grid.overflow), value)
    value = torch.where(magnitude == _INFINITY, grid.value_for(grid.infinite), value)
    signed = negative & ((value != 0) | grid.negative_zero)
    value = torch.where(signed, -value, value)
    invalid = magnitude > _INFINITY
    if not grid.signed:
        invalid = invalid | (magnitude == 0) | negative
    value = torch.where(invalid, math.nan, value).to(x.dtype)
    return torch.where(value.isnan(), math.nan, value).view(x.shape)  # one NaN for all


def _exponents(scales: Tensor, numel: int, block_size: int) -> Tensor:
    exponents = ((scales.view(torch.int32).long() >> 23) & 0xFF) - 127
    return _per_element(exponents, numel, block_size)


def _per_element(scales: Tensor, numel: int, block_size: int) -> Tensor:
    return scales.repeat_interleave(min(block_size, numel))[:numel] if block_size else scales


def encode(
    x: Tensor,
    grid: Grid,
    rounding: str,
    key: Tensor | None,
    scales: Tensor | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Packed codes of ``x * scales``.

    Args:
        x: float32 or float64, flat.
        grid: the numbers to round to.
        rounding: see :func:`narrowgauge.quantize`.
        key: int64 of one element, for stochastic rounding.
        scales: powers of two, float32, one for all (``block_size`` 0) or one per block. A block
            whose scale is NaN gets codes of 0.
        block_size: elements per block, or 0.

    Returns:
        ``(codes, spoilt)``: uint8; and a bool scalar: a NaN met a format without NaN.
    """
    exponents: Tensor | int = 0 if scales is None else _exponents(scales, x.numel(), block_size)
    words = _words(x, rounding, key)
    ordinal, negative, toward_zero, magnitude = _round(x, grid, rounding, words, exponents)
    overflows = (ordinal > grid.largest) & ~toward_zero
    code = ordinal.clamp(max=grid.largest)
    if not grid.signed:
        code = code.clamp(min=1) - 1
    code = torch.where(overflows, grid.code_for(grid.overflow), code)
    code = torch.where(magnitude == _INFINITY, grid.code_for(grid.infinite), code)
    if grid.integer:
        code = torch.where(negative, -code, code) & (2**grid.bits - 1)
    elif grid.signed:
        keeps = negative & ((code != 0) | grid.negative_zero)
        code = code | (keeps.long() << (grid.bits - 1))
    invalid = magnitude > _INFINITY
    if not grid.signed:
        invalid = invalid | (magnitude == 0) | negative
    code = torch.where(invalid, grid.nan_code, code)
    if scales is not None:
        unscaled = _per_element(scales, x.numel(), block_size).isnan()
        code = torch.where(unscaled, 0, code)
        invalid = invalid & ~unscaled
    return pack(code, grid.bits), invalid.any() & (not grid.has_nan)


def decode(codes: Tensor, grid: Grid, numel: int) -> Tensor:
    """Values of packed codes: float32 of shape ``(numel,)``."""
    if grid.bits == 32:
        return codes.clone().view(torch.float32)
    format = format_of(grid.name)
    assert not isinstance(format, BlockFormat)
    return table_of(format).to(codes.device)[unpack(codes, numel, grid.bits)]


def scaled(values: Tensor, scales: Tensor | None, block_size: int, factor: float) -> Tensor:
    """``float32(values * scales) * factor``, with one NaN for all."""
    if scales is not None:
        values = values * _per_element(scales, values.numel(), block_size)
    # A tensor factor, since torch would multiply by a Python number in float64.
    values = values * torch.tensor(factor, dtype=torch.float32, device=values.device)
    return torch.where(values.isnan(), math.nan, values)


def reduce(
    codes: list[Tensor], grid: Grid, scales: list[float], numel: int, factor: float
) -> Tensor:
    """Sum of the senders' scaled values, in order, in float32, times ``factor``."""
    total: Tensor | None = None
    for each, scale in zip(codes, scales, strict=True):
        value = decode(each, grid, numel)
        value = value * torch.tensor(scale, dtype=torch.float32, device=value.device)
        total = value if total is None else total + value
    assert total is not None
    return scaled(total, None, 0, factor)


def largest_magnitudes(x: Tensor, block_size: int) -> Tensor:
    """Bits of the largest |x| per block as int32; ``block_size`` 0: one block."""
    bits = x.flatten().view(torch.int32) & 0x7FFFFFFF
    if not block_size:
        return torch.cat((bits, bits.new_zeros(1))).amax().view(1)
    block_size = min(block_size, max(1, bits.numel()))
    blocks = -(-bits.numel() // block_size)
    padded = torch.nn.functional.pad(bits, (0, blocks * block_size - bits.numel()))
    return padded.view(blocks, block_size).amax(1) if blocks else bits.new_zeros(0)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (int64) as a little-endian stream of ``bits`` bits each; trailing bits are zero."""
    if bits == 8:
        return codes.to(torch.uint8)
    places = torch.arange(bits, device=codes.device)
    stream = ((codes[:, None] >> places) & 1).to(torch.uint8).flatten()
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, device=codes.device)
    return (stream * weights).sum(1).to(torch.uint8)


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """The inverse of :func:`pack`: int64 of shape ``(numel,)``."""
    if bits == 8:
        return packed.long()
    stream = ((packed[:, None] >> torch.arange(8, device=packed.device)) & 1).flatten()
    weights = 2 ** torch.arange(bits, device=packed.device)
    return (stream[: numel * bits].view(numel, bits) * weights).sum(1)


# -- differences -----------------------------------------------------------------------------------

ESCAPED = 255
"""Stands in for the scale of a block that travels as float32."""


def encode_difference(
    master: Tensor, replica: Tensor | None, blocks: DifferenceBlocks, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Scales (uint8, e8m0) and packed codes of ``master - replica``, float32, in blocks.

    Args:
        master: float32, flat.
        replica: float32, as many; ``None``: zeros.
        blocks: see there.
        tolerance: blocks escape whose numbers rounding may change by more than this share of their
            largest ``|master|``; infinity: only those that are not finite.
    """
    difference = master if replica is None else master - replica
    magnitudes = largest_magnitudes(difference, blocks.size).view(torch.float32)
    fraction, exponent = torch.frexp(magnitudes)
    overflows = (fraction.view(torch.int32) & 0x7FFFFF) >= blocks.limit
    fitting = (blocks.top_exponent - exponent - overflows.int()).clamp(-127, 127)
    fitting = torch.where((magnitudes == 0) | (not blocks.scaled), 0, fitting)
    reach = -fitting if blocks.scaled else (magnitudes.view(torch.int32) >> 23) - 127
    escaped = ~magnitudes.isfinite()
    if tolerance < math.inf:
        largest = largest_magnitudes(master, blocks.size).view(torch.float32)
        share = torch.tensor(tolerance, dtype=torch.float32, device=master.device)
        change = (blocks.half_step * torch.exp2(reach.double())).float()
        escaped = escaped | ~(change <= share * largest)
    scales = torch.where(escaped, ESCAPED, 127 - fitting)
    multiply = torch.where(escaped, math.nan, torch.exp2(fitting.double()).float())
    codes, _ = encode(difference, blocks.grid, "nearest-even", None, multiply, blocks.size)
    return scales.to(torch.uint8), codes


def decode_difference(
    scales: Tensor, codes: Tensor, numel: int, blocks: DifferenceBlocks
) -> Tensor:
    """The differences that :func:`encode_difference` coded; 0 where they escaped."""
    powers = torch.exp2(scales.double() - 127).float().where(scales != ESCAPED, 0.0)
    return scaled(decode(codes, blocks.grid, numel), powers, blocks.size, 1.0)


# -- products of matrices --------------------------------------------------------------------------

_DIGIT = 32
_WEIGHTS = range(-352, 352, _DIGIT)  # of a fixed-point number for sums of products of float32
_ROW = 256  # columns that share a sequence of random words


def odd_sum(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` rounded to odd: if inexact, the neighbour in their dtype whose last bit is 1.

    Rounding that to a format of at most 50 bits (float64) or 21 (float32) gives what rounding the
    exact sum would give.
    """
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)  # exact (Knuth)
    bits = total.view(torch.int64 if total.dtype == torch.float64 else torch.int32)
    step = torch.where((bits < 0) == (error < 0), 1, -1).to(bits.dtype)
    inexact = ((error < 0) | (error > 0)) & (bits & 1 == 0)
    return (bits + step * inexact).view(total.dtype)


def _exact_sum(terms: list[Tensor]) -> Tensor:
    """The sum of float64 tensors, rounded to odd; of zeros or what is not finite, as float64 adds.

    Every term is cut into digits of 32 bits, which add up exactly.
    """
    if len(terms) == 2:
        return odd_sum(terms[0], terms[1])
    plain = terms[0]
    for term in terms[1:]:
        plain = plain + term
    digits = [torch.zeros_like(plain) for _ in _WEIGHTS]
    for term in terms:
        rest = torch.where(term.isfinite(), term, 0.0)
        for place in reversed(range(len(digits))):
            digit = torch.trunc(rest * 2.0 ** -_WEIGHTS[place])
            digits[place] += digit
            rest = rest - digit * 2.0 ** _WEIGHTS[place]
    negative = _carried(digits)[-1] < 0
    digits = _carried([torch.where(negative, -digit, digit) for digit in digits])
    total = torch.zeros_like(plain)
    for place in reversed(range(len(digits))):  # once it is inexact, the rest is below its last bit
        total = odd_sum(total, digits[place] * 2.0 ** _WEIGHTS[place])
    total = torch.where(negative, -total, total)
    zero = torch.where(plain == 0, plain, 0.0)  # -0 only if all terms are -0
    return torch.where(plain.isfinite(), torch.where(total != 0, total, zero), plain)


def _carried(digits: list[Tensor]) -> list[Tensor]:
    """The same number with digits from 0 to 2**32 - 1, but for the sign of the highest."""
    result, carry = [], torch.zeros_like(digits[0])
    for digit in digits[:-1]:
        digit = digit + carry
        carry = torch.floor(digit * 2.0**-_DIGIT)
        result.append(digit - carry * 2.0**_DIGIT)
    return [*result, digits[-1] + carry]


def matmul(a: Tensor, b: Tensor, sums: Sums, key: Tensor | None) -> Tensor:
    """Batched matrix product whose every intermediate is rounded exactly.

    Args:
        a: float32 of shape ``(batch, rows, depth)``.
        b: float32 of shape ``(batch, depth, columns)``.
        sums: see there.
        key: int64 of one element, for stochastic rounding. Words are used in the order of the
            roundings; columns of a row take theirs from neighbouring places, 256 at a time.
    """
    (batch, rows, depth), columns = a.shape, b.shape[2]
    a, b = a.double(), b.double()  # where their products are exact
    shape = (batch, rows, columns)
    chunks = -(-depth // sums.chunk)
    roundings = depth * (sums.multiply is not None) + chunks * (4 if sums.compensated else 1)
    row = torch.arange(batch * rows, device=a.device)[:, None]
    column = torch.arange(columns, device=a.device)
    sequence = row * -(-columns // _ROW) + column // _ROW
    index = (sequence * roundings * _ROW + column % _ROW).view(shape).to(a.device)

    def rounded(x: Tensor, grid: Grid) -> Tensor:
        nonlocal index
        words = None
        if sums.rounding == "stochastic":
            assert key is not None
            four = torch.stack(_philox(index.flatten() // 4, key.to(index.device)), 1)
            words = four.gather(1, index.flatten()[:, None] % 4).flatten()
            index = index + _ROW
        return _quantize(x, grid, sums.rounding, words)

    total = torch.zeros(shape, dtype=torch.float64, device=a.device)
    lost = total
    for first in range(0, depth, sums.chunk):
        terms = []
        for k in range(first, min(first + sums.chunk, depth)):
            product = a[:, :, k, None] * b[:, None, k, :]
            terms.append(product if sums.multiply is None else rounded(product, sums.multiply))
        if not sums.compensated:
            total = rounded(_exact_sum([total, *terms]), sums.accumulate)
            continue
        term = rounded(_exact_sum([-lost, *terms]), sums.accumulate)
        new = rounded(_exact_sum([total, term]), sums.accumulate)
        change = rounded(_exact_sum([new, -total]), sums.accumulate)
        lost = rounded(_exact_sum([change, -term]), sums.accumulate)
        lost = torch.where(lost.isfinite(), lost, 0.0)  # after an infinity there is none
        total = new
    return torch.where(total.isnan(), math.nan, total).float()
