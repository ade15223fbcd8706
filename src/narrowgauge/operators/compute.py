"""How one operator is computed in a format.

Native formats cast the operands and let torch compute in that dtype; any other format is simulated:
operands and result are rounded, and torch computes in float32 between. Parameters stay as they are;
casts and roundings are part of the graph, so gradients reach them in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, FloatFormat, FormatLike, IntFormat, format_of
from narrowgauge.operators.functions import (
    KEPT_ARGUMENTS,
    LOOKUPS,
    MIXED_NORMS,
    Function,
)
from narrowgauge.rounding import quantize

# The dimension of each operand along which a product sums: blocks of a block format lie along it.
_SUMMED = {
    **dict.fromkeys(("linear", "bilinear"), (-1,)),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), (-1, -2)),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv"), (-1, -1, -2)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), (1, 1, -1)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), (1, 0, -1)),
    "scaled_dot_product_attention": (-1, -1, -2, -1),
}

PROMOTE = "promote"
"""The format that leaves an operator to torch: it computes in the dtype its operands come in."""

NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CAST = frozenset(NATIVE.values())  # float64 is left alone, as torch.autocast does
Cast = Callable[[Tensor, torch.dtype], Tensor]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in another dtype, differentiably; itself if it has it, or is float64 or no float."""
    return x.to(dtype) if x.dtype is not dtype and x.dtype in _CAST else x


@dataclass(frozen=True)
class Compute:
    """What a format's name means for operators; see :func:`compute_of`.

    Args:
        name: as :func:`compute_of` was given it, in its canonical form.
        dtype: torch's dtype to compute in; ``None``: the operands' own.
        forward: format to round operands and result to; ``None``: none.
        backward: format to round gradients to; ``None``: none.
    """

    name: str
    dtype: torch.dtype | None
    forward: str | None = None
    backward: str | None = None
    foreign: frozenset[torch.dtype] = field(init=False, repr=False, compare=False)
    """Dtypes of operands that have to be cast."""

    def __post_init__(self) -> None:
        foreign = frozenset() if self.dtype is None else _CAST - {self.dtype}
        object.__setattr__(self, "foreign", foreign)

    @property
    def simulated(self) -> bool:
        """Whether numbers are rounded rather than stored narrowly."""
        return self.forward is not None or self.backward is not None


def compute_of(format: FormatLike) -> Compute:
    """What a format means for operators.

    Args:
        format: ``"fp32"``, ``"bf16"``, ``"fp16"`` or their dtypes: native. ``"promote"``: as torch
            does with the dtypes that come. Any other format of the library: simulated. A pair such
            as ``"e4m3/e5m2"``: operands and result in the first, and gradients, those that come
            and those that leave, in the second; a pair of the same native format is that format.

    Raises:
        ValueError: an unknown format, or one without sign.
        TypeError: no format at all.
    """
    if isinstance(format, str):
        return _compute_of(format)
    if isinstance(format, (FloatFormat, IntFormat, BlockFormat, torch.dtype)):
        return _compute_of(format_of(format).name)
    raise TypeError(
        f"the format is {type(format).__name__}; allowed: a name such as 'bf16', 'e4m3/e5m2' or "
        "'promote', a format, a dtype"
    )


@lru_cache(maxsize=1024)
def _compute_of(name: str) -> Compute:
    if name == PROMOTE:
        return Compute(PROMOTE, None)
    first, slash, second = name.partition("/")
    forward = _signed(first)
    if not slash:
        native = NATIVE.get(forward)
        return Compute(forward, native or torch.float32, None if native else forward)
    backward = _signed(second)
    rounds = (forward if forward != "fp32" else None, backward if backward != "fp32" else None)
    if forward == backward and forward in NATIVE:
        return Compute(forward, NATIVE[forward])
    return Compute(f"{forward}/{backward}", torch.float32, *rounds)


def _signed(name: str) -> str:
    format = format_of(name)
    if not isinstance(format, BlockFormat) and not format.signed:
        raise ValueError(f"the format is {format.name}, which has no sign; use a signed one")
    return format.name


class _Reuse(torch.autograd.Function):
    """A cast that was made before, with a gradient path of its own."""

    @staticmethod
    def forward(x: Tensor, narrow: Tensor) -> Tensor:
        return narrow.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return gradients[0].to(ctx.dtype), None


def reuse(x: Tensor, narrow: Tensor) -> Tensor:
    """``narrow``, a cast of ``x`` made before, as if it were made anew."""
    result: Tensor = _Reuse.apply(x, narrow)  # type: ignore[no-untyped-call]
    return result


class _Round(torch.autograd.Function):
    """Rounds what passes forward and the gradient that passes backward."""

    @staticmethod
    def forward(x: Tensor, forward: str | None, backward: str | None, dim: int | None) -> Tensor:
        return x.view_as(x) if forward is None else quantize(x, forward, dim=dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.backward_format, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        if ctx.backward_format is not None:
            gradient = quantize(gradient, ctx.backward_format, dim=ctx.dim)
        return gradient, None, None, None


def transforming() -> bool:
    """Whether torch.func's transforms are active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def rounded(x: Tensor, compute: Compute, dim: int | None) -> Tensor:
    """``x`` rounded as the format says, forward and backward. Blocks lie along ``dim``.

    Raises:
        RuntimeError: under a transform of torch.func.
    """
    if compute.simulated and not torch.compiler.is_compiling() and transforming():
        raise RuntimeError(
            f"an operator in {compute.name} was called under torch.func, whose transforms cannot "
            "pass through simulated formats; use torch.autograd, or a plan of native formats"
        )
    if compute.backward is not None:
        result: Tensor = _Round.apply(  # type: ignore[no-untyped-call]
            x, compute.forward, compute.backward, dim
        )
        return result
    return x if compute.forward is None else quantize(x, compute.forward, dim=dim)


def run(
    compute: Compute,
    operator: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cast: Cast = cast,
) -> Any:
    """The operator's result, computed in the format.

    A ``dtype=`` that the model's code gives is replaced by the format's. What the code of torch
    updates in place (running statistics) is never cast or rounded.

    Args:
        compute: the format.
        operator: its name, as in ``OPERATORS``; with a final ``_`` it writes into its input.
        function: what torch calls.
        args: its arguments.
        kwargs: its arguments by name.
        cast: makes a tensor of another dtype.
    """
    dtype = compute.dtype
    if dtype is None:
        return function(*args, **kwargs)
    if operator.endswith("_"):
        return _run_in_place(compute, operator, function, args, kwargs)
    if operator in LOOKUPS:
        result = cast(function(*args, **kwargs), dtype)
        return _round_all(result, compute, (-1,)) if compute.simulated else result
    kept = _kept(operator, compute, args)
    head, tail = args[:1], args[1:]
    if kept is None:
        tail = _cast_all(tail, dtype, cast)
    elif kept:
        tail = (*tail[: len(kept)], *_cast_all(tail[len(kept) :], dtype, cast))
    args = (*_cast_all(head, dtype, cast), *tail)
    if kwargs:
        kwargs = {
            name: value
            if kept is not None and name != "input" and (not kept or name in kept)
            else _cast_all(value, dtype, cast)
            for name, value in kwargs.items()
        }
        if kwargs.get("dtype") in _CAST:
            kwargs["dtype"] = dtype
    if not compute.simulated:
        return function(*args, **kwargs)
    args, kwargs = _rounded_operands(compute, operator, args, kwargs, kept or ())
    return _round_all(function(*args, **kwargs), compute, (-1,))


def _kept(operator: str, compute: Compute, args: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Names of the arguments after the first that keep their dtype; () are all; None are none."""
    if operator in MIXED_NORMS:
        statistics = KEPT_ARGUMENTS.get(operator)
        narrow = compute.dtype is not torch.float32
        if narrow and (statistics or not args or args[0].device.type == "cpu"):
            return ()
        return statistics
    return None


def _cast_all(value: Any, dtype: torch.dtype, cast: Cast) -> Any:
    """A tensor, or all tensors in nested tuples and lists, in the dtype."""
    if isinstance(value, Tensor):
        return cast(value, dtype) if value.dtype is not dtype and value.dtype in _CAST else value
    if type(value) is tuple:
        return tuple([_cast_all(x, dtype, cast) for x in value])
    if type(value) is list:
        return [_cast_all(x, dtype, cast) for x in value]
    return value


def _rounded_operands(
    compute: Compute,
    operator: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: tuple[str, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = _SUMMED.get(operator, (-1,))
    rounded_args = tuple(
        x if 1 <= i <= len(kept) else _round_all(x, compute, dims[min(i, len(dims) - 1) :])
        for i, x in enumerate(args)
    )
    rounded_kwargs = {
        name: x if name in kept else _round_all(x, compute, dims[-1:]) for name, x in kwargs.items()
    }
    return rounded_args, rounded_kwargs


def _round_all(value: Any, compute: Compute, dims: tuple[int, ...]) -> Any:
    """A tensor, or all tensors in nested tuples and lists, rounded; blocks lie along dims[0]."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        dim: int | None = dims[0] if value.dim() > 1 else -1
        return rounded(value, compute, dim if value.dim() else None)
    if isinstance(value, tuple):
        parts = [_round_all(x, compute, dims) for x in value]
        return (
            type(value)(*parts)
            if hasattr(value, "_fields")
            else (tuple(parts) if type(value) is tuple else type(value)(parts))
        )
    if isinstance(value, list):
        return [_round_all(x, compute, dims) for x in value]
    return value


def _run_in_place(
    compute: Compute,
    operator: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute on a rounded copy, and write the rounded result into the tensor.

    Rounding the tensor itself would change what the operator has kept for its backward pass.
    """
    if not compute.simulated:
        raise ValueError(
            f"{operator} writes into its input, so it computes in that tensor's dtype and not in "
            f"{compute.name}; its format is 'promote', or a simulated one"
        )
    target, others = args[0], args[1:]
    copy = _round_all(target.clone(), compute, (-1,))
    others, kwargs = _rounded_operands(compute, operator, others, kwargs, ())
    result = function(copy, *others, **kwargs)
    return target.copy_(_round_all(result, compute, (-1,)))
