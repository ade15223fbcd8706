"""Rounding tensors to a narrow format, with the result still in the tensor's own dtype.

The result is the exactly rounded one: round first, as if the format's exponents were unbounded
above, then see whether it overflows. The gradient passes straight through, so rounding may stand
anywhere in a model. That holds for ``backward()``; forward-mode differentiation is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge import codec
from narrowgauge.formats import FormatLike
from narrowgauge.kernels import blocks, operators


def quantize(
    x: Tensor,
    format: FormatLike,
    *,
    dim: int | None = None,
    rounding: str = "nearest-even",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round every element of a tensor to a format.

    Args:
        x: float32, float64, bfloat16 or float16, of any shape and strides. float64 is rounded
            once; bfloat16 and float16 pass through float32, which holds them exactly.
        format: a name such as ``"e4m3"``, a format, or a torch dtype. A block format without
            ``dim`` gives what :func:`narrowgauge.decode` makes of :func:`narrowgauge.encode`.
        dim: for block formats, the dimension along which blocks lie: each row in that direction is
            cut by itself, and its last block may be shorter. Operands of a product have theirs
            along the dimension that is summed over. ``None``: the flattened tensor is cut. Scalar
            formats round each number alone and ignore it.
        rounding: how to choose between the two neighbours.

            - ``"nearest-even"``: the nearer one; of two equally near, the one with the even *code*.
              With mantissa bits that is the even value; without any, as in e3m0, 3 becomes 2, and
              6 and 12 become 8. Without subnormals, half the smallest normal number becomes 0.
            - ``"nearest-away"``: the nearer one, or of two the one farther from zero.
            - ``"toward-zero"``, ``"up"`` (to +∞), ``"down"`` (to −∞). Where these round a finite
              number beyond the largest toward zero, they give the largest, whatever ``overflow``.
            - ``"stochastic"``: away from zero with a probability equal to the distance from the
              neighbour nearer to zero, in spacings, cut off to a multiple of 2**-32.
        overflow: what a finite number becomes that rounds beyond the largest: ``"infinity"``,
            ``"saturate"`` (the largest), ``"nan"``; ``None`` means infinity where the format has
            one, else saturate. An infinite input is no overflow: it stays, or becomes NaN in a
            format without infinity, or the largest number in one that has neither. NaN stays NaN,
            even where the format has none. Integers always saturate; unsigned scale formats have
            no zero, so zero and negative numbers become NaN.
        generator: for stochastic rounding; ``None`` is torch's own, set by ``torch.manual_seed``.
            The same state gives the same bits on any number of threads. Under ``torch.compile``
            they repeat with the seed as well, but a backend that draws its own random numbers, as
            the default one does, gives other bits than without compilation.
        out: a tensor of the same shape and dtype to write into; may be ``x``. Writing into memory
            that exists is several times as fast as into fresh memory.

    Returns:
        The rounded tensor in ``x``'s dtype. A number of the format that this dtype cannot hold (a
        large bf16 number in float16) is converted as torch converts it. In formats without
        negative zero, −0 becomes 0.

    Raises:
        TypeError: ``x`` is not a dense floating-point tensor, or another argument's type is wrong.
        ValueError: an unknown format, rounding or overflow; an overflow that the format lacks;
            ``out`` of another shape, dtype or device, or partly the same memory as ``x``.
        IndexError: ``x`` has no dimension ``dim``.
        RuntimeError: ``out`` is given and a gradient is asked for.
        NotImplementedError: ``x`` has a tangent (forward-mode differentiation).
    """
    codec.check_input(x, rounding, overflow)
    codec.refuse_tangents(x)
    layout = codec.layout_of(format)
    if out is not None:
        codec.check_out(out, x.shape, x.dtype, x.device)
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            raise RuntimeError(
                "quantize with out= does not support automatic differentiation, but x or out "
                "requires grad; leave out= away, or use torch.no_grad()"
            )
    if isinstance(dim, bool) or not (dim is None or hasattr(dim, "__index__")):
        raise TypeError(f"dim is {dim!r}; it must be an int, or None for the flattened tensor")
    if dim is not None and not -max(1, x.dim()) <= dim < max(1, x.dim()):
        raise IndexError(f"dim is {dim}; x has {x.dim()} dimensions")
    key = codec.random_key(rounding, generator)
    if out is None or codec.is_negative_view(out):  # as torch.Tensor.imag of a conjugate
        if layout.block_size:
            result: Tensor = blocks.quantize_blocks(x, layout.name, dim, rounding, overflow, key)
        else:
            result = operators.quantize(x, layout.name, rounding, overflow, key)
        return result if out is None else out.copy_(result)
    x = codec.positive(x)
    if layout.block_size:
        blocks.quantize_blocks_out(x, layout.name, dim, rounding, overflow, key, out)
    else:
        operators.quantize_out(x, layout.name, rounding, overflow, key, out)
    return out


def quantize_(
    x: Tensor,
    format: FormatLike,
    *,
    dim: int | None = None,
    rounding: str = "nearest-even",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round a tensor in place: :func:`quantize` with the result in ``x``, which is returned.

    As with torch's own in-place operations, a leaf that requires grad is refused, and the gradient
    of any other tensor passes straight through.
    """
    codec.check_tensor(x, "x")
    differentiable = torch.is_grad_enabled() and x.requires_grad
    rounded = quantize(
        x,
        format,
        dim=dim,
        rounding=rounding,
        overflow=overflow,
        generator=generator,
        out=None if differentiable else x,
    )
    return x.copy_(rounded) if differentiable else rounded
