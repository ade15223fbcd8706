"""How Triton's kernels are launched: grids, tiles, keys, and what they cannot do."""

from __future__ import annotations

import math
import struct
import warnings
from functools import cache

import torch
from torch import Tensor

from narrowgauge.formats import BlockFormat, format_of, table_of
from narrowgauge.kernels import reference
from narrowgauge.kernels.grid import DifferenceBlocks, Grid, Sums
from narrowgauge.kernels.triton import difference, elementwise
from narrowgauge.kernels.triton.constants import constants, needs_wide
from narrowgauge.kernels.triton.matmul import matmul

SPILT = (
    "the exact sum of a chunk of products did not fit into two float64, so this product was made "
    "again by the slow reference kernels in plain torch. Smaller chunks, or operands and products "
    "in formats with fewer exponents, avoid that"
)
_TILE = 1024  # elements per program
_PIECE = 4096  # elements per program when a tensor is one block
_ROWS, _COLUMNS = 16, 64  # of the tile of a product


class Triton:
    """Kernels on flat contiguous tensors: see :class:`narrowgauge.kernels.backends.Kernels`.

    Nothing waits for the GPU, but for what must be known to raise an error (:meth:`encode` into a
    format without NaN) or to be exact (:meth:`matmul` with chunks of products).
    """

    name = "triton"

    def quantize(
        self, x: Tensor, out: Tensor, grid: Grid, rounding: str, key: Tensor | None, threads: int
    ) -> None:
        """Round float32 or float64 ``x`` into ``out`` of the same dtype (may be ``x``)."""
        if not x.numel():
            return
        to = constants(grid, wide=x.dtype == torch.float64 or needs_wide(grid))
        with torch.cuda.device_of(x):
            elementwise.quantize[(_tiles(x.numel()),)](
                _bits(x), _bits(out), x.numel(), *_halves(key),
                to, rounding, _TILE, enable_fp_fusion=False,
            )  # fmt: skip

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
        if not x.numel():
            return False
        scaled, wide = scales is not None, x.dtype == torch.float64
        to = constants(grid, wide=wide, code=True, scaled=scaled)
        spoilt = out if grid.has_nan else torch.zeros(1, dtype=torch.int32, device=x.device)
        with torch.cuda.device_of(x):
            elementwise.encode[(_tiles(x.numel()),)](
                _bits(x), out, out if scales is None else _bits(scales), spoilt, x.numel(),
                *_halves(key), to, rounding, scaled, block_size if scaled else 0, grid.has_nan,
                _TILE, enable_fp_fusion=False,
            )  # fmt: skip
        return not grid.has_nan and bool(spoilt.item())

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
        if not out.numel():
            return
        table = out if grid.bits == 32 else _table(grid.name, codes.device)
        with torch.cuda.device_of(codes):
            elementwise.decode[(_tiles(out.numel()),)](
                codes, _bits(out), table, out if scales is None else scales, out.numel(),
                struct.unpack("<i", struct.pack("<f", factor))[0], grid.bits,
                scales is not None, 0 if scales is None else block_size, _TILE,
                enable_fp_fusion=False,
            )  # fmt: skip

    def largest_magnitudes(self, x: Tensor, out: Tensor, block_size: int, threads: int) -> None:
        """Bits of the largest |x| per block (0: one block) into ``out``."""
        if not x.numel():
            out.zero_()
            return
        if block_size == 0 and x.numel() > _PIECE:  # magnitudes of magnitudes, bits being ordered
            pieces = torch.empty(-(-x.numel() // _PIECE), dtype=torch.int32, device=x.device)
            self.largest_magnitudes(x, pieces, _PIECE, threads)
            self.largest_magnitudes(pieces.view(torch.float32), out, 0, threads)
            return
        size = block_size or x.numel()
        columns = min(_TILE, 2 ** math.ceil(math.log2(size)))
        rows = _TILE // columns
        with torch.cuda.device_of(x):
            elementwise.largest_magnitudes[(-(-out.numel() // rows),)](
                _bits(x), out, x.numel(), size, out.numel(), rows, columns
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
        """Scales and codes of ``master - replica``; the number of blocks that escape."""
        if not master.numel():
            return 0
        replica = torch.zeros_like(master) if replica is None else replica
        limits = torch.tensor([blocks.half_step, tolerance], device=master.device)
        with torch.cuda.device_of(master):
            difference.encode_difference[(_tiles(master.numel()),)](
                master, replica, scales, codes, master.numel(), limits,
                constants(blocks.grid, wide=False, code=True, scaled=True),
                blocks.size, blocks.scaled, blocks.top_exponent, blocks.limit, _TILE,
                enable_fp_fusion=False,
            )  # fmt: skip
        return int((scales == reference.ESCAPED).sum())

    def apply_difference(
        self,
        scales: Tensor,
        codes: Tensor,
        replica: Tensor,
        blocks: DifferenceBlocks,
        threads: int,
    ) -> None:
        """Add the coded difference to ``replica``, but for blocks that escaped."""
        if not replica.numel():
            return
        table = _table(blocks.grid.name, codes.device)
        with torch.cuda.device_of(replica):
            difference.apply_difference[(_tiles(replica.numel()),)](
                scales, codes, replica, table, replica.numel(), blocks.grid.bits, blocks.size,
                _TILE, enable_fp_fusion=False,
            )  # fmt: skip

    def matmul(
        self, a: Tensor, b: Tensor, out: Tensor, sums: Sums, key: Tensor | None, threads: int
    ) -> None:
        """Batched ``a @ b`` into contiguous ``out``; the operands may have any strides."""
        if not out.numel():
            return
        batch, rows, depth = a.shape
        columns = b.shape[2]
        chunk = max(1, min(sums.chunk, depth))
        chunks = -(-depth // chunk)
        roundings = depth * (sums.multiply is not None) + chunks * (4 if sums.compensated else 1)
        product = None if sums.multiply is None else constants(sums.multiply, wide=True)
        certain = chunk == 1 or _fits_two_doubles(sums, chunk)
        spilt = out if certain else torch.zeros(1, dtype=torch.int32, device=a.device)
        tiles = batch * -(-rows // _ROWS) * -(-columns // _COLUMNS)
        with torch.cuda.device_of(a):
            matmul[(tiles,)](
                a, b, _bits(out), _bits(spilt), rows, depth, columns, *a.stride(), *b.stride(),
                chunk, roundings, *_halves(key), product, constants(sums.accumulate, wide=True),
                sums.rounding, sums.compensated, chunk == 1, not certain, _ROWS, _COLUMNS,
                enable_fp_fusion=False,
            )  # fmt: skip
        if not certain and spilt.item():
            warnings.warn(SPILT, stacklevel=2)
            out.copy_(reference.matmul(a, b, sums, key))


def _tiles(numel: int) -> int:
    return -(-numel // _TILE)


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _halves(key: Tensor | None) -> tuple[int, int]:
    """Low and high half of a key as signed 32-bit integers, which Triton passes as such.

    A key lies on the CPU, so that reading it waits for nothing.
    """
    word = 0 if key is None else int(key.item()) & (2**64 - 1)
    low, high = struct.unpack("<2i", struct.pack("<Q", word))
    return low, high


@cache
def _table(name: str, device: torch.device) -> Tensor:
    format = format_of(name)
    assert not isinstance(format, BlockFormat)
    return table_of(format).to(device)


def _fits_two_doubles(sums: Sums, chunk: int) -> bool:
    """Whether the formats alone say that two float64 hold every sum of a chunk.

    Every term is a multiple of 2**low below 2**high. The upper float64 holds a sum's first 53 bits,
    and the lower one adds up what falls off, up to once a term, which must fit into its 53.
    """
    if sums.multiply is None:
        return False
    grids = (sums.multiply, sums.accumulate)
    low = min(grid.min_exponent - grid.mantissa_bits * grid.subnormals for grid in grids)
    high = max(math.frexp(grid.largest_value)[1] for grid in grids)
    return high - low + 2 * (chunk + 1).bit_length() <= 106
