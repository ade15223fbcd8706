"""Block formats: which scale a block gets, and what its elements are then.

Everything is one pass of the kernels for scalar formats over the elements, and a few torch
operations over the scales, of which there are far fewer. A power of two goes into that pass as an
exponent. Any other scale needs a division, which is made in float64 and rounded once:

    For a scale of at most 11 + 24 significant bits, the number half-way between two elements, times
    the scale, has at most 51 bits. A number of at most 52 bits either equals that product or
    differs from it by more than float64 rounds a quotient, so that the rounded quotient lies on the
    right side of the half-way point (and equals it only if the exact one does). float32 has 24
    bits; float64's 53 are rounded to odd in 52, which keeps their order among numbers of 51 bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, Format, IntFormat, format_of
from narrowgauge.kernels import operators
from narrowgauge.kernels.differences import blocks_in_one_pass, encode_difference
from narrowgauge.kernels.grid import check_rounding, grid_of
from narrowgauge.kernels.raw import packed_bytes, threads_for
from narrowgauge.scaling import fitting_exponents

_MOST = 2.0**32  # of element * scale, up to which two levels use the range of the scale
_FLOAT32_MAX = torch.finfo(torch.float32).max


def part_sizes(
    numel: int, bits: int, block_size: int, scale_bits: int, two_level: bool
) -> tuple[int, int, int]:
    """Bytes of the tensor's own scale, of the blocks' scales, and of the elements."""
    blocks = (numel + block_size - 1) // block_size
    own = 4 if two_level and blocks else 0
    return own, packed_bytes(blocks, scale_bits), packed_bytes(numel, bits)


def _sizes(numel: int, format: BlockFormat) -> tuple[int, int, int]:
    two_level = format.scale_rule == "two-level"
    element, scale = format.element.bits, format.scale.bits
    return part_sizes(numel, element, format.block_size, scale, two_level)


def packed_size(numel: int, format: Format) -> int:
    """Bytes that ``numel`` numbers of any format take, scales included."""
    if isinstance(format, BlockFormat):
        return sum(_sizes(numel, format))
    return packed_bytes(numel, format.bits)


def _block_format(name: str) -> BlockFormat:
    format = format_of(name)
    assert isinstance(format, BlockFormat)
    return format


# -- scales ----------------------------------------------------------------------------------------


def block_scales(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """The scale of each block, by the format's rule.

    Args:
        x: float32 or float64, flat.
        format: see :class:`BlockFormat` for the rules.

    Returns:
        ``(scales, own)``: float32, one per block, numbers of ``format.scale``, and NaN for a block
        that holds a NaN or an infinity; with two levels also the tensor's own scale, float32 of no
        dimension, else ``None``.
    """
    if format.scale_rule in ("fit", "floor"):
        return _powers_of_two(_magnitudes(x, format.block_size), format), None
    largest = _magnitudes(x, format.block_size)
    finite = largest.isfinite()
    largest = largest.where(finite, 0.0)
    divisor: Tensor | float = format.element.largest
    own = None
    if format.scale_rule == "two-level":
        top = largest.amax() if largest.numel() else largest.new_ones(())
        # A scale of float32's own range needs no more of it, and its tensor's would underflow.
        reach = min(format.element.largest * format.scale.largest, max(divisor, _MOST))
        own = (top / reach).float().where(top > 0, 1.0)
        own = own.clamp(2.0**-149, _FLOAT32_MAX)  # some tensors' would round to 0 or infinity
        divisor = own.double() * format.element.largest
    scales = operators.quantize(
        largest / divisor, format.scale.name, "nearest-even", "saturate", None
    )
    return scales.where(finite, math.nan).float(), own


def _powers_of_two(magnitudes: Tensor, format: BlockFormat) -> Tensor:
    scale = format.scale
    assert scale.bias is not None
    lowest, highest = -scale.bias, scale.largest_code - scale.bias
    if format.scale_rule == "fit":
        exponents = -fitting_exponents(magnitudes, format.element, -highest, -lowest)
    else:
        _, above = torch.frexp(magnitudes)
        exponents = above - 1 - format.element.max_exponent
        exponents.masked_fill_(magnitudes == 0, lowest)
    exponents = exponents.clamp(lowest, highest)
    return torch.where(magnitudes.isfinite(), _power_of_two(exponents), math.nan)


def _power_of_two(exponents: Tensor) -> Tensor:
    """``2**exponents`` as float32, exactly; −149 to 127."""
    return ((exponents.long() + 1023) << 52).view(torch.float64).float()


def _magnitudes(x: Tensor, block_size: int) -> Tensor:
    """The largest magnitude per block, float64; of 52 bits, as the quotients need it.

    On which side of a power of two or an overflow threshold it lies, those tell as well.
    """
    if x.dtype == torch.float64:
        rows = _rows(_of_52_bits(x.abs()), block_size)
        return rows.amax(1) if x.numel() else rows.view(0)
    bits: Tensor = operators.largest_magnitudes(x, block_size)
    return bits.view(torch.float32).double()


def _rows(x: Tensor, block_size: int) -> Tensor:
    """A block per row, the last one padded with zeros; no longer than the tensor."""
    size = min(block_size, max(1, x.numel()))
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def _of_52_bits(x: Tensor) -> Tensor:
    """float64 rounded to odd in 52 bits: the last bit is 0, the one before it 1 if inexact."""
    bits = x.view(torch.int64)
    odd = (bits & ~1) | ((bits & 1) << 1)
    return torch.where(x.isfinite(), odd.view(torch.float64), x)


def _quotients(x: Tensor, scales: Tensor, own: Tensor | None, block_size: int) -> Tensor:
    """``x / scale`` in float64, on the right side of everything it may be rounded to."""
    divisors = scales.double() if own is None else scales.double() * own.double()
    divisors = divisors.masked_fill(divisors == 0, math.inf)  # what is divided by it, becomes 0
    wide = _of_52_bits(x) if x.dtype == torch.float64 else x.double()
    quotients = _rows(wide, block_size) / divisors[:, None]
    if x.dtype == torch.float64:  # finite numbers stay finite
        quotients.clamp_(-torch.finfo(wide.dtype).max, torch.finfo(wide.dtype).max)
    quotients.masked_fill_(divisors.isnan()[:, None], 0.0)
    return quotients.view(-1)[: x.numel()]


# -- bytes -----------------------------------------------------------------------------------------


def encode_blocks_into(
    x: Tensor,
    format: BlockFormat,
    out: Tensor,
    *,
    rounding: str = "nearest-even",
    overflow: str | None = None,
    key: Tensor | None = None,
) -> None:
    """Packed scales and elements: the tensor's scale, the blocks' scales, the elements' codes.

    Args:
        x: float32 or float64, flat and contiguous.
        format: of the blocks.
        out: uint8, as many as :func:`packed_size` says.
        rounding: of the elements; scales follow from their rule.
        overflow: of the elements; ``None``: they saturate.
        key: for stochastic rounding.
    """
    one_pass = blocks_in_one_pass(format)
    usual = rounding == "nearest-even" and overflow in (None, "saturate")
    if one_pass is not None and usual and x.dtype == torch.float32:
        encode_difference(x, None, one_pass, out, threads=threads_for(x.numel()))
        return
    scales, own = block_scales(x, format)
    own_part, scale_part, element_part = out.split(list(_sizes(x.numel(), format)))
    if own is not None and own_part.numel():
        own_part.copy_(own.view(1).view(torch.uint8))
    scale_part.copy_(
        operators.encode(scales, format.scale.name, "nearest-even", None, None, None, 0)
    )
    grid = grid_of(format.element.name, overflow or "saturate")
    if format.scale.signed or format.scale.smallest < 2.0**-127:  # whose inverse is no float32
        x = _quotients(x, scales, own, format.block_size)
        operators.encode_into(x, element_part, grid, rounding, key, None, 0)
    else:
        multiply = scales.double().reciprocal().float()  # powers of two: exact
        operators.encode_into(x, element_part, grid, rounding, key, multiply, format.block_size)


def decode_blocks_into(
    codes: Tensor, format: BlockFormat, out: Tensor, *, factor: float = 1.0
) -> None:
    """``element * scale`` and, with two levels, times the tensor's own scale; times ``factor``.

    In float64 the product is exact; in other dtypes it is rounded once to float32.

    Args:
        codes: uint8, what :func:`encode_blocks_into` wrote.
        format: of the blocks.
        out: flat.
        factor: a power of two; rounds only what becomes subnormal or infinite by it.
    """
    numel = out.numel()
    own_part, scale_part, element_part = codes.split(list(_sizes(numel, format)))
    own = float(own_part.clone().view(torch.float32)) if own_part.numel() else 1.0
    blocks = -(-numel // format.block_size)
    scales = operators.decode(scale_part, format.scale.name, blocks, None, 0)
    grid = grid_of(format.element.name)
    if out.dtype == torch.float64 or (own_part.numel() and not _exact_in_float32(format)):
        values = operators.decode(element_part, grid.name, numel, None, 0).double()
        scales = scales.double().repeat_interleave(min(format.block_size, numel))[:numel]
        out.copy_((values * scales * own).to(torch.promote_types(out.dtype, torch.float32)))
    elif own_part.numel():
        operators.decode_into(element_part, out, grid, scales, format.block_size, own)
    else:
        operators.decode_into(element_part, out, grid, scales, format.block_size, factor)
        return
    if factor != 1:
        out.mul_(factor)


def _exact_in_float32(format: BlockFormat) -> bool:
    """Whether every ``element * scale`` is a float32, to be multiplied by the tensor's own."""
    element, scale = format.element, format.scale
    bits = element.bits if isinstance(element, IntFormat) else element.mantissa_bits + 1
    finest = element.smallest * element.epsilon * scale.smallest * scale.epsilon
    largest = element.largest * scale.largest
    return bits + scale.mantissa_bits + 1 <= 24 and finest >= 2**-149 and largest <= _FLOAT32_MAX


# -- operators -------------------------------------------------------------------------------------


def _encode_blocks(
    x: Tensor, format: str, rounding: str, overflow: str | None, key: Tensor | None
) -> Tensor:
    out = _encode_blocks_fake(x, format, rounding, overflow, key)
    wide = x if x.dtype == torch.float64 else x.float()
    flat = wide.contiguous().view(-1)
    parsed = _block_format(format)
    encode_blocks_into(flat, parsed, out, rounding=rounding, overflow=overflow, key=key)
    return out


def _encode_blocks_fake(
    x: Tensor, format: str, rounding: str, overflow: str | None, key: Tensor | None
) -> Tensor:
    check_rounding(rounding)
    parsed = _block_format(format)
    grid_of(parsed.element.name, overflow)
    return x.new_empty(sum(_sizes(x.numel(), parsed)), dtype=torch.uint8)


def _decode_blocks(codes: Tensor, format: str, numel: int, dtype: torch.dtype) -> Tensor:
    out = codes.new_empty(numel, dtype=dtype)
    decode_blocks_into(codes.contiguous(), _block_format(format), out)
    return out


def _decode_blocks_fake(codes: Tensor, format: str, numel: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(numel, dtype=dtype)


def _quantize_blocks(
    x: Tensor,
    format: str,
    dim: int | None,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
) -> Tensor:
    parsed = _block_format(format)
    if dim is None or x.dim() == 0:
        codes = _encode_blocks(x, format, rounding, overflow, key)
        return _decode_blocks(codes, format, x.numel(), x.dtype).view(x.shape)
    rows = x.movedim(dim, -1)
    length = rows.shape[-1]
    size = min(parsed.block_size, max(1, length))
    format = replace(parsed, block_size=size).name
    # Zeros at the end of a row change no block's largest magnitude.
    padded = torch.nn.functional.pad(rows, (0, -length % size))
    codes = _encode_blocks(padded, format, rounding, overflow, key)
    values = _decode_blocks(codes, format, padded.numel(), x.dtype).view(padded.shape)
    return values[..., :length].movedim(-1, dim).clone(memory_format=torch.contiguous_format)


def _quantize_blocks_fake(
    x: Tensor,
    format: str,
    dim: int | None,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
) -> Tensor:
    check_rounding(rounding)
    grid_of(_block_format(format).element.name, overflow)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _quantize_blocks_out(
    x: Tensor,
    format: str,
    dim: int | None,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
    out: Tensor,
) -> None:
    operators.refuse_overlap(x, out, identity=True)
    out.copy_(_quantize_blocks(x, format, dim, rounding, overflow, key))


def _quantize_blocks_backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, None, None, None, None  # straight through


_library = torch.library.Library("narrowgauge", "FRAGMENT")
_HOW = "str rounding, str? overflow, Tensor? key"
for _schema, _kernel, _fake in (
    (f"encode_blocks(Tensor x, str format, {_HOW}) -> Tensor", _encode_blocks, _encode_blocks_fake),
    (
        "decode_blocks(Tensor codes, str format, SymInt numel, ScalarType dtype) -> Tensor",
        _decode_blocks,
        _decode_blocks_fake,
    ),
    (
        f"quantize_blocks(Tensor x, str format, int? dim, {_HOW}) -> Tensor",
        _quantize_blocks,
        _quantize_blocks_fake,
    ),
    (
        f"quantize_blocks_out(Tensor x, str format, int? dim, {_HOW}, Tensor(a!) out) -> ()",
        _quantize_blocks_out,
        lambda *_: None,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowgauge::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "narrowgauge::quantize_blocks", _quantize_blocks_backward, lib=_library
)

encode_blocks = torch.ops.narrowgauge.encode_blocks.default
decode_blocks = torch.ops.narrowgauge.decode_blocks.default
quantize_blocks = torch.ops.narrowgauge.quantize_blocks.default
quantize_blocks_out = torch.ops.narrowgauge.quantize_blocks_out.default
