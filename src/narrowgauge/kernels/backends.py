"""Which implementation of the CPU kernels runs: the native library, at some level, or reference."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from narrowgauge.kernels import native, reference
from narrowgauge.kernels.grid import Grid, Sums

VARIABLE = "NARROWGAUGE_KERNELS"


class Backend(Protocol):
    """What an implementation offers, on flat contiguous CPU tensors; results go into ``out``.

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

    def largest_magnitudes(self, x: Tensor, out: Tensor, block_size: int, threads: int) -> None:
        """Bits of the largest |x| per block (0: one block) into ``out`` (int32)."""

    def matmul(
        self, a: Tensor, b: Tensor, out: Tensor, sums: Sums, key: Tensor | None, threads: int
    ) -> None:
        """Batched ``a @ b`` (float32, three dimensions, any strides) into contiguous ``out``."""


class Reference:
    """:mod:`narrowgauge.kernels.reference` as a backend; it ignores ``threads``."""

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
    """Make a backend the one in use, and return it.

    Args:
        name: one of :func:`available_backends`; ``None`` for the fastest.

    Raises:
        ValueError: the name is not available here.
    """
    global _current
    names = available_backends()
    if name is not None and name not in names:
        raise ValueError(
            f"kernels {name!r} are not available here; available: {', '.join(names)} "
            f"(environment variable {VARIABLE}, or unset it for the fastest)"
        )
    if name is None and names == ["reference"]:
        warnings.warn(native.MISSING, stacklevel=2)
    _current = _backend(name or names[0])
    return _current


_current: Backend = select(os.environ.get(VARIABLE) or None)


def current() -> Backend:
    """The backend in use."""
    return _current


def backend() -> str:
    """Name of the backend in use.

    ``"x86-64-v4"``, ``"x86-64-v3"``, ``"x86-64"``, ``"generic"`` (other processors), or
    ``"reference"`` (no native library).
    """
    return _current.name
