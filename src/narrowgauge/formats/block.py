"""Numbers in blocks that share a scale.

Narrow elements reach far only together: each block slides its few numbers to where its own values
lie. The trade-off is the size of a block: small ones follow the values closely, large ones spend
fewer bits on scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.formats.scalar import FloatFormat, IntFormat, check_fields

_E8M0 = FloatFormat(8, 0, None, "fn", False, False)  # the scale of OCP MX


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks that share one power-of-two scale (OCP Microscaling, and wire formats).

    A number is ``element * scale``. Blocks are cut from the flattened tensor; the last one may be
    shorter. A block's scale is the smallest power of two under which its largest magnitude still
    rounds to a finite element, so no element ever overflows.

    Args:
        element: format of the elements, 1 to 16 bits each.
        block_size: elements per block, at least 1.
        scale: unsigned format of the scale; ``e8m0`` as in OCP MX.

    Raises:
        ValueError: an element of more than 16 bits, an empty block, or a scale with a sign.
    """

    element: FloatFormat | IntFormat
    block_size: int = 32
    scale: FloatFormat = _E8M0

    def __post_init__(self) -> None:
        check_fields(self, "block_size", element=(FloatFormat, IntFormat), scale=(FloatFormat,))
        if self.element.bits > 16 or not self.element.signed:
            raise ValueError(
                f"{self.element.name} cannot be a block's element; allowed: signed formats of at "
                "most 16 bits"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if self.scale.signed:
            raise ValueError(
                f"scale is {self.scale.name}; allowed: an unsigned power-of-two format such as e8m0"
            )

    @property
    def bits(self) -> float:
        """Bits per element, the scale's share included."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def name(self) -> str:
        """The name that :func:`format_of` turns back into this format."""
        from narrowgauge.formats.names import name_of  # made of these classes itself

        return name_of(self)

    def __str__(self) -> str:
        return self.name
