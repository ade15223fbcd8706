"""Which implementation of the kernels runs.

On the CPU the native library, at some level; on a GPU Triton, imported with the first tensor that
needs it; and wherever these are missing, the reference, with a warning that says so.
"""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, format_of
from narrowgauge.kernels import native, reference
from narrowgauge.kernels.grid import DifferenceBlocks, Grid, Sums
from narrowgauge.scaling import ALL_ZERO, NON_FINITE, scale_exponent

VARIABLE = "NARROWGAUGE_KERNELS"
WITHOUT_TRITON = (
    "narrowgauge's kernels for GPUs need Triton, which cannot be imported here ({error}), so the "
    "slow reference kernels in plain torch are in use. To get the fast ones: pip install triton "
    "(in the version that your torch names; builds of torch for CUDA bring it)"
)
WITHOUT_KERNELS = (
    "narrowgauge has no kernels for tensors on {device!r}, only for 'cpu' and 'cuda', so the slow "
    "reference kernels in plain torch are in use. To get fast ones, move the tensors: x.cpu()"
)


class Kernels(Protocol):
    """What an implementation offers, on flat contiguous tensors; results go into ``out``.

    ``scales`` are float32 powers of two, one for all (``block_size`` 0) or one per block; a block
    whose scale is NaN gets codes of 0. ``spoilt`` means: a NaN met a format without NaN.
    """

    name: str

    def quantize(
        self, x: Tensor, out: Tensor, grid: Grid, rounding: str, key: Tensor | None, threads: int
    ) -> None:
        """Round float32 or float64 ``x`` into ``out`` of the same dtype (may be ``x``)."""

    def encode(
        self,
        x: Tensor,
        out: Tensor,
        grid: Grid,
        rounding: str,
        key: Tensor | None,
        scales: Tensor | None,
        block_size: int,
        threads: int,
    ) -> bool:
        """Packed codes of ``x * scales`` into ``out`` (uint8); returns ``spoilt``."""

    def decode(
        self,
        codes: Tensor,
        out: Tensor,
        grid: Grid,
        scales: Tensor | None,
        block_size: int,
        factor: float,
        threads: int,
    ) -> None:
        """``float32(value * scales) * factor`` into ``out`` (float32)."""

    def largest_magnitudes(self, x: Tensor, out: Tensor, block_size: int, threads: int) -> None:
        """Bits of the largest |x| per block (0: one block) into ``out`` (int32)."""

    def encode_difference(
        self,
        master: Tensor,
        replica: Tensor | None,
        scales: Tensor,
        codes: Tensor,
        blocks: DifferenceBlocks,
        tolerance: float,
        threads: int,
    ) -> int:
        """Codes of ``master - replica`` (float32) in blocks, and their scales (uint8, e8m0).

        Without a replica, of ``master`` itself.

        Blocks escape, with a scale of 255 and codes of 0, whose difference is not finite, or may
        be off by more than ``tolerance`` times their largest ``|master|``; returns how many do.
        """

    def apply_difference(
        self,
        scales: Tensor,
        codes: Tensor,
        replica: Tensor,
        blocks: DifferenceBlocks,
        threads: int,
    ) -> None:
        """``replica += float32(value * scale)``; blocks that escaped get 0 added."""

    def matmul(
        self, a: Tensor, b: Tensor, out: Tensor, sums: Sums, key: Tensor | None, threads: int
    ) -> None:
        """Batched ``a @ b`` (float32, three dimensions, any strides) into contiguous ``out``."""


class Backend(Kernels, Protocol):
    """What an implementation for the CPU offers besides: :mod:`narrowgauge.kernels.raw` uses it."""

    def encode_fitting(self, x: Tensor, out: Tensor, grid: Grid) -> int:
        """Packed codes of ``x * 2**k`` into ``out`` (uint8), ``k`` fitting the largest |x|.

        Returns ``k`` of :func:`~narrowgauge.scaling.scale_exponent`; ``ALL_ZERO``, or
        ``NON_FINITE``, with which ``out`` holds nothing of use.
        """

    def reduce(
        self,
        codes: list[Tensor],
        out: Tensor,
        grid: Grid,
        scales: list[float],
        factor: float,
        threads: int,
    ) -> None:
        """Sum of the senders' scaled values in order, times ``factor``, into ``out`` (float32)."""

    def reduce_encode(
        self,
        codes: list[Tensor],
        out: Tensor,
        numel: int,
        grid: Grid,
        scales: list[float],
        scale_out: float,
        factor: float,
        threads: int,
    ) -> bool:
        """Codes of that sum times ``scale_out`` into ``out`` (uint8); returns ``spoilt``."""


class Reference:
    """:mod:`narrowgauge.kernels.reference` on any device; it ignores ``threads``."""

    name = "reference"

    def quantize(
        self, x: Tensor, out: Tensor, grid: Grid, rounding: str, key: Tensor | None, threads: int
    ) -> None:
        """See :meth:`Backend.quantize`."""
        out.copy_(reference.quantize(x, grid, rounding, key))

    def encode(
        self,
        x: Tensor,
        out: Tensor,
        grid: Grid,
        rounding: str,
        key: Tensor | None,
        scales: Tensor | None,
        block_size: int,
        threads: int,
    ) -> bool:
        """See :meth:`Backend.encode`."""
        codes, spoilt = reference.encode(x, grid, rounding, key, scales, block_size)
        out.copy_(codes)
        return bool(spoilt)

    def encode_fitting(self, x: Tensor, out: Tensor, grid: Grid) -> int:
        """See :meth:`Backend.encode_fitting`."""
        format = format_of(grid.name)
        assert not isinstance(format, BlockFormat)
        largest = reference.largest_magnitudes(x, 0).view(torch.float32).item()
        exponent = scale_exponent(largest, format)
        if exponent == NON_FINITE or not largest:
            return exponent if largest else ALL_ZERO
        scale = torch.tensor([2.0**exponent], dtype=torch.float32, device="cpu")
        self.encode(x, out, grid, "nearest-even", None, scale, 0, 1)
        return exponent

    def decode(
        self,
        codes: Tensor,
        out: Tensor,
        grid: Grid,
        scales: Tensor | None,
        block_size: int,
        factor: float,
        threads: int,
    ) -> None:
        """See :meth:`Backend.decode`."""
        values = reference.decode(codes, grid, out.numel())
        out.copy_(reference.scaled(values, scales, block_size, factor))

    def reduce(
        self,
        codes: list[Tensor],
        out: Tensor,
        grid: Grid,
        scales: list[float],
        factor: float,
        threads: int,
    ) -> None:
        """See :meth:`Backend.reduce`."""
        out.copy_(reference.reduce(codes, grid, scales, out.numel(), factor))

    def reduce_encode(
        self,
        codes: list[Tensor],
        out: Tensor,
        numel: int,
        grid: Grid,
        scales: list[float],
        scale_out: float,
        factor: float,
        threads: int,
    ) -> bool:
        """See :meth:`Backend.reduce_encode`."""
        total = reference.reduce(codes, grid, scales, numel, factor)
        if grid.bits == 32:
            out.copy_(total.view(torch.uint8))
            return False
        return self.encode(
            total,
            out,
            grid,
            "nearest-even",
            None,
            torch.tensor([scale_out], device="cpu"),
            0,
            threads,
        )

    def largest_magnitudes(self, x: Tensor, out: Tensor, block_size: int, threads: int) -> None:
        """See :meth:`Backend.largest_magnitudes`."""
        out.copy_(reference.largest_magnitudes(x, block_size))

    def encode_difference(
        self,
        master: Tensor,
        replica: Tensor | None,
        scales: Tensor,
        codes: Tensor,
        blocks: DifferenceBlocks,
        tolerance: float,
        threads: int,
    ) -> int:
        """See :meth:`Kernels.encode_difference`."""
        result = reference.encode_difference(master, replica, blocks, tolerance)
        scales.copy_(result[0])
        codes.copy_(result[1])
        return int((scales == reference.ESCAPED).sum())

    def apply_difference(
        self,
        scales: Tensor,
        codes: Tensor,
        replica: Tensor,
        blocks: DifferenceBlocks,
        threads: int,
    ) -> None:
        """See :meth:`Kernels.apply_difference`."""
        replica.add_(reference.decode_difference(scales, codes, replica.numel(), blocks))

    def matmul(
        self, a: Tensor, b: Tensor, out: Tensor, sums: Sums, key: Tensor | None, threads: int
    ) -> None:
        """See :meth:`Backend.matmul`."""
        out.copy_(reference.matmul(a, b, sums, key))


@cache
def available_backends() -> list[str]:
    """Names of the backends that run here, fastest first; ``"reference"`` is always there."""
    return [*native.levels(), "reference"]


@cache
def _backend(name: str) -> Backend:
    return Reference() if name == "reference" else native.Native(name)


def select(name: str | None = None) -> Backend:
    """Make a backend the one in use on the CPU, and return it.

    Args:
        name: one of :func:`available_backends`; ``None`` for the fastest. ``"reference"``, given
            by name, is then in use on every device.

    Raises:
        ValueError: the name is not available here.
    """
    global _current, _everywhere
    names = available_backends()
    if name is not None and name not in names:
        raise ValueError(
            f"kernels {name!r} are not available here; available: {', '.join(names)} "
            f"(environment variable {VARIABLE}, or unset it for the fastest)"
        )
    if name is None and names == ["reference"]:
        warnings.warn(native.MISSING, stacklevel=2)
    _current, _everywhere = _backend(name or names[0]), name == "reference"
    return _current


_everywhere = False  # whether the one in use is to be used on every device
_current: Backend = select(os.environ.get(VARIABLE) or None)


def current() -> Backend:
    """The backend in use."""
    return _current


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on a device.

    Where there are none but the reference, a warning says so once, and how to get others.
    """
    if device.type == "cpu" or _everywhere:
        return _current
    return _for_type(device.type)


@cache
def _for_type(kind: str) -> Kernels:
    if kind != "cuda":
        warnings.warn(WITHOUT_KERNELS.format(device=kind), stacklevel=3)
        return Reference()
    try:
        module = importlib.import_module("narrowgauge.kernels.triton")
    except ImportError as error:
        warnings.warn(WITHOUT_TRITON.format(error=error), stacklevel=3)
        return Reference()
    kernels: Kernels = module.Triton()
    return kernels


def backend() -> str:
    """Name of the backend in use on the CPU.

    ``"x86-64-v4"``, ``"x86-64-v3"``, ``"x86-64"``, ``"generic"`` (other processors), or
    ``"reference"`` (no native library).
    """
    return _current.name
