"""The native library, by ctypes: which levels of it this machine can run, and how it is called.

ctypes rather than a compiled Python module, so that one build serves every Python and every torch.
ctypes releases the GIL during each call.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch  # before the library, which then shares torch's OpenMP threads
from torch import Tensor

from narrowgauge.formats import BlockFormat, format_of, table_of
from narrowgauge.kernels.grid import ROUNDINGS, DifferenceBlocks, Grid, Sums
from narrowgauge.scaling import ALL_ZERO, LARGEST_EXPONENT, NON_FINITE, SMALLEST_EXPONENT

MISSING = (
    "narrowgauge was installed without its native kernels, so the slow reference kernels in plain "
    "torch are in use. To get the fast ones, install it again where a C++17 compiler is found, in "
    "its source folder: pip install --force-reinstall --no-deps --no-cache-dir ."
)
_INTERFACE = 4
_INFINITY_BITS = 0x7F800000
_Number = ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_float
_LEVELS = {"x86-64-v4": 4, "x86-64-v3": 3, "x86-64": 1, "generic": 0}  # fastest first


def _fields(kind: type[_Number], *names: str) -> list[tuple[str, type[_Number]]]:
    return [(name, kind) for name in names]


class _Grid(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int32, "mantissa_bits", "min_exponent", "bits", "flags"),
        *_fields(ctypes.c_uint32, "largest", "largest_code", "overflow_code", "infinite_code"),
        *_fields(ctypes.c_uint32, "infinity_code", "nan_code"),
        *_fields(ctypes.c_float, "largest_value", "overflow_value", "infinite_value"),
        ("table", ctypes.c_void_p),
    )


class _Limits(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_uint32, "fraction"),
        *_fields(ctypes.c_int32, "exponent", "inclusive", "lowest", "highest"),
    )


class _Blocks(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int32, "size", "scaled", "top_exponent"),
        *_fields(ctypes.c_uint32, "limit"),
        *_fields(ctypes.c_float, "half_step"),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "rows", "depth", "columns")),
        *((name, ctypes.c_int64 * 3) for name in ("a_strides", "b_strides")),
        ("chunk", ctypes.c_int64),
        *_fields(ctypes.c_int32, "compensated", "rounding"),
        ("key", ctypes.c_uint64),
    )


_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_GRID, _INT, _KEY, _FLOAT = ctypes.POINTER(_Grid), ctypes.c_int, ctypes.c_uint64, ctypes.c_float
_ROUND = [_POINTER, _POINTER, _COUNT, _GRID, _INT, _KEY, _INT]
_ENCODE = [_POINTER, _POINTER, _COUNT, _GRID, _INT, _KEY, _POINTER, _COUNT, _INT]
_BLOCKS = ctypes.POINTER(_Blocks)
_SUM = [_POINTER, _INT, _POINTER, _POINTER, _COUNT, _GRID]
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "interface": (_INT, []),
    "level": (_INT, []),
    "round_float": (None, _ROUND),
    "round_double": (None, _ROUND),
    "encode_float": (_INT, _ENCODE),
    "encode_double": (_INT, _ENCODE),
    "encode_fitting": (
        ctypes.c_uint32,
        [
            *(_POINTER, _POINTER, _COUNT, _GRID),
            *(ctypes.POINTER(_Limits), ctypes.POINTER(ctypes.c_int32)),
        ],
    ),
    "decode": (
        None,
        [_POINTER, _POINTER, _COUNT, _GRID, _POINTER, _COUNT, _FLOAT, _INT],
    ),
    "reduce": (None, [*_SUM, _FLOAT, _INT]),
    "reduce_encode": (_INT, [*_SUM, _FLOAT, _FLOAT, _INT]),
    "largest_magnitudes": (None, [_POINTER, _POINTER, _COUNT, _COUNT, _INT]),
    "encode_difference": (
        _COUNT,
        [*[_POINTER] * 4, _COUNT, _GRID, _BLOCKS, _FLOAT, _INT],
    ),
    "apply_difference": (None, [*[_POINTER] * 3, _COUNT, _GRID, _BLOCKS, _INT]),
    "matmul": (
        None,
        [ctypes.POINTER(_Product), _GRID, _GRID, _POINTER, _POINTER, _POINTER, _INT],
    ),
}


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"libnarrowgauge-{name}.so")


@cache
def _load(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_path(name)))
        for function, (result, arguments) in _FUNCTIONS.items():
            each = library[f"narrowgauge_{function}"]
            each.restype, each.argtypes = result, arguments
            setattr(library, function, each)
    except (OSError, AttributeError):  # not built, built without a library it needs, or outdated
        return None
    return library if library.interface() == _INTERFACE else None


def levels() -> list[str]:
    """Names of the builds that are installed and that this processor runs, fastest first."""
    # The lowest build runs everywhere, and tells what else would.
    lowest = _load("x86-64") or _load("generic")
    if lowest is None:
        return []
    highest = lowest.level()
    return [name for name, level in _LEVELS.items() if level <= highest and _load(name)]


@cache
def _described(grid: Grid) -> tuple[_Grid, Tensor | None]:
    """The grid as the library wants it, and the table that its pointer keeps alive."""
    format = format_of(grid.name)
    assert not isinstance(format, BlockFormat)
    flags = (
        grid.subnormals
        | grid.signed << 1
        | grid.negative_zero << 2
        | grid.integer << 3
        | grid.has_nan << 4
    )
    simple = grid.integer or (grid.subnormals and grid.signed and grid.min_exponent >= -126)
    table = None if simple or grid.bits > 16 else table_of(format)
    described = _Grid(
        grid.mantissa_bits,
        grid.min_exponent,
        grid.bits,
        flags,
        grid.largest,
        grid.largest_code,
        grid.code_for(grid.overflow),
        grid.code_for(grid.infinite),
        grid.infinity_code if grid.infinity_code else 2**32 - 1,
        grid.nan_code,
        grid.largest_value,
        grid.value_for(grid.overflow),
        grid.value_for(grid.infinite),
        None if table is None else table.data_ptr(),
    )
    return described, table


@cache
def _limits(grid: Grid) -> _Limits:
    format = format_of(grid.name)
    assert not isinstance(format, BlockFormat)
    midpoint, inclusive = format.overflow_threshold
    threshold, exponent = math.frexp(midpoint)
    (bits,) = struct.unpack("I", struct.pack("f", threshold))
    return _Limits(bits & 0x7FFFFF, exponent, inclusive, SMALLEST_EXPONENT, LARGEST_EXPONENT)


@cache
def _blocks(blocks: DifferenceBlocks) -> _Blocks:
    return _Blocks(blocks.size, blocks.scaled, blocks.top_exponent, blocks.limit, blocks.half_step)


def _word(key: Tensor | None) -> int:
    return 0 if key is None else int(key.item()) & (2**64 - 1)


class Native:
    """One build of the library as a backend: see :class:`narrowgauge.kernels.backends.Backend`."""

    def __init__(self, name: str) -> None:
        library = _load(name)
        if library is None:
            raise ValueError(f"the native kernels {name!r} are not installed")
        self.name = name
        self._library = library

    def quantize(
        self, x: Tensor, out: Tensor, grid: Grid, rounding: str, key: Tensor | None, threads: int
    ) -> None:
        """Round float32 or float64 ``x`` into ``out`` of the same dtype (may be ``x``)."""
        library = self._library
        function = library.round_float if x.dtype == torch.float32 else library.round_double
        mode = ROUNDINGS.index(rounding)
        described, _ = _described(grid)
        function(x.data_ptr(), out.data_ptr(), x.numel(), described, mode, _word(key), threads)

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
        """Packed codes of ``x * scales`` into ``out``; whether NaN met a format without it."""
        library = self._library
        function = library.encode_float if x.dtype == torch.float32 else library.encode_double
        spoilt = function(
            x.data_ptr(),
            out.data_ptr(),
            x.numel(),
            _described(grid)[0],
            ROUNDINGS.index(rounding),
            _word(key),
            None if scales is None else scales.data_ptr(),
            block_size,
            threads,
        )
        return bool(spoilt)

    def encode_fitting(self, x: Tensor, out: Tensor, grid: Grid) -> int:
        """Codes of float32 ``x`` times the power of two that fits its largest; its exponent."""
        exponent = ctypes.c_int32()
        largest: int = self._library.encode_fitting(
            x.data_ptr(),
            out.data_ptr(),
            x.numel(),
            _described(grid)[0],
            _limits(grid),
            exponent,
        )
        if largest >= _INFINITY_BITS:
            return NON_FINITE
        return exponent.value if largest else ALL_ZERO

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
        """``float32(value * scales) * factor`` into ``out``."""
        self._library.decode(
            codes.data_ptr(),
            out.data_ptr(),
            out.numel(),
            _described(grid)[0],
            None if scales is None else scales.data_ptr(),
            block_size,
            factor,
            threads,
        )

    def reduce(
        self,
        codes: list[Tensor],
        out: Tensor,
        grid: Grid,
        scales: list[float],
        factor: float,
        threads: int,
    ) -> None:
        """Sum of the senders' scaled values in order, times ``factor``, into ``out``."""
        self._library.reduce(
            *self._senders(codes, scales),
            out.data_ptr(),
            out.numel(),
            _described(grid)[0],
            factor,
            threads,
        )

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
        """Codes of that sum times ``scale_out`` into ``out``; as :meth:`encode`."""
        spoilt = self._library.reduce_encode(
            *self._senders(codes, scales),
            out.data_ptr(),
            numel,
            _described(grid)[0],
            scale_out,
            factor,
            threads,
        )
        return bool(spoilt)

    def largest_magnitudes(self, x: Tensor, out: Tensor, block_size: int, threads: int) -> None:
        """Bits of the largest |x| per block (0: one block) into ``out``."""
        self._library.largest_magnitudes(
            x.data_ptr(), out.data_ptr(), x.numel(), block_size, threads
        )

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
        """Codes of ``master - replica`` in blocks; the number of blocks that escape."""
        escaped: int = self._library.encode_difference(
            master.data_ptr(),
            None if replica is None else replica.data_ptr(),
            scales.data_ptr(),
            codes.data_ptr(),
            master.numel(),
            _described(blocks.grid)[0],
            _blocks(blocks),
            tolerance,
            threads,
        )
        return escaped

    def apply_difference(
        self,
        scales: Tensor,
        codes: Tensor,
        replica: Tensor,
        blocks: DifferenceBlocks,
        threads: int,
    ) -> None:
        """Add the coded difference to ``replica``, but for blocks that escaped."""
        self._library.apply_difference(
            scales.data_ptr(),
            codes.data_ptr(),
            replica.data_ptr(),
            replica.numel(),
            _described(blocks.grid)[0],
            _blocks(blocks),
            threads,
        )

    def matmul(
        self, a: Tensor, b: Tensor, out: Tensor, sums: Sums, key: Tensor | None, threads: int
    ) -> None:
        """Batched ``a @ b`` into contiguous ``out``; the operands may have any strides."""
        batch, rows, depth = a.shape
        product = _Product(
            batch,
            rows,
            depth,
            b.shape[2],
            a.stride(),
            b.stride(),
            max(1, min(sums.chunk, depth)),
            sums.compensated,
            ROUNDINGS.index(sums.rounding),
            _word(key),
        )
        self._library.matmul(
            product,
            None if sums.multiply is None else _described(sums.multiply)[0],
            _described(sums.accumulate)[0],
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            threads,
        )

    @staticmethod
    def _senders(codes: list[Tensor], scales: list[float]) -> tuple[object, int, object]:
        count = len(codes)
        pointers = (ctypes.c_void_p * count)(*(each.data_ptr() for each in codes))
        return pointers, count, (ctypes.c_float * count)(*scales)
