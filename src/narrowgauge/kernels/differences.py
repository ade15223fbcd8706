"""Differences in blocks: what an owner's numbers are ahead of everybody's copy of them, as codes.

Subtraction, largest magnitude, scale and codes are made in one pass over memory, and so are
decoding and adding. Every block of consecutive numbers has a power of two as its scale, as the
block formats with the rule ``"fit"`` have; formats with float32's own exponents (bf16) need none
and have 2**0. A block that cannot be coded, or not well enough, says so by its scale, and is left
to the caller: it *escapes*. Bytes are those of ``element@block``: scales first, then packed codes.

All tensors are flat, contiguous float32 on one device.
"""

from __future__ import annotations

import math
import struct
from functools import cache

from torch import Tensor

from narrowgauge.formats import BlockFormat, FormatLike, IntFormat, format_of
from narrowgauge.kernels.backends import for_device
from narrowgauge.kernels.grid import DifferenceBlocks, grid_of
from narrowgauge.kernels.raw import packed_bytes
from narrowgauge.kernels.reference import ESCAPED as ESCAPED
from narrowgauge.scaling import needs_scale

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1024


def difference_blocks(format: FormatLike, block_size: int = 256) -> DifferenceBlocks:
    """How differences are coded in a format.

    Args:
        format: signed, at most 16 bits a number; or such a format in blocks with scales ``e8m0`` by
            the rule ``"fit"``, as ``"int8@64"``.
        block_size: numbers per block of a format without blocks; a power of two from 16 to 1024.

    Raises:
        ValueError: any other format or block size.
    """
    parsed = format_of(format)
    size = block_size
    if isinstance(parsed, BlockFormat):
        if parsed.scale_rule != "fit" or parsed.scale.name != "e8m0":
            raise ValueError(
                f"format is {parsed.name}; allowed for differences: blocks with scales e8m0 by the "
                "rule 'fit', such as 'int8@256'"
            )
        size = parsed.block_size
    element = parsed.element if isinstance(parsed, BlockFormat) else parsed
    if element.bits > 16 or not element.signed:
        raise ValueError(
            f"format is {parsed.name}; allowed for differences: signed formats of at most 16 bits, "
            "such as int8, int4, e4m3 or bf16"
        )
    whole = isinstance(size, int) and not isinstance(size, bool)
    if not whole or size.bit_count() != 1 or not SMALLEST_BLOCK <= size <= LARGEST_BLOCK:
        raise ValueError(
            f"a block has {size!r} numbers; allowed: powers of two from {SMALLEST_BLOCK} to "
            f"{LARGEST_BLOCK}"
        )
    return _difference_blocks(element.name, size)


@cache
def blocks_in_one_pass(format: BlockFormat) -> DifferenceBlocks | None:
    """How :func:`encode_difference` codes numbers as the format does; ``None`` if it does not."""
    try:
        blocks = difference_blocks(format)
    except ValueError:
        return None
    return blocks if blocks.scaled else None


@cache
def _difference_blocks(name: str, size: int) -> DifferenceBlocks:
    format = format_of(name)
    assert not isinstance(format, BlockFormat)
    midpoint, inclusive = format.overflow_threshold
    fraction, top_exponent = math.frexp(midpoint)
    bits = struct.unpack("<I", struct.pack("<f", fraction))[0] & 0x7FFFFF
    scaled = needs_scale(format)
    if isinstance(format, IntFormat):
        half_step = 0.5
    else:
        top = format.max_exponent if scaled else 0
        half_step = math.ldexp(0.5, top - format.mantissa_bits)
    return DifferenceBlocks(
        grid_of(name, "saturate"), size, scaled, top_exponent, bits + (not inclusive), half_step
    )


def difference_sizes(numel: int, blocks: DifferenceBlocks) -> tuple[int, int]:
    """Bytes of the scales and of the codes of ``numel`` differences."""
    return -(-numel // blocks.size), packed_bytes(numel, blocks.grid.bits)


def encode_difference(
    master: Tensor,
    replica: Tensor | None,
    blocks: DifferenceBlocks,
    out: Tensor,
    *,
    tolerance: float = math.inf,
    threads: int = 1,
) -> int:
    """Write scales and codes of ``master - replica`` to ``out`` (uint8); count escaped blocks.

    Args:
        master: float32.
        replica: float32, as many; ``None``: zeros, so that ``master`` itself is coded.
        blocks: see :func:`difference_blocks`.
        out: as many bytes as :func:`difference_sizes` says together.
        tolerance: blocks escape in which rounding could change a number by more than this share of
            their largest ``|master|``. Blocks whose difference is not finite always do.
        threads: on the CPU.
    """
    scales, codes = out.split(difference_sizes(master.numel(), blocks))
    kernels = for_device(master.device)
    return kernels.encode_difference(master, replica, scales, codes, blocks, tolerance, threads)


def apply_difference(
    message: Tensor, blocks: DifferenceBlocks, replica: Tensor, *, threads: int = 1
) -> None:
    """Add what :func:`encode_difference` wrote to ``replica``; blocks that escaped get 0 added."""
    scales, codes = message.split(difference_sizes(replica.numel(), blocks))
    for_device(replica.device).apply_difference(scales, codes, replica, blocks, threads)
