"""What a message says: exponents and codes of one piece, written, summed and read.

Pure arithmetic on buffers, without ranks or threads. A message starts with one exponent byte per
segment; two values stand for "all zero" and "not finite", whose codes carry nothing. Block formats
bring their own scales, so their exponent is 0, and what is not finite is marked block by block.
Sums are made in float32, in the order of the senders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from narrowgauge import kernels
from narrowgauge.collectives.layout import Piece, Segment, cut
from narrowgauge.formats import BlockFormat, Format
from narrowgauge.kernels.blocks import decode_blocks_into, encode_blocks_into
from narrowgauge.scaling import (
    ALL_ZERO,
    NON_FINITE,
    largest_exponents,
    needs_scale,
    scale_exponent,
    shared_exponents,
)

Scale: TypeAlias = Literal["local", "shared"] | None
Op: TypeAlias = Literal["mean", "sum"]

_THREADS = 1  # per call: three pipeline stages already run beside the computation


@dataclass(frozen=True)
class Arithmetic:
    """How senders' values become one result: over how many ranks, scaled how, mean or sum."""

    world_size: int
    scale: Scale
    op: Op

    def factors(self, format: Format) -> tuple[int, float, int, float]:
        """Powers and factors around the sum: ``(shift, factor, result_shift, last_factor)``.

        Values are multiplied by ``2**-shift`` before they are summed, so that the sum of huge
        gradients stays finite in float32. The sum is multiplied by ``factor`` before it is encoded,
        with ``result_shift`` more than the exponent of its terms, and by ``last_factor`` once it is
        decoded.

        A mean is encoded as a mean: it is no larger than its largest term, so the terms' exponents
        still fit. With a shared scale, which left room for the sum, the sum itself is encoded.
        """
        size = self.world_size
        mean = self.op == "mean"
        if not isinstance(format, BlockFormat) and not needs_scale(format):
            return 0, (1 / size if mean else 1.0), 0, 1.0
        shift = (size - 1).bit_length()  # a power of two, so nothing rounds
        if self.scale == "shared":
            return shift, 1.0, shift, 2**shift / size if mean else 2.0**shift
        return shift, 2**shift / size, 0, (1.0 if mean else float(size))


def largest_exponents_of(
    flat: torch.Tensor, sizes: tuple[int, ...], world_size: int
) -> torch.Tensor:
    """APS's contribution of this rank: int32, one per tensor of ``sizes`` elements in ``flat``."""
    parts = flat.split(list(sizes))
    return largest_exponents(torch.cat([_magnitude(part) for part in parts]), world_size)


def agreed_exponents(largest: torch.Tensor, formats: tuple[Format, ...]) -> list[int]:
    """APS's scale exponents per tensor from the maximum over ranks of the contributions."""
    by_format: dict[Format, list[int]] = {
        format: shared_exponents(largest, format).tolist()
        for format in set(formats)
        if not isinstance(format, BlockFormat)  # refused by check_scale
    }
    return [by_format[format][number] for number, format in enumerate(formats)]


def pack(
    piece: Piece, flat: torch.Tensor, message: torch.Tensor, scale: Scale, agreed: list[int] | None
) -> None:
    """Write the elements of ``piece`` in ``flat`` to ``message``.

    Args:
        piece: what the message covers.
        flat: float32.
        message: uint8 of ``piece.size`` bytes.
        scale: ``"local"`` or ``None``; with ``"shared"`` the exponents are those ``agreed``.
        agreed: exponent per tensor, ``None`` unless the scale is shared.
    """
    exponents = []
    for segment in piece.segments:
        wanted = None if agreed is None else agreed[segment.tensor]
        codes = message[segment.offset : segment.offset + segment.size]
        exponents.append(
            _encode(flat[segment.begin : segment.end], segment.format, codes, scale, wanted)
        )
    _write_header(message, exponents)


def reduce_into(
    piece: Piece, messages: list[torch.Tensor], flat: torch.Tensor, arithmetic: Arithmetic
) -> None:
    """Reduce the messages of all ranks, in rank order, into ``flat`` (one-shot)."""
    for segment, senders in _segments(piece, messages):
        out = flat[segment.begin : segment.end]
        if isinstance(segment.format, BlockFormat):
            shift, factor, _, last_factor = arithmetic.factors(segment.format)
            _reduce_blocks(segment.format, senders, out, shift, factor * last_factor)
            continue
        special = _special(senders)
        if special is not None:
            out.fill_(math.nan if special == NON_FINITE else 0.0)
            continue
        shift, factor, _, last_factor = arithmetic.factors(segment.format)
        present = [sender for sender in senders if sender[0] != ALL_ZERO]
        kernels.reduce_into(
            [codes for _, codes in present],
            segment.format,
            [exponent + shift for exponent, _ in present],
            out,
            factor=factor * last_factor,
            threads=_THREADS,
        )


def reduce_and_encode(
    piece: Piece, messages: list[torch.Tensor], result: torch.Tensor, arithmetic: Arithmetic
) -> None:
    """Reduce the messages of all ranks, in rank order, into the message ``result`` (two-shot)."""
    exponents = []
    for segment, senders in _segments(piece, messages):
        codes = result[segment.offset : segment.offset + segment.size]
        if isinstance(segment.format, BlockFormat):
            total = torch.empty(segment.end - segment.begin, dtype=torch.float32, device="cpu")
            shift, factor, _, _ = arithmetic.factors(segment.format)
            _reduce_blocks(segment.format, senders, total, shift, factor)
            encode_blocks_into(total, segment.format, codes)
            exponents.append(0)
            continue
        special = _special(senders)
        if special is not None:
            exponents.append(special)
            continue
        shift, factor, result_shift, _ = arithmetic.factors(segment.format)
        present = [sender for sender in senders if sender[0] != ALL_ZERO]
        exponent = min(exponent for exponent, _ in present) + result_shift
        try:
            kernels.reduce_encode_into(
                [codes for _, codes in present],
                segment.format,
                [exponent + shift for exponent, _ in present],
                exponent,
                codes,
                numel=segment.end - segment.begin,
                factor=factor,
                threads=_THREADS,
            )
        except kernels.UnrepresentableNaN:  # unscaled numbers overflowed: inf - inf
            exponent = NON_FINITE
        exponents.append(exponent)
    _write_header(result, exponents)


def unpack(piece: Piece, message: torch.Tensor, flat: torch.Tensor, arithmetic: Arithmetic) -> None:
    """Read the reduced ``message`` into ``flat`` (two-shot)."""
    for segment, senders in _segments(piece, [message]):
        out = flat[segment.begin : segment.end]
        exponent, codes = senders[0]
        if exponent in (ALL_ZERO, NON_FINITE):
            out.fill_(math.nan if exponent == NON_FINITE else 0.0)
            continue
        _, _, _, last_factor = arithmetic.factors(segment.format)
        if isinstance(segment.format, BlockFormat):
            decode_blocks_into(codes, segment.format, out)
            if last_factor != 1:
                out.mul_(last_factor)
            continue
        kernels.decode_into(
            codes, segment.format, exponent, out, factor=last_factor, threads=_THREADS
        )


AS_SENT = Arithmetic(1, "local", "sum")
"""Of a message that is read as it was written: neither summed nor divided."""


def as_sent(values: torch.Tensor, format: Format, scaled: bool) -> torch.Tensor:
    """What others read of ``values`` (float32, flat), sent as one message: encoded and decoded."""
    piece = cut([values.numel()], [format], 2, 2**62).chunks[0][0]
    message = torch.zeros(piece.size, dtype=torch.uint8, device="cpu")
    pack(piece, values, message, "local" if scaled else None, None)
    read = torch.zeros_like(values)
    unpack(piece, message, read, AS_SENT)
    return read


def withhold(
    piece: Piece, message: torch.Tensor, flat: torch.Tensor, residual: torch.Tensor
) -> None:
    """Put what the ``message`` of ``piece`` lacks of the numbers in ``flat`` into ``residual``.

    Numbers that are not finite are sent as such; they leave nothing behind.
    """
    unpack(piece, message, residual, AS_SENT)
    if piece.segments:
        part = slice(piece.segments[0].begin, piece.segments[-1].end)
        torch.sub(flat[part], residual[part], out=residual[part])
        residual[part].nan_to_num_(0.0, 0.0, 0.0)


def withhold_sums(
    piece: Piece,
    messages: list[torch.Tensor],
    result: torch.Tensor,
    flat: torch.Tensor,
    residual: torch.Tensor,
    arithmetic: Arithmetic,
) -> None:
    """Add what the message ``result`` lacks of the reduced ``messages`` to ``residual`` (two-shot).

    The owner of a piece sends its rounding error with its own next numbers, times the ranks over
    which a mean will divide it. ``flat`` gets the reduced numbers of the piece.
    """
    if not piece.segments:
        return
    begin, end = piece.segments[0].begin, piece.segments[-1].end
    reduce_into(piece, messages, flat, arithmetic)
    read = torch.zeros(end - begin, dtype=torch.float32, device="cpu")
    segments = (replace(s, begin=s.begin - begin, end=s.end - begin) for s in piece.segments)
    unpack(Piece(tuple(segments), piece.size), result, read, arithmetic)
    lost = torch.sub(flat[begin:end], read, out=read)
    times = arithmetic.world_size if arithmetic.op == "mean" else 1
    residual[begin:end].add_(lost.nan_to_num_(0.0, 0.0, 0.0), alpha=times)


def _reduce_blocks(
    format: BlockFormat,
    senders: list[tuple[int, torch.Tensor]],
    out: torch.Tensor,
    shift: int,
    factor: float,
) -> None:
    """The sum of the senders' numbers times ``2**-shift``, in rank order, times ``factor``."""
    term = torch.empty_like(out)
    for number, (_, codes) in enumerate(senders):
        target = term if number else out
        # A power of two, by which the sum of huge gradients stays finite.
        decode_blocks_into(codes, format, target, factor=2.0**-shift)
        if number:
            out.add_(term)
    if factor != 1:
        out.mul_(factor)


def _encode(
    values: torch.Tensor, format: Format, codes: torch.Tensor, scale: Scale, agreed: int | None
) -> int:
    """Write the codes of one segment; returns its exponent byte."""
    if isinstance(format, BlockFormat):
        encode_blocks_into(values, format, codes)
        return 0
    if not needs_scale(format):
        kernels.encode_into(values, format, 0, codes, threads=_THREADS)
        return 0
    if scale == "local":
        return kernels.encode_fitting_into(values, format, codes)
    largest = _magnitude(values).view(torch.float32).item()
    exponent = agreed or 0
    if NON_FINITE in (exponent, scale_exponent(largest, format)):
        return NON_FINITE
    if not largest:
        return ALL_ZERO
    kernels.encode_into(values, format, exponent, codes, threads=_THREADS)
    return exponent


def _segments(
    piece: Piece, messages: list[torch.Tensor]
) -> Iterator[tuple[Segment, list[tuple[int, torch.Tensor]]]]:
    """Each segment with the exponent and the codes that every message has for it."""
    count = len(piece.segments)
    headers = [message[:count].view(torch.int8).tolist() for message in messages]
    for number, segment in enumerate(piece.segments):
        end = segment.offset + segment.size
        yield (
            segment,
            [
                (header[number], message[segment.offset : end])
                for header, message in zip(headers, messages, strict=True)
            ],
        )


def _special(senders: list[tuple[int, torch.Tensor]]) -> int | None:
    """``NON_FINITE`` if one sender is not finite, ``ALL_ZERO`` if all are zero, else ``None``."""
    exponents = [exponent for exponent, _ in senders]
    if NON_FINITE in exponents:
        return NON_FINITE
    return ALL_ZERO if all(exponent == ALL_ZERO for exponent in exponents) else None


def _write_header(message: torch.Tensor, exponents: list[int]) -> None:
    if exponents:
        header = bytearray(exponent & 0xFF for exponent in exponents)
        message[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    return kernels.largest_magnitudes(values, threads=_THREADS)
