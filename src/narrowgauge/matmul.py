"""Products of matrices as narrow hardware would make them: every intermediate rounded, exactly.

torch.matmul on rounded operands says what narrow *storage* does to a network; what a narrow
*accumulator* does needs every product and every partial sum rounded, in a known order. That costs
more than a machine's own product; the kernels make it affordable, and no step is approximated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from narrowgauge import codec
from narrowgauge.formats import BlockFormat, FormatLike, format_of
from narrowgauge.kernels import operators
from narrowgauge.kernels.grid import check_rounding

Operands: TypeAlias = FormatLike | tuple[FormatLike | None, FormatLike | None] | None
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class MatmulBackward:
    """How :func:`matmul` makes its two backward products, ``grad @ b.T`` and ``a.T @ grad``.

    ``a`` and ``b`` are there as the forward pass rounded them; but to block formats they and
    ``grad`` are rounded anew for each product, in blocks along the dimension that it sums over.

    Args:
        gradient: the format to which ``grad`` is rounded first; ``None``: it is not.
        multiply: as in :func:`matmul`.
        accumulate: as there.
        fused: as there.
        compensated: as there.
        chunk: as there.
        rounding: as there; of ``grad`` too.
    """

    gradient: FormatLike | None = None
    multiply: FormatLike | None = None
    accumulate: FormatLike | None = None
    fused: bool = False
    compensated: bool = False
    chunk: int = 1
    rounding: str = "nearest-even"


@cache
def _checked(format: FormatLike, what: str, operand: bool) -> tuple[str, bool]:
    parsed = format_of(format)
    if isinstance(parsed, BlockFormat):
        if not operand:
            raise ValueError(
                f"{what} is {parsed.name}, a block format, but products and sums are rounded one "
                f"by one; use its elements' format {parsed.element.name}"
            )
        return parsed.name, True
    if not parsed.signed:
        raise ValueError(
            f"{what} is {parsed.name}, which has no sign and no zero; use a signed one"
        )
    return parsed.name, False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _named(format: FormatLike, what: str, operand: bool = False) -> tuple[str, bool]:
    """Name, and whether in blocks: constants to torch.compile, which need not trace the parsing."""
    return _checked(format, what, operand)


def _sums(
    multiply: FormatLike | None,
    accumulate: FormatLike | None,
    fused: bool,
    compensated: bool,
    chunk: int,
    rounding: str,
    prefix: str,
) -> tuple[str | None, str, bool, int, str]:
    """What the operator wants to know of these."""
    for name, value in (("fused", fused), ("compensated", compensated)):
        if not isinstance(value, bool):
            raise TypeError(f"{prefix}{name} is {value!r}; it must be True or False")
    sums = "fp32" if accumulate is None else _named(accumulate, f"{prefix}accumulate")[0]
    products = sums if multiply is None else _named(multiply, f"{prefix}multiply")[0]
    if fused and multiply is not None:
        raise ValueError(
            f"{prefix}multiply is {products}, but {prefix}fused=True keeps products exact; "
            "leave one of them away"
        )
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"{prefix}chunk is {chunk!r}; it must be an integer of at least 1")
    check_rounding(rounding)
    return None if fused else products, sums, compensated, chunk, rounding


def _operands(operands: Operands) -> list[tuple[str | None, bool]]:
    """Of each operand the format's name, and whether it is rounded in blocks."""
    pair = operands if isinstance(operands, tuple) else (operands, operands)
    if len(pair) != 2:
        raise ValueError(f"operands has {len(pair)} formats; give one for both, or a pair")
    return [(None, False) if each is None else _named(each, "operands", True) for each in pair]


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    operands: Operands = None,
    multiply: FormatLike | None = None,
    accumulate: FormatLike | None = None,
    fused: bool = False,
    compensated: bool = False,
    chunk: int = 1,
    rounding: str = "nearest-even",
    generator: torch.Generator | None = None,
    backward: MatmulBackward | None = None,
) -> Tensor:
    """The matrix product, with operands, products and sums in formats of their own.

    Per element of the result, with ``Q`` for rounding and ``k`` ascending: the accumulator starts
    at +0 and becomes ``Q(accumulator + product)``, where ``product`` is ``Q(a[k] * b[k])``. Each
    rounding is that of the exact value: nothing is rounded twice.

    Args:
        a: float32, bfloat16, float16, or with ``operands`` float64; of one or more dimensions,
            which combine and broadcast as in :func:`torch.matmul`; any strides.
        b: of the same dtype.
        operands: the format of both operands, or a pair; ``None``: as they are. They are rounded
            first, float64 once; to a block format in blocks along the dimension summed over.
        multiply: the format of each product; ``None``: that of ``accumulate``.
        accumulate: the format of sums; ``None``: fp32.
        fused: products are exact, as in a fused multiply-add, and ``multiply`` stays away.
        compensated: Kahan's summation: with a compensation ``c``, at first 0, per element of the
            result, ``y = Q(product - c); t = Q(sum + y); c = Q(Q(t - sum) - y); sum = t``. A ``c``
            that is not finite counts as 0, so after an infinity the result is what it would be
            without compensation.
        chunk: so many products (the last may be fewer) are added exactly to the accumulator (with
            ``compensated``: to ``-c``) and then rounded once, as tensor cores do.
        rounding: of operands, products and sums, as in :func:`narrowgauge.quantize`.
        generator: for stochastic rounding, as there.
        backward: how gradients are made. ``None``: products and sums as in the forward pass, of a
            gradient that is not rounded.

    Returns:
        The product in the dtype of ``a``; float32 holds numbers of every format exactly.

    The gradient passes straight through the rounding of operands; the products it then takes part
    in are made of the operands as they were rounded. In a block format they are rounded anew, from
    ``a`` and ``b`` as they were given, because those products sum over other dimensions: ``grad``
    and ``b`` in blocks along the columns for ``grad @ b.T``, ``a`` and ``grad`` in blocks along the
    rows (of all batches, if ``b`` is a matrix) for ``a.T @ grad``. If a batch dimension is
    broadcast, the sum of gradients over it is torch's own, not rounded, unless ``b`` is a matrix:
    its gradient is one long product. Differentiating twice uses ``backward`` for all further
    products.

    Raises:
        TypeError: a dtype that is not allowed, or two of them; ``fused`` or ``compensated`` is not
            a bool.
        ValueError: shapes that do not fit; an unknown format or rounding; a format without a sign,
            or with blocks for products or sums; ``multiply`` with ``fused``; ``chunk`` below 1.
    """
    (format_a, in_blocks_a), (format_b, in_blocks_b) = _operands(operands)
    forward = _sums(multiply, accumulate, fused, compensated, chunk, rounding, "")
    gradient, after = None, forward
    if isinstance(backward, MatmulBackward):
        if backward.gradient is not None:
            gradient, _ = _named(backward.gradient, "backward.gradient", True)
        after = _sums(
            backward.multiply,
            backward.accumulate,
            backward.fused,
            backward.compensated,
            backward.chunk,
            backward.rounding,
            "backward.",
        )
    elif backward is not None:
        raise TypeError(
            f"backward is {type(backward).__name__}; it must be a MatmulBackward, or None for the "
            "arithmetic of the forward pass"
        )
    _check(a, b, format_a, format_b)
    codec.refuse_tangents(a, b)
    random = "stochastic" in (rounding, after[-1])
    key = codec.random_key("stochastic" if random else rounding, generator)
    dtype = a.dtype
    left = _rounded(a, format_a, in_blocks_a, rounding, operators.stream(key, 1))
    right = _rounded(b, format_b, in_blocks_b, rounding, operators.stream(key, 2))
    key = operators.stream(key, 3)
    if a.dim() == 1:
        left = left.unsqueeze(0)
    if b.dim() == 1:
        right = right.unsqueeze(1)
    rows, (depth, columns) = left.shape[-2], right.shape[-2:]
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    if right.dim() == 2:  # one long matrix, so that the gradient of b is one product
        left, right = left.reshape(1, batch.numel() * rows, depth), right.unsqueeze(0)
    else:
        left = left.expand(*batch, rows, depth).reshape(batch.numel(), rows, depth)
        right = right.expand(*batch, depth, columns).reshape(batch.numel(), depth, columns)
    blocks = (format_a if in_blocks_a else None, format_b if in_blocks_b else None)
    out = operators.matmul(left, right, *blocks, *forward, gradient, *after, key)
    shape = [*batch, *(() if a.dim() == 1 else (rows,)), *(() if b.dim() == 1 else (columns,))]
    result: Tensor = out.view(shape).to(dtype)
    return result


def _rounded(
    x: Tensor, format: str | None, in_blocks: bool, rounding: str, key: Tensor | None
) -> Tensor:
    if in_blocks:  # the operator rounds, forward and backward, each time from these numbers
        return x if x.dtype == torch.float64 else x.float()
    rounded = x if format is None else operators.quantize(x, format, rounding, None, key)
    return rounded.float()


def _check(a: Tensor, b: Tensor, format_a: str | None, format_b: str | None) -> None:
    for name, x, format in (("a", a, format_a), ("b", b, format_b)):
        codec.check_tensor(x, name)
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}; allowed: {', '.join(map(str, _FLOATS))}")
        if x.dtype == torch.float64 and format is None:
            raise TypeError(
                f"{name} is torch.float64, whose products are not simulated; give operands= a "
                f"format to round it to, or use {name}.float()"
            )
        if x.dim() == 0:
            raise ValueError(f"{name} has no dimension; it must have at least one")
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}; convert one of them")
    depth, other = a.shape[-1], b.shape[0] if b.dim() == 1 else b.shape[-2]
    if depth != other:
        raise ValueError(
            f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit: a has rows "
            f"of {depth} numbers, b columns of {other}"
        )
    for m, n in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        if m != n and m != 1 and n != 1:
            raise ValueError(
                f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit: batch "
                f"dimensions of {m} and {n} cannot be broadcast"
            )
