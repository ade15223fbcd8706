"""Kernels for hot paths that own their buffers: no dispatcher, no autograd, no allocation.

All tensors are flat, contiguous and on the CPU (slices will do). The native kernels release the
GIL. Numbers travel in a scalar format of at most 16 bits, or as ``"fp32"``: then the codes are the
raw little-endian float32 and the exponent is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, FormatLike, format_of
from narrowgauge.kernels.backends import current
from narrowgauge.kernels.grid import Grid, grid_of

MAX_EXPONENT = 126
_MOST_THREADS = 1024
_PARALLEL = 64 * 1024  # elements; below it waking a second thread costs more than it brings


class UnrepresentableNaN(ValueError):
    """A NaN met a format that has none."""


def threads_for(numel: int) -> int:
    """The number of threads to use: torch's, and 1 for fewer than 64 Ki elements."""
    return torch.get_num_threads() if numel >= _PARALLEL else 1


def _threads(threads: int | None, numel: int) -> int:
    if threads is None:
        return threads_for(numel)
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads is {threads!r}; it must be an int or None")
    if not 1 <= threads <= _MOST_THREADS:
        raise ValueError(f"threads is {threads}; allowed: 1 to {_MOST_THREADS}, or None")
    return threads


@cache
def _grid(format: FormatLike) -> Grid:
    parsed = format_of(format)
    if isinstance(parsed, BlockFormat) or (parsed.bits > 16 and parsed.name != "fp32"):
        raise ValueError(
            f"format is {parsed.name}; allowed: scalar formats of at most 16 bits, and fp32"
        )
    return grid_of(parsed.name)


def _scale(grid: Grid, exponent: int) -> float:
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise ValueError(f"exponent is {exponent}; allowed: -{MAX_EXPONENT} to {MAX_EXPONENT}")
    if grid.bits == 32 and exponent:
        raise ValueError(f"exponent is {exponent}; fp32 travels unscaled, with exponent 0")
    return math.ldexp(1.0, exponent)


def _check(tensor: Tensor, what: str, dtype: torch.dtype, numel: int | None = None) -> None:
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{what} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; it must "
            f"be contiguous {dtype} on the CPU"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements; it must have {numel}")


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes that ``numel`` codes of ``bits`` bits take."""
    return (numel * bits + 7) // 8


def spoilt_error(grid: Grid) -> UnrepresentableNaN:
    """The error for a NaN that a format cannot hold."""
    return UnrepresentableNaN(
        f"the tensor contains NaN, which {grid.name} cannot hold; use a format with NaN (such as "
        "e5m2 or e4m3fn), or replace it first (torch.nan_to_num)"
    )


def largest_magnitudes(
    x: Tensor, block_size: int | None = None, *, threads: int | None = None
) -> Tensor:
    """Largest |x| per block, as the bits of a float32, so that NaN > infinity > finite.

    Args:
        x: float32, contiguous, on the CPU.
        block_size: consecutive elements per block (the last may be shorter); ``None``: all one.
        threads: 1 to 1024; ``None`` for torch's number, or 1 if ``x`` is small.

    Returns:
        int32 of one element per block; a whole empty tensor gives 0.
    """
    _check(x, "x", torch.float32)
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    numel = x.numel()
    blocks = 1 if block_size is None else -(-numel // block_size)
    out = torch.empty(blocks, dtype=torch.int32, device="cpu")
    current().largest_magnitudes(x, out, block_size or 0, _threads(threads, numel))
    return out


def encode_into(
    x: Tensor, format: FormatLike, exponent: int, out: Tensor, *, threads: int | None = None
) -> None:
    """Codes of ``x * 2**exponent``, rounded to nearest-even, with the default overflow.

    Args:
        x: float32.
        format: scalar, at most 16 bits, or fp32.
        exponent: -126 to 126.
        out: uint8, exactly ``ceil(x.numel() * bits / 8)`` elements.
        threads: as in :func:`largest_magnitudes`.

    Raises:
        ValueError: an argument is out of range, or a NaN meets a format without NaN.
    """
    grid = _grid(format)
    scale = _scale(grid, exponent)
    _check(x, "x", torch.float32)
    _check(out, "out", torch.uint8, packed_bytes(x.numel(), grid.bits))
    if grid.bits == 32:
        out.copy_(x.view(-1).view(torch.uint8))
        return
    scales = None if exponent == 0 else torch.tensor([scale], dtype=torch.float32, device="cpu")
    spoilt = current().encode(
        x.view(-1), out, grid, "nearest-even", None, scales, 0, _threads(threads, x.numel())
    )
    if spoilt:
        raise spoilt_error(grid)


def encode_fitting_into(x: Tensor, format: FormatLike, out: Tensor) -> int:
    """Codes of ``x * 2**k``, with the largest ``k`` under which all stay finite; returns ``k``.

    It is that of :func:`~narrowgauge.scaling.scale_exponent` for the largest |x|, but most numbers
    are read from memory once, not once to find the largest and once to encode.

    Args:
        x: float32.
        format: scalar, at most 16 bits.
        out: as in :func:`encode_into`.

    Returns:
        The exponent. If there is nothing but zeros, ``ALL_ZERO``; if a number is not finite,
        ``NON_FINITE``: then ``out`` holds nothing of use.

    Raises:
        ValueError: an argument is out of range.
    """
    grid = _grid(format)
    if grid.bits == 32:
        raise ValueError("format is fp32, which travels unscaled; use encode_into")
    _check(x, "x", torch.float32)
    _check(out, "out", torch.uint8, packed_bytes(x.numel(), grid.bits))
    return current().encode_fitting(x.view(-1), out, grid)


def decode_into(
    codes: Tensor,
    format: FormatLike,
    exponent: int,
    out: Tensor,
    *,
    factor: float = 1.0,
    threads: int | None = None,
) -> None:
    """``out = float32(value * 2**-exponent) * factor``.

    Args:
        codes: uint8, exactly ``ceil(out.numel() * bits / 8)`` elements.
        format: as in :func:`encode_into`.
        exponent: as in :func:`encode_into`.
        out: float32.
        factor: rounded to float32 first.
        threads: as in :func:`largest_magnitudes`.
    """
    grid = _grid(format)
    scale = _scale(grid, -exponent)
    _check(out, "out", torch.float32)
    _check(codes, "codes", torch.uint8, packed_bytes(out.numel(), grid.bits))
    scales = None if exponent == 0 else torch.tensor([scale], dtype=torch.float32, device="cpu")
    current().decode(codes, out.view(-1), grid, scales, 0, factor, _threads(threads, out.numel()))


def _senders(
    codes: Sequence[Tensor], grid: Grid, exponents: Sequence[int], numel: int
) -> tuple[list[Tensor], list[float]]:
    if not codes or len(codes) != len(exponents):
        raise ValueError(
            f"there are {len(codes)} codes and {len(exponents)} exponents; there must be as many "
            "of one as of the other, and at least one"
        )
    for number, each in enumerate(codes):
        _check(each, f"codes[{number}]", torch.uint8, packed_bytes(numel, grid.bits))
    return list(codes), [_scale(grid, -exponent) for exponent in exponents]


def reduce_into(
    codes: Sequence[Tensor],
    format: FormatLike,
    exponents: Sequence[int],
    out: Tensor,
    *,
    factor: float = 1.0,
    threads: int | None = None,
) -> None:
    """``out = (sum of value_r * 2**-exponent_r) * factor``, in one pass.

    The sum is made in float32, in the order of the senders, from the first one's value on.

    Args:
        codes: per sender, uint8 as in :func:`decode_into`.
        format: as in :func:`encode_into`.
        exponents: per sender.
        out: float32.
        factor: rounded to float32 first.
        threads: as in :func:`largest_magnitudes`.
    """
    grid = _grid(format)
    _check(out, "out", torch.float32)
    senders, scales = _senders(codes, grid, exponents, out.numel())
    current().reduce(senders, out.view(-1), grid, scales, factor, _threads(threads, out.numel()))


def reduce_encode_into(
    codes: Sequence[Tensor],
    format: FormatLike,
    exponents: Sequence[int],
    exponent_out: int,
    out: Tensor,
    *,
    numel: int | None = None,
    factor: float = 1.0,
    threads: int | None = None,
) -> None:
    """Codes of :func:`reduce_into`'s result times ``2**exponent_out``, in one pass.

    Args:
        codes: per sender, as in :func:`reduce_into`.
        format: of what comes in and what goes out.
        exponents: per sender.
        exponent_out: of the result.
        out: uint8, as many elements as each of the ``codes``.
        numel: how many numbers the codes hold; ``None``: as many as fit into ``out``.
        factor: rounded to float32 first.
        threads: as in :func:`largest_magnitudes`.

    Raises:
        ValueError: an argument is out of range, or a NaN meets a format without NaN.
    """
    grid = _grid(format)
    _check(out, "out", torch.uint8)
    if numel is None:
        numel = out.numel() * 8 // grid.bits
    _check(out, "out", torch.uint8, packed_bytes(numel, grid.bits))
    senders, scales = _senders(codes, grid, exponents, numel)
    spoilt = current().reduce_encode(
        senders,
        out,
        numel,
        grid,
        scales,
        _scale(grid, exponent_out),
        factor,
        _threads(threads, numel),
    )
    if spoilt:
        raise spoilt_error(grid)
