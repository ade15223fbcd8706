"""Tensors as packed codes and back: what a number looks like on the wire and on disk.

The codes are a little-endian stream of bits: element ``i`` of a format of ``b`` bits lies at bits
``[i*b, (i+1)*b)``, so 4-bit codes lie two in a byte, the first in the low half, and trailing bits
of the last byte are zero. A power of two may be multiplied in on the way, per tensor or per block;
it changes exponents only and so costs no accuracy. Block formats carry scales of their own in front
of the elements, each part padded to whole bytes (and before them, with two levels, the tensor's:
four bytes, little-endian). Every NaN becomes the format's one quiet NaN without sign: which NaN a
sum gives differs between processors, and codes must not. (A number that ``overflow="nan"`` turns
into NaN keeps its sign, which does not.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from narrowgauge.formats import BlockFormat, FormatLike, format_of
from narrowgauge.kernels import blocks, operators
from narrowgauge.kernels.grid import check_overflow, check_rounding
from narrowgauge.kernels.raw import MAX_EXPONENT, packed_bytes

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """What of a format the wire depends on."""

    name: str
    element: str  # its format's name; the format's own name unless it is a block format
    bits: int  # of an element
    block_size: int  # 0: no blocks
    scale_bits: int
    two_level: bool

    def size(self, numel: int) -> int:
        """Bytes that ``numel`` elements take."""
        if not self.block_size:
            return packed_bytes(numel, self.bits)
        return sum(
            blocks.part_sizes(numel, self.bits, self.block_size, self.scale_bits, self.two_level)
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def layout_of(format: FormatLike) -> Layout:
    """The layout of a format; a constant to torch.compile, which need not trace the parsing."""
    return _layout_of(format if isinstance(format, str) else format_of(format))


@cache
def _layout_of(format: FormatLike) -> Layout:
    parsed = format_of(format)
    if isinstance(parsed, BlockFormat):
        return Layout(
            parsed.name,
            parsed.element.name,
            parsed.element.bits,
            parsed.block_size,
            parsed.scale.bits,
            parsed.scale_rule == "two-level",
        )
    return Layout(parsed.name, parsed.name, parsed.bits, 0, 0, False)


def check_tensor(x: Tensor, what: str) -> None:
    """Raise ``TypeError`` unless ``x`` is a tensor whose elements lie in memory by strides."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{what} is {type(x).__name__}; it must be a torch.Tensor (torch.as_tensor makes one)"
        )
    if torch.compiler.is_compiling():
        return
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{what} is a {kind} tensor; it must be a dense one (torch.strided)")


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise ``NotImplementedError`` in forward-mode differentiation, whose results would be 0."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) is not "
            "supported through rounding; use backward(), or detach() the input"
        )


def is_negative_view(x: Tensor) -> bool:
    """Whether memory holds the negatives of its elements, as after ``z.conj().imag``."""
    return not torch.compiler.is_compiling() and x.is_neg()


def positive(x: Tensor) -> Tensor:
    """``x``, or if it is a negative view, a copy that is none."""
    return x.resolve_neg() if is_negative_view(x) else x


def check_input(x: Tensor, rounding: str, overflow: str | None) -> None:
    """What :func:`encode` and ``quantize`` demand of their input, rounding and overflow."""
    check_tensor(x, "x")
    if x.dtype not in _FLOATS:
        raise TypeError(f"x is {x.dtype}; allowed: {', '.join(map(str, _FLOATS))}")
    check_rounding(rounding)
    check_overflow(overflow)


def check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` unless ``out`` can take a result of this shape, dtype and device."""
    check_tensor(out, "out")
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; the result is "
            f"{dtype} of shape {tuple(shape)} on {device}"
        )


def random_key(rounding: str, generator: torch.Generator | None) -> Tensor | None:
    """A key for stochastic rounding from the generator (``None``: torch's own), else ``None``."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator is {type(generator).__name__}; it must be a torch.Generator or None"
        )
    if rounding != "stochastic":
        return None
    if generator is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    return torch.randint(
        0, 2**63 - 1, (1,), dtype=torch.int64, generator=generator, device=generator.device
    ).cpu()


def packed_size(numel: int, format: FormatLike) -> int:
    """Bytes that :func:`encode` makes of ``numel`` elements.

    Args:
        numel: number of elements, at least 0.
        format: at most 16 bits per element. Block formats: scales included.

    Raises:
        ValueError: a wider format, or a negative number of elements.
    """
    if numel < 0:
        raise ValueError(f"numel is {numel}; it must be at least 0")
    return _packable(format).size(numel)


def _packable(format: FormatLike) -> Layout:
    layout: Layout = layout_of(format)
    if layout.bits > 16:
        raise ValueError(
            f"{layout.name} has {layout.bits} bits; formats of at most 16 bits can be packed"
        )
    return layout


def _scales(
    exponent: int | Tensor | None, block_size: int | None, numel: int, sign: int, like: Tensor
) -> tuple[Tensor | None, int]:
    """``2**(sign*exponent)`` as float32, one per tensor or block; and the block size, 0 for none.

    Exponents out of range become 0, which the operators refuse: a tensor's values are not known
    while torch.compile traces.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int | None):
        raise TypeError(f"block_size is {block_size!r}; it must be an int or None")
    if isinstance(exponent, bool) or not isinstance(exponent, int | Tensor | None):
        raise TypeError(
            f"exponent is {type(exponent).__name__}; it must be an int or an integer tensor"
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    if exponent is None:
        if block_size is not None:
            raise ValueError("block_size is given without exponent; give one exponent per block")
        return None, 0
    if isinstance(exponent, int):
        if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
            raise ValueError(f"exponent is {exponent}; allowed: -{MAX_EXPONENT} to {MAX_EXPONENT}")
        if block_size is not None:
            raise ValueError("block_size is given with a single exponent; give a tensor of them")
        scale = math.ldexp(1.0, sign * exponent)
        return torch.full((1,), scale, dtype=torch.float32, device=like.device), 0
    if exponent.is_floating_point() or exponent.is_complex() or exponent.dtype == torch.bool:
        raise TypeError(f"exponent is {exponent.dtype}; it must be an int or an integer tensor")
    expected = 1 if block_size is None else -(-numel // block_size)
    if exponent.numel() != expected:
        raise ValueError(
            f"exponent has {exponent.numel()} elements; {numel} numbers "
            + ("need 1" if block_size is None else f"in blocks of {block_size} need {expected}")
        )
    wide = exponent.reshape(-1).to(device=like.device, dtype=torch.int64)
    allowed = (wide >= -MAX_EXPONENT) & (wide <= MAX_EXPONENT)
    bits = torch.where(allowed, (sign * wide + 127) << 23, 0).to(torch.int32)
    return bits.view(torch.float32), block_size or 0


def encode(
    x: Tensor,
    format: FormatLike,
    *,
    exponent: int | Tensor | None = None,
    block_size: int | None = None,
    rounding: str = "nearest-even",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Packed codes of ``x * 2**exponent``.

    Args:
        x: float32, float64, bfloat16 or float16, of any shape and strides; rounded once.
        format: at most 16 bits per element.
        exponent: −126 to 126; an int, or an integer tensor of one element, or with ``block_size``
            of one per block. Block formats find their scales themselves.
        block_size: elements per block of the flattened tensor; the last block may be shorter.
        rounding: as in :func:`narrowgauge.quantize`.
        overflow: as there, but a block format's elements saturate by default.
        generator: as there.
        out: uint8 of ``packed_size(x.numel(), format)`` elements to write into.

    Returns:
        uint8, one-dimensional, of ``packed_size(x.numel(), format)`` elements.

    Raises:
        TypeError: ``x`` is not a floating-point, or ``exponent`` not an integer tensor.
        ValueError: a format of more than 16 bits; an argument out of range or of the wrong length;
            a NaN in ``x`` that the format cannot hold. (A block format marks the whole block: it
            decodes to NaN, as does one with an infinity.)
    """
    check_input(x, rounding, overflow)
    layout = _packable(format)
    x = positive(x.detach())
    if out is not None:
        check_out(out, (layout.size(x.numel()),), torch.uint8, x.device)
    key = random_key(rounding, generator)
    if layout.block_size:
        _no_exponent(layout, exponent, block_size)
        result: Tensor = blocks.encode_blocks(x, layout.name, rounding, overflow, key)
        return result if out is None else out.copy_(result)
    scales, block = _scales(exponent, block_size, x.numel(), 1, x)
    if out is None:
        result = operators.encode(x, layout.name, rounding, overflow, key, scales, block)
        return result
    operators.encode_out(x, layout.name, rounding, overflow, key, scales, block, out)
    return out


def _no_exponent(layout: Layout, exponent: int | Tensor | None, block_size: int | None) -> None:
    if exponent is not None or block_size is not None:
        raise ValueError(
            f"{layout.name} finds its exponents itself; leave exponent and block_size away, or use "
            f"{layout.element}"
        )


def _numel_of(size: int, layout: Layout) -> int:
    """The most elements whose codes take exactly ``size`` bytes."""
    low, high = 0, size * 8 // layout.bits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.size(middle) <= size else (low, middle - 1)
    if layout.size(low) != size:
        raise ValueError(
            f"codes has {size} bytes, which no number of {layout.name} elements takes; "
            f"{low} take {layout.size(low)}"
        )
    return low


def decode(
    codes: Tensor,
    format: FormatLike,
    shape: int | Sequence[int] | None = None,
    *,
    exponent: int | Tensor | None = None,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The numbers that packed codes stand for, times ``2**-exponent``: undoes :func:`encode`.

    Args:
        codes: uint8, one-dimensional; every byte string of the right length is valid.
        format: what :func:`encode` was given.
        exponent: what it was given.
        block_size: what it was given.
        shape: of the result; ``None``: one dimension with as many elements as the bytes hold
            (which are more than were encoded if the last byte has room for another).
        dtype: of the result: float32, float64, bfloat16 or float16. In float64 the product is
            exact; in the others it is rounded to float32 first.
        out: a tensor to write into; it then decides shape and dtype.

    Returns:
        The decoded tensor; contiguous unless ``out`` is not.

    Raises:
        TypeError: ``codes`` is not uint8, or ``dtype`` not floating-point.
        ValueError: the number of bytes does not fit the shape, or another argument is wrong.
    """
    layout = _packable(format)
    check_tensor(codes, "codes")
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes is {codes.dtype}; it must be torch.uint8")
    if codes.dim() != 1:
        raise ValueError(f"codes has shape {tuple(codes.shape)}; it must be one-dimensional")
    if out is not None:
        check_tensor(out, "out")
        dtype = out.dtype
    if dtype not in _FLOATS:
        raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, _FLOATS))}")
    if out is not None:
        shape = out.shape if shape is None else shape
    elif shape is None:
        shape = (_numel_of(codes.numel(), layout),)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if out is not None:
        check_out(out, shape, dtype, codes.device)
        if torch.is_grad_enabled() and out.requires_grad:
            raise RuntimeError("out requires grad, and decoding has no gradient; detach it")
    numel = math.prod(shape)
    expected = layout.size(numel)
    if codes.numel() != expected:
        raise ValueError(
            f"codes has {codes.numel()} bytes; {numel} elements of {layout.name} (shape {shape}) "
            f"take {expected}"
        )
    if layout.block_size:
        _no_exponent(layout, exponent, block_size)
        values: Tensor = blocks.decode_blocks(codes, layout.name, numel, dtype)
        return values.view(shape) if out is None else out.copy_(values.view(shape))
    scales, block = _scales(exponent, block_size, numel, -1, codes)
    if dtype == torch.float64:
        values = operators.decode(codes, layout.element, numel, None, 0).double()
        if scales is not None:
            values = values * (
                scales.repeat_interleave(min(block, numel))[:numel] if block else scales
            )
        return values.view(shape) if out is None else out.copy_(values.view(shape))
    if out is None:
        result: Tensor = operators.decode(codes, layout.element, numel, scales, block)
        return result.view(shape).to(dtype)
    if is_negative_view(out):  # a negative view, as torch.Tensor.imag of a conjugate
        values = operators.decode(codes, layout.element, numel, scales, block)
        return out.copy_(values.view(shape))
    operators.decode_out(codes, layout.element, scales, block, out)
    return out
