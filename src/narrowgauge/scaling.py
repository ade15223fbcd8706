"""Power-of-two scales: the largest one under which a tensor's largest magnitude stays finite.

A power of two changes only the exponent, so scaling itself never rounds. All exponents come from
the *bits* of the largest magnitude: a logarithm of a float misrounds near powers of two, and zero
has none. The trade-off is which magnitude counts: one rank's own (``scale_exponent``: one bit more
precise, travels in the message header) or the largest of all ranks with room for their sum
(``shared_exponents``: APS as published, costs one small all-reduce).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.formats import FloatFormat, IntFormat

NON_FINITE = 127
"""Stands in for the exponent of a tensor that holds a NaN or an infinity."""

ALL_ZERO = -128
"""Stands in for the exponent of a tensor without a nonzero element, where a message carries it."""

SMALLEST_EXPONENT, LARGEST_EXPONENT = -126, 112
"""Range of scale exponents: 2**exponent, its inverse, and the inverse divided by up to 4096 ranks
are normal float32 numbers. Tensors whose largest magnitude is below 2**-112 lose precision."""

_INFINITY_BITS = 0x7F800000
_NO_EXPONENT = -(2**20)  # of zero, in the agreement: below every exponent


def needs_scale(format: FloatFormat | IntFormat) -> bool:
    """Whether a scale helps: formats with float32's own exponents (bf16, tf32, fp32) need none."""
    return not (
        isinstance(format, FloatFormat) and format.exponent_bits == 8 and format.bias == 127
    )


def scale_exponent(magnitude: float, format: FloatFormat | IntFormat) -> int:
    """Exponent of the largest power of two that keeps ``magnitude`` finite in ``format``.

    Of a number rather than of a tensor of one, whose operators would take longer than encoding a
    small gradient.

    Args:
        magnitude: the largest of the numbers to be scaled.
        format: the format the scaled numbers are rounded to.

    Returns:
        ``k`` such that ``magnitude * 2**k`` rounds (to nearest, ties to even) to a finite number
        and ``magnitude * 2**(k+1)`` does not, within ``SMALLEST_EXPONENT`` and
        ``LARGEST_EXPONENT``; 0 for a magnitude of zero; ``NON_FINITE`` for NaN and infinity.
    """
    if not math.isfinite(magnitude):
        return NON_FINITE
    if magnitude == 0:
        return 0
    midpoint, inclusive = format.overflow_threshold
    threshold, exponent_at_threshold = math.frexp(midpoint)
    fraction, exponent = math.frexp(magnitude)
    overflows = fraction >= threshold if inclusive else fraction > threshold
    return max(
        SMALLEST_EXPONENT, min(exponent_at_threshold - exponent - overflows, LARGEST_EXPONENT)
    )


def fitting_exponents(
    largest: torch.Tensor, format: FloatFormat | IntFormat, lowest: int, highest: int
) -> torch.Tensor:
    """:func:`scale_exponent` of many largest magnitudes, float64, within other limits.

    Returns:
        int32, of the shape of ``largest``.
    """
    midpoint, inclusive = format.overflow_threshold
    threshold, exponent_at_threshold = math.frexp(midpoint)
    fraction, exponent = torch.frexp(largest)
    overflows = fraction >= threshold if inclusive else fraction > threshold
    result = (exponent_at_threshold - exponent - overflows.int()).clamp_(lowest, highest)
    result.masked_fill_(largest == 0, 0)
    return result.masked_fill_(~largest.isfinite(), NON_FINITE)


def largest_exponents(magnitudes: torch.Tensor, world_size: int) -> torch.Tensor:
    """What each rank contributes to APS's agreement: ``ceil(log2(magnitude * world_size))``.

    Source: APS (arXiv 1911.08907), section 3, step 1. To be all-reduced with MAX.

    Args:
        magnitudes: largest magnitudes as float32 bits, int32, one per tensor.
        world_size: number of ranks whose gradients are summed.

    Returns:
        int32, same shape; ``_NO_EXPONENT`` for zero (the paper's −∞) and its negative for NaN and
        infinity, which win every maximum.
    """
    # Exact in float64: 24 bits of the magnitude times a world size of far fewer than 29 bits.
    fraction, exponent = torch.frexp(magnitudes.view(torch.float32).double() * world_size)
    result = exponent - (fraction == 0.5).int()
    result.masked_fill_(magnitudes == 0, _NO_EXPONENT)
    return result.masked_fill_(magnitudes >= _INFINITY_BITS, -_NO_EXPONENT)


def shared_exponents(
    agreed: torch.Tensor, format: FloatFormat | IntFormat, lowest: int = SMALLEST_EXPONENT
) -> torch.Tensor:
    """Scale exponents from the agreed largest exponents: ``ub - max_exp`` of APS, steps 2 and 3.

    Args:
        agreed: int32, the maximum over ranks of :func:`largest_exponents`.
        format: the format on the wire; ``ub`` is the exponent of its largest finite number.
        lowest: exponent; the default is what a message carries.

    Returns:
        int32, same shape; 0 where every rank was all zero, ``NON_FINITE`` where one was not finite.
    """
    result = (format.max_exponent - agreed).clamp_(lowest, LARGEST_EXPONENT)
    result.masked_fill_(agreed == _NO_EXPONENT, 0)
    return result.masked_fill_(agreed == -_NO_EXPONENT, NON_FINITE)
