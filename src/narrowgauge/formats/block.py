"""Numbers in blocks that share a scale.

Narrow elements reach far only together: each block slides its few numbers to where its own values
lie. The trade-off is the size of a block: small ones follow the values closely, large ones spend
fewer bits on scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from narrowgauge.formats.scalar import FloatFormat, IntFormat, check_fields

ScaleRule = Literal["fit", "floor", "amax", "two-level"]
_E8M0 = FloatFormat(8, 0, None, "fn", False, False)  # the scale of OCP MX


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks that share one scale: OCP Microscaling, NVFP4, and wire formats.

    A number is ``element * scale``. Blocks are consecutive elements of the flattened tensor, or of
    its rows along a dimension; the last one may be shorter.

    Args:
        element: format of the elements, signed, at most 16 bits each.
        block_size: elements per block, at least 1.
        scale: format of the scale, at most 16 bits. ``e8m0`` as in OCP MX, or any other unsigned
            one, is a power of two; a signed one such as ``e4m3fn`` is not, and needs a NaN and at
            most 10 mantissa bits.
        scale_rule: how a scale follows from ``amax``, the largest magnitude in its block.

            - ``"fit"``: the smallest power of two under which ``amax`` still rounds to a finite
              element, so that nothing saturates (our own, for numbers on the wire).
            - ``"floor"``: ``2**(floor(log2(amax)) - element.max_exponent)``. What then lies beyond
              the largest element saturates (OCP Microscaling Formats v1.0, section 6.3).
            - ``"amax"``: ``amax / element.largest``, rounded to nearest-even in a signed ``scale``.
              It may round to 0, and so do the elements then.
            - ``"two-level"``: as ``"amax"``, after division by a float32 for the whole tensor,
              ``amax of the tensor / (element.largest * scale.largest)``, which makes the scales use
              the range that they have (NVFP4, as in arXiv 2509.25149). The product in that divisor
              counts as 2**32 if it is larger, or as ``element.largest`` if that is larger still:
              scales with the range of float32 would leave the tensor's own none.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: an element that is unsigned or of more than 16 bits, an empty block, an unknown
            rule, or a scale that does not suit the rule.
    """

    element: FloatFormat | IntFormat
    block_size: int = 32
    scale: FloatFormat = _E8M0
    scale_rule: ScaleRule = "fit"

    def __post_init__(self) -> None:
        check_fields(self, "block_size", element=(FloatFormat, IntFormat), scale=(FloatFormat,))
        if self.element.bits > 16 or not self.element.signed:
            raise ValueError(
                f"{self.element.name} cannot be a block's element; allowed: signed formats of at "
                "most 16 bits"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if self.scale_rule not in get_args(ScaleRule):
            raise ValueError(f"scale_rule is {self.scale_rule!r}; allowed: {get_args(ScaleRule)}")
        if self.scale_rule in ("fit", "floor"):
            if self.scale.signed:
                raise ValueError(
                    f"scale is {self.scale.name}; scale_rule {self.scale_rule!r} needs an unsigned "
                    "power-of-two format such as e8m0; others go with 'amax' or 'two-level'"
                )
            if not self.scale.smallest <= 1 <= self.scale.largest:
                raise ValueError(f"scale is {self.scale.name}, which lacks 1; choose another bias")
        elif not self._divides:
            raise ValueError(
                f"scale is {self.scale.name}; scale_rule {self.scale_rule!r} needs a signed format "
                "with NaN, of at most 16 bits and 10 mantissa bits, such as e4m3fn"
            )

    @property
    def _divides(self) -> bool:
        # Up to 10 mantissa bits float64 tells element and scale apart; see kernels.blocks.
        scale = self.scale
        return scale.signed and scale.has_nan and scale.bits <= 16 and scale.mantissa_bits <= 10

    @property
    def bits(self) -> float:
        """Bits per element, the scale's share included (not the 32 per tensor of two levels)."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def name(self) -> str:
        """The name that :func:`format_of` turns back into this format."""
        from narrowgauge.formats.names import name_of  # made of these classes itself

        return name_of(self)

    def __str__(self) -> str:
        return self.name
