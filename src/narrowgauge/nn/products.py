"""The products that layers are made of, each forward and backward.

Scalar formats: an operand is rounded once, before anything is made of it, and the product takes the
rounded numbers. Block formats depend on the direction of the sum, so ``matmul`` gets the unrounded
numbers and rounds them along each sum. Where no sum is simulated, torch's own product of the
rounded operands is as good and much faster; as soon as one of a layer's sums is, forward or
backward, all of them are made here, in one documented order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul import MatmulBackward, matmul
from narrowgauge.nn.layer_formats import LayerFormats
from narrowgauge.rounding import quantize


def in_autocast(device: torch.device) -> bool:
    """Whether autocast is on for tensors of this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Layers that round ignore autocast: what they compute in is said by their formats."""
    return torch.autocast(device.type, enabled=False) if in_autocast(device) else nullcontext()


class _RoundGradient(torch.autograd.Function):
    """The identity forward, rounding backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, rounding: str) -> Tensor:
        ctx.how = format, rounding
        return x.clone()  # a view could not be written in place, as nn.ReLU(inplace=True) does

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        format, rounding = ctx.how
        return quantize(grads[0], format, rounding=rounding), None, None


def round_gradient(x: Tensor, format: str, rounding: str) -> Tensor:
    """``x`` itself, whose gradient is rounded when it comes by."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    result: Tensor = _RoundGradient.apply(x, format, rounding)  # type: ignore[no-untyped-call]
    return result


def rounded(x: Tensor, kind: str, formats: LayerFormats) -> Tensor:
    """``x`` in the format of its kind, if that is a scalar one; else ``matmul`` will do it."""
    format = getattr(formats, kind)
    if format is None or kind in formats.blocks:
        return x
    if format == "fp32" and x.dtype != torch.float64:
        return x
    return quantize(x, format, rounding=formats.rounding)


def gradient_rounded(y: Tensor, formats: LayerFormats) -> Tensor:
    """A product's result, whose gradient is rounded once for all that is made of it."""
    format = formats.gradients
    if format is None or "gradients" in formats.blocks:
        return y
    if format == "fp32" and y.dtype != torch.float64:
        return y
    assert isinstance(format, str)
    return round_gradient(y, format, formats.backward_sums["rounding"])


def check_dtypes(x: Tensor, weight: Tensor) -> None:
    """Raise ``TypeError`` unless both are of one floating-point dtype, as torch's layers demand."""
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(
            f"the input is {x.dtype} and the layer's weight {weight.dtype}; convert one of them, "
            "to one floating-point dtype"
        )


def simulated(x: Tensor, formats: LayerFormats) -> bool:
    """Whether sums are made by ``narrowgauge.matmul`` and not by torch.

    Raises:
        TypeError: they are to be, but ``x`` is float64.
    """
    sums = (formats.forward_sums["accumulate"], formats.backward_sums["accumulate"])
    if formats.native and (x.dtype != torch.float64 or sums == (None, None)):
        return False
    if x.dtype == torch.float64:
        raise TypeError(
            f"the input is torch.float64, whose sums are not simulated, but the layer has {formats}"
            "; use model.float(), or leave accumulators and block formats away"
        )
    return True


def _save(ctx: Any, a: Tensor, b: Tensor) -> None:
    """Each operand of a product, if the other one's gradient is wanted."""
    wanted_a, wanted_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if wanted_b else None, b if wanted_a else None)


class _Product(torch.autograd.Function):
    """``a @ b`` of equal batch dimensions, whose backward products ignore autocast too.

    Torch's own would obey it where ``backward()`` is called inside. (Convolutions' do not.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        _save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        with without_autocast(grad.device):
            grad_a = None if b is None else _torch_product(grad, b.transpose(-2, -1))
            grad_b = None if a is None else _torch_product(a.transpose(-2, -1), grad)
        return grad_a, grad_b


def _torch_product(a: Tensor, b: Tensor) -> Tensor:
    y: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    """``F.linear`` of a matrix, whose backward products ignore autocast too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        _save(ctx, *inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad.device):
            if weight is not None:
                grad_x = _torch_product(grad, weight)
            if x is not None:
                grad_weight = _torch_product(grad.t(), x)
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # As rows: of more dimensions F.linear gives a view, which a Function's result must not be if it
    # is to be written in place.
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


def product(a: Tensor, b: Tensor, kinds: tuple[str, str], formats: LayerFormats) -> Tensor:
    """``a @ b``, each of a kind (``"weights"``, ``"activations"``) that says its format.

    Their batch dimensions are equal.
    """
    if not simulated(a, formats):
        y = _torch_product(rounded(a, kinds[0], formats), rounded(b, kinds[1], formats))
        return gradient_rounded(y, formats)
    y = matmul(
        rounded(a.float(), kinds[0], formats),
        rounded(b.float(), kinds[1], formats),
        operands=formats.operands(*kinds),
        **formats.forward_sums,
        backward=formats.matmul_backward,
    )
    return gradient_rounded(y, formats).to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, formats: LayerFormats) -> Tensor:
    """``x @ weight.T + bias``; ``x`` of shape (..., in), ``weight`` (out, in)."""
    check_dtypes(x, weight)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"the input has shape {tuple(x.shape)}; a layer of {weight.shape[1]} input features "
            f"takes (..., {weight.shape[1]})"
        )
    if not simulated(x, formats):
        x, weight = rounded(x, "activations", formats), rounded(weight, "weights", formats)
        return gradient_rounded(_torch_linear(x, weight, bias), formats)
    y = matmul(
        rounded(x.float(), "activations", formats),
        rounded(weight.float(), "weights", formats).t(),
        operands=formats.operands("activations", "weights"),
        **formats.forward_sums,
        backward=formats.matmul_backward,
    )
    if bias is not None:
        rows = y.reshape(y.shape[:-1].numel(), bias.shape[0])
        y = _with_bias(rows, bias, formats).view(y.shape)
    return gradient_rounded(y, formats).to(x.dtype)


def _with_bias(y: Tensor, bias: Tensor, formats: LayerFormats) -> Tensor:
    """``Q(y + Q(bias))`` for ``y`` of shape (samples, channels), with ``Q`` the accumulator's.

    Both are products with ones: so the bias is rounded to the accumulator, the sum of two numbers
    is rounded once in any format and rounding, and the bias's gradient is one sum over the samples.
    """
    how = {
        "accumulate": formats.forward_sums["accumulate"],
        "fused": True,
        "rounding": formats.rounding,
    }
    ones = y.new_ones(y.shape[0], 1)
    rows = matmul(ones, bias.float().unsqueeze(0), **how, backward=formats.matmul_backward)
    terms = torch.stack([y.flatten(), rows.flatten()])
    # Backward, terms get the gradient times one: exact.
    total = matmul(y.new_ones(1, 2), terms, **how, backward=MatmulBackward())
    return total.view(y.shape)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    formats: LayerFormats,
) -> Tensor:
    """A convolution without padding, with simulated sums.

    ``x`` has shape (batch, channels, *size), ``weight`` (out, channels / groups, *kernel). Sums run
    over the channels of a group and, within each, over the kernel's positions in memory order.
    """
    how = (tuple(stride), tuple(dilation), groups, formats)
    wide, kernels = rounded(x.float(), "activations", formats), weight.float()
    kernels = rounded(kernels, "weights", formats)
    y: Tensor = _Convolution.apply(wide, kernels, *how)  # type: ignore[no-untyped-call]
    if bias is not None:
        y = _with_bias(y, bias, formats)
    size = _outputs(x.shape[2:], weight.shape[2:], stride, dilation)
    y = y.view(x.shape[0], *size, weight.shape[0]).movedim(-1, 1)
    y = y.clone(memory_format=torch.contiguous_format)  # a view could not be written in place
    return gradient_rounded(y, formats).to(x.dtype)


class _Convolution(torch.autograd.Function):
    """Gives shape (batch * positions, out). Each gradient is one product, with one long sum.

    That of ``x`` is the convolution of the gradient, spread by the stride with zeros between, with
    the reversed kernels: its sums run over the group's output channels and the kernel's positions.
    (A product followed by adding up columns would add in float32 what the accumulator should.)
    That of ``weight`` sums over the batch and the output positions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        formats: LayerFormats,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = stride, dilation, groups, formats
        columns = _columns(x, weight.shape[2:], stride, dilation, groups)
        y = matmul(
            weight.reshape(groups, weight.shape[0] // groups, columns.shape[1]),
            columns,
            operands=formats.operands("weights", "activations"),
            **formats.forward_sums,
        )
        return y.view(weight.shape[0], columns.shape[2]).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, dilation, groups, formats = ctx.how
        grad, sums = grads[0], formats.backward_sums
        kernel, out = weight.shape[2:], weight.shape[0]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            positions = _outputs(x.shape[2:], kernel, stride, dilation)
            image = grad.reshape(x.shape[0], *positions, out).movedim(-1, 1)
            spread = _spread(image, x.shape[2:], kernel, stride, dilation)
            columns = _columns(spread, kernel, (1,) * len(kernel), dilation, groups)
            turned = weight.flip(tuple(range(2, weight.dim())))
            turned = turned.reshape(groups, out // groups, weight.shape[1], kernel.numel())
            turned = turned.transpose(1, 2).reshape(groups, weight.shape[1], columns.shape[1])
            operands = formats.operands("weights", "gradients")
            grad_x = matmul(turned, columns, operands=operands, **sums)
            grad_x = grad_x.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        if ctx.needs_input_grad[1]:
            columns = _columns(x, kernel, stride, dilation, groups)
            rows = grad.t().reshape(groups, out // groups, columns.shape[2])
            operands = formats.operands("gradients", "activations")
            grad_weight = matmul(rows, columns.transpose(1, 2), operands=operands, **sums)
            grad_weight = grad_weight.view(weight.shape)
        return grad_x, grad_weight, None, None, None, None


def _outputs(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    geometry = zip(size, kernel, stride, dilation, strict=True)
    return [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in geometry]


def _columns(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """What each output position sees: (groups, channels / groups * kernel, batch * positions)."""
    batch, channels, dims = x.shape[0], x.shape[1], len(kernel)
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
    positions = x.shape[2 : 2 + dims].numel()
    order = (1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims))
    depth = channels // groups * torch.Size(kernel).numel()
    return x.permute(order).reshape(groups, depth, batch * positions)


def _spread(
    grad: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """``grad`` with ``stride - 1`` zeros between and room for the kernel at both ends."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    whole = [n + r for n, r in zip(size, reach, strict=True)]
    spread = grad.new_zeros(*grad.shape[:2], *whole)
    ends = [r + (n - 1) * s + 1 for r, n, s in zip(reach, grad.shape[2:], stride, strict=True)]
    steps = [slice(r, e, s) for r, e, s in zip(reach, ends, stride, strict=True)]
    places = (slice(None), slice(None), *steps)
    spread[places] = grad
    return spread
