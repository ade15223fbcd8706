"""The kernels as operators of torch: known to the dispatcher, to autograd and to torch.compile.

They are pure: stochastic rounding takes its key as a tensor, so the same key gives the same bits on
any number of threads, on any backend, compiled or not. Formats travel by name.

Defined with ``torch.library.Library`` rather than the ``custom_op`` decorator, whose calls cost
about three times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, format_of
from narrowgauge.kernels import raw
from narrowgauge.kernels.backends import for_device
from narrowgauge.kernels.grid import Grid, Sums, check_rounding, grid_of

_HOW = "str format, str rounding, str? overflow, Tensor? key"
_SUMS = "str? multiply, str accumulate, bool compensated, int chunk, str rounding"
_BACKWARD = ", ".join(
    f"{kind} backward_{name}" for kind, name in (each.split() for each in _SUMS.split(", "))
)
_SCHEMAS = (
    f"quantize(Tensor x, {_HOW}) -> Tensor",
    f"quantize_out(Tensor x, {_HOW}, Tensor(a!) out) -> ()",
    f"encode(Tensor x, {_HOW}, Tensor? scales, int block_size) -> Tensor",
    f"encode_out(Tensor x, {_HOW}, Tensor? scales, int block_size, Tensor(a!) out) -> ()",
    "decode(Tensor codes, str format, SymInt numel, Tensor? scales, int block_size) -> Tensor",
    "decode_out(Tensor codes, str format, Tensor? scales, int block_size, Tensor(a!) out) -> ()",
    "largest_magnitudes(Tensor x, int block_size) -> Tensor",
    f"matmul(Tensor a, Tensor b, str? blocks_a, str? blocks_b, {_SUMS}, str? gradient, "
    f"{_BACKWARD}, Tensor? key) -> Tensor",
)
_library = torch.library.Library("narrowgauge", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema)


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _reach(x: Tensor) -> int:
    """Bytes from the first element to the end of the last one; 0 if there is none."""
    if not x.numel():
        return 0
    steps = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size()


def refuse_overlap(x: Tensor, out: Tensor, *, identity: bool) -> None:
    """Raise if ``out`` shares memory with ``x`` (with ``identity``: unless it is the same view)."""
    start, other = x.data_ptr(), out.data_ptr()
    if x.is_contiguous() and out.is_contiguous():
        if identity and start == other:
            return
        end, other_end = start + x.nbytes, other + out.nbytes
    else:
        if any(stride == 0 and n > 1 for stride, n in zip(out.stride(), out.shape, strict=True)):
            raise ValueError(
                "out is an expanded tensor whose elements share memory; clone it first"
            )
        if identity and start == other and x.stride() == out.stride():
            return
        end, other_end = start + _reach(x), other + _reach(out)
    if start < other_end and other < end and x.device == out.device:
        raise ValueError(
            "out shares memory with the input without being the same tensor; give it memory of "
            f"its own{', or the input itself' if identity else ''}"
        )


def _written(out: Tensor) -> None:
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


# -- quantize --------------------------------------------------------------------------------------


def _quantize_into(x: Tensor, out: Tensor, grid: Grid, rounding: str, key: Tensor | None) -> None:
    if x.dtype in (torch.bfloat16, torch.float16):  # exact in float32
        wide = x.float().contiguous()
        _quantize_into(wide, wide, grid, rounding, key)
        out.copy_(wide)
    elif (x.is_contiguous() and out.is_contiguous()) or (
        # Stochastic rounding counts elements, so there the order in memory matters.
        rounding != "stochastic" and x.stride() == out.stride() and is_dense(x)
    ):
        for_device(x.device).quantize(x, out, grid, rounding, key, raw.threads_for(x.numel()))
    else:
        compact = x.clone(memory_format=torch.contiguous_format)
        _quantize_into(compact, compact, grid, rounding, key)
        out.copy_(compact)


def _quantize(
    x: Tensor, format: str, rounding: str, overflow: str | None, key: Tensor | None
) -> Tensor:
    out = torch.empty_like(x)
    _quantize_into(x, out, grid_of(format, overflow), rounding, key)
    return out


def _quantize_out(
    x: Tensor, format: str, rounding: str, overflow: str | None, key: Tensor | None, out: Tensor
) -> None:
    refuse_overlap(x, out, identity=True)
    _quantize_into(x, out, grid_of(format, overflow), rounding, key)
    _written(out)


def _quantize_fake(
    x: Tensor, format: str, rounding: str, overflow: str | None, key: Tensor | None
) -> Tensor:
    check_rounding(rounding)
    grid_of(format, overflow)
    return torch.empty_like(x)


def _quantize_backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return grad, None, None, None, None  # straight through


def _check_scales(scales: Tensor | None) -> None:
    if scales is not None and bool((scales == 0).any()):
        raise ValueError(
            f"an exponent is out of range; allowed: -{raw.MAX_EXPONENT} to {raw.MAX_EXPONENT}"
        )


# -- encode ----------------------------------------------------------------------------------------


def encode_into(
    x: Tensor,
    out: Tensor | None,
    grid: Grid,
    rounding: str,
    key: Tensor | None,
    scales: Tensor | None,
    block_size: int,
) -> Tensor:
    """Packed codes of ``x * scales`` into ``out``, if there is one; on any device.

    Args:
        x: float32, float64, bfloat16 or float16, any shape.
        out: uint8, or ``None`` for a new one.
        grid: the numbers to round to.
        rounding: see :func:`narrowgauge.quantize`.
        key: for stochastic rounding.
        scales: powers of two, float32, one for all (``block_size`` 0) or one per block; a block
            whose scale is NaN gets codes of 0.
        block_size: elements per block, or 0.

    Raises:
        UnrepresentableNaN: a NaN met a format without NaN.
    """
    flat = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).contiguous().view(-1)
    size = raw.packed_bytes(flat.numel(), grid.bits)
    direct = out is not None and out.is_contiguous()
    target = out if out is not None and direct else x.new_empty(size, dtype=torch.uint8)
    spoilt = for_device(x.device).encode(
        flat, target, grid, rounding, key, scales, block_size, raw.threads_for(flat.numel())
    )
    out = target if out is None or direct else out.copy_(target)
    if spoilt:
        raise raw.spoilt_error(grid)
    return out


def _encode(
    x: Tensor,
    format: str,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
    scales: Tensor | None,
    block_size: int,
) -> Tensor:
    _check_scales(scales)
    return encode_into(x, None, grid_of(format, overflow), rounding, key, scales, block_size)


def _encode_out(
    x: Tensor,
    format: str,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
    scales: Tensor | None,
    block_size: int,
    out: Tensor,
) -> None:
    _check_scales(scales)
    refuse_overlap(x, out, identity=False)
    encode_into(x, out, grid_of(format, overflow), rounding, key, scales, block_size)
    _written(out)


def _encode_fake(
    x: Tensor,
    format: str,
    rounding: str,
    overflow: str | None,
    key: Tensor | None,
    scales: Tensor | None,
    block_size: int,
) -> Tensor:
    check_rounding(rounding)
    bits = grid_of(format, overflow).bits
    return x.new_empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)


# -- decode ----------------------------------------------------------------------------------------


def decode_into(
    codes: Tensor,
    out: Tensor,
    grid: Grid,
    scales: Tensor | None,
    block_size: int,
    factor: float = 1.0,
) -> None:
    """``float32(value * scales) * factor`` into ``out``, of any dtype and on any device.

    Args:
        codes: uint8.
        out: any shape; as many numbers as the codes hold.
        grid: the numbers they stand for.
        scales: float32, one for all (``block_size`` 0) or one per block; any numbers.
        block_size: elements per block, or 0.
        factor: rounded to float32 first.
    """
    codes = codes.contiguous()
    if out.dtype == torch.float32 and out.is_contiguous():
        threads = raw.threads_for(out.numel())
        kernels = for_device(codes.device)
        kernels.decode(codes, out.view(-1), grid, scales, block_size, factor, threads)
    else:
        wide = torch.empty(out.shape, dtype=torch.float32, device=codes.device)
        decode_into(codes, wide, grid, scales, block_size, factor)
        out.copy_(wide)


def _decode(
    codes: Tensor, format: str, numel: int, scales: Tensor | None, block_size: int
) -> Tensor:
    _check_scales(scales)
    out = codes.new_empty(numel, dtype=torch.float32)
    decode_into(codes, out, grid_of(format), scales, block_size)
    return out


def _decode_out(
    codes: Tensor, format: str, scales: Tensor | None, block_size: int, out: Tensor
) -> None:
    _check_scales(scales)
    refuse_overlap(codes, out, identity=False)
    decode_into(codes, out, grid_of(format), scales, block_size)
    _written(out)


def _decode_fake(
    codes: Tensor, format: str, numel: int, scales: Tensor | None, block_size: int
) -> Tensor:
    return codes.new_empty(numel, dtype=torch.float32)


# -- largest magnitudes ----------------------------------------------------------------------------


def _largest_magnitudes(x: Tensor, block_size: int) -> Tensor:
    flat = x.contiguous().view(-1)
    blocks = (flat.numel() + block_size - 1) // block_size if block_size else 1
    out = flat.new_empty(blocks, dtype=torch.int32)
    threads = raw.threads_for(flat.numel())
    for_device(x.device).largest_magnitudes(flat, out, block_size, threads)
    return out


def _largest_magnitudes_fake(x: Tensor, block_size: int) -> Tensor:
    blocks = (x.numel() + block_size - 1) // block_size if block_size else 1
    return x.new_empty(blocks, dtype=torch.int32)


# -- matmul ----------------------------------------------------------------------------------------


def _matmul(
    a: Tensor,
    b: Tensor,
    blocks_a: str | None,
    blocks_b: str | None,
    multiply: str | None,
    accumulate: str,
    compensated: bool,
    chunk: int,
    rounding: str,
    *rest: object,
) -> Tensor:
    grid = None if multiply is None else grid_of(multiply)
    sums = Sums(grid, grid_of(accumulate), compensated, chunk, rounding)
    key = rest[-1]
    assert key is None or isinstance(key, Tensor)
    a = _in_blocks(a, blocks_a, 2, rounding, stream(key, 4))
    b = _in_blocks(b, blocks_b, 1, rounding, stream(key, 5))
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    threads = raw.threads_for(out.numel() * a.shape[2])
    for_device(a.device).matmul(a, b, out, sums, key, threads)
    return out


def _in_blocks(
    x: Tensor, format: str | None, dim: int, rounding: str, key: Tensor | None
) -> Tensor:
    """``x`` in float32, rounded in blocks along the dimension that the product sums over."""
    if format is None:
        return x
    rounded: Tensor = torch.ops.narrowgauge.quantize_blocks(x, format, dim, rounding, None, key)
    return rounded.float()


def _matmul_fake(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.float32)


def stream(key: Tensor | None, number: int) -> Tensor | None:
    """A key of its own for each use, 1 to 7, of a call's key; and of that key again."""
    return None if key is None else key * 8 + number  # int64 wraps around


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, *_, key = inputs
    ctx.save_for_backward(a, b, *(() if key is None else (key,)))
    ctx.blocks = inputs[2:4]
    ctx.how = inputs[9:15]


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, *keys = ctx.saved_tensors
    key = keys[0] if keys else None
    gradient, *sums = ctx.how
    blocks_a, blocks_b = ctx.blocks
    blocks_grad = None
    if gradient is not None and isinstance(format_of(gradient), BlockFormat):
        blocks_grad = gradient  # each product below cuts it along its own sum
    elif gradient is not None:
        grad = quantize(grad, gradient, sums[-1], None, stream(key, 1))
    # What is differentiated again, is so by the rules of the backward pass.
    how = (*sums, gradient, *sums)
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        across = b.transpose(1, 2)
        grad_a = matmul(grad, across, blocks_grad, blocks_b, *how, stream(key, 2)).to(a.dtype)
    if ctx.needs_input_grad[1]:
        across = a.transpose(1, 2)
        grad_b = matmul(across, grad, blocks_a, blocks_grad, *how, stream(key, 3)).to(b.dtype)
    return (grad_a, grad_b, *(None,) * 14)


def _register() -> None:
    kernels: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "quantize": (_quantize, _quantize_fake),
        "quantize_out": (_quantize_out, lambda *_: None),
        "encode": (_encode, _encode_fake),
        "encode_out": (_encode_out, lambda *_: None),
        "decode": (_decode, _decode_fake),
        "decode_out": (_decode_out, lambda *_: None),
        "largest_magnitudes": (_largest_magnitudes, _largest_magnitudes_fake),
        "matmul": (_matmul, _matmul_fake),
    }
    for name, (kernel, fake) in kernels.items():
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"narrowgauge::{name}", fake, lib=_library)
    torch.library.register_autograd("narrowgauge::quantize", _quantize_backward, lib=_library)
    torch.library.register_autograd(
        "narrowgauge::matmul", _matmul_backward, setup_context=_matmul_setup, lib=_library
    )


_register()

quantize = torch.ops.narrowgauge.quantize.default
quantize_out = torch.ops.narrowgauge.quantize_out.default
encode = torch.ops.narrowgauge.encode.default
encode_out = torch.ops.narrowgauge.encode_out.default
decode = torch.ops.narrowgauge.decode.default
decode_out = torch.ops.narrowgauge.decode_out.default
largest_magnitudes = torch.ops.narrowgauge.largest_magnitudes.default
matmul = torch.ops.narrowgauge.matmul.default
