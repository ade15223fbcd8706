"""Whether differences in a narrow format arrive sooner than masters in float32, on this link."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch

from narrowgauge.collectives.link import Link
from narrowgauge.collectives.transport import Transport
from narrowgauge.kernels.differences import apply_difference, difference_sizes, encode_difference
from narrowgauge.kernels.grid import DifferenceBlocks
from narrowgauge.parameters.space import Space

_TRIED = 1 << 18
_REPEATS = 9


def coding_seconds(transport: Transport, blocks: DifferenceBlocks) -> tuple[float, float]:
    """Seconds per number to encode and to decode, of the slowest rank, while all ranks do so."""
    master = torch.linspace(-1, 1, _TRIED, dtype=torch.float32, device="cpu")
    replica = master * 1.001
    message = torch.zeros(sum(difference_sizes(_TRIED, blocks)), dtype=torch.uint8, device="cpu")
    seconds = torch.empty(2, _REPEATS, dtype=torch.float64, device="cpu")
    transport.barrier()
    for turn in range(_REPEATS):
        begin = time.perf_counter()
        encode_difference(master, replica, blocks, message)
        between = time.perf_counter()
        apply_difference(message, blocks, replica)
        seconds[:, turn] = torch.tensor(
            [between - begin, time.perf_counter() - between], dtype=torch.float64
        )
    slowest = seconds.median(1).values
    transport.all_reduce_max_float64(slowest)
    encode, decode = (slowest / _TRIED).tolist()
    return encode, decode


def exchange_seconds(
    link: Link, numel: int, bits: float, world_size: int, encode: float, decode: float
) -> float:
    """Seconds of an all-gather of ``numel`` numbers that are coded and decoded.

    Each rank encodes and sends its part to all, and decodes all parts. Messages pass the wire and
    the codec one behind the other: the shorter hides behind the longer, as far as the link lets it.

    Args:
        link: what messages cost.
        numel: numbers of all ranks together.
        bits: of each on the wire.
        world_size: ranks.
        encode: seconds per number.
        decode: seconds per number.
    """
    wire = (world_size - 1) / world_size * numel * bits / 8 / link.bytes_per_second
    codec = numel / world_size * encode + numel * decode
    return link.latency + wire + codec - link.wire_overlap * min(wire, codec)


def narrow_pays(
    link: Link, transport: Transport, spaces: Sequence[Space], blocks: DifferenceBlocks
) -> bool:
    """Whether they arrive sooner in the format; a warning of rank 0 if not. Equal on all ranks."""
    numel, ranks = sum(space.numel for space in spaces), transport.world_size
    encode, decode = coding_seconds(transport, blocks)
    bits = blocks.grid.bits + 8 / blocks.size
    narrow = exchange_seconds(link, numel, bits, ranks, encode, decode)
    wide = exchange_seconds(link, numel, 32, ranks, 0.0, 0.0)
    if narrow <= wide:
        return True
    if transport.rank == 0:
        codec = numel / ranks * encode + numel * decode
        warnings.warn(
            f"{numel:,} parameters are sent in float32: on this link, of "
            f"{link.bytes_per_second / 1e6:,.0f} MB/s, they take {wide * 1e3:.3g} ms, and "
            f"{narrow * 1e3:.3g} ms as differences in {blocks.grid.name}, {codec * 1e3:.3g} ms of "
            "which is coding; adapt=False sends these",
            stacklevel=3,
        )
    return False
