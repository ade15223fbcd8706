"""Which number formats a layer computes in: plain, immutable data, checked when it is made.

The formats of what is *stored* (weights, activations, gradients) and the arithmetic of *sums* are
given together, since hardware offers them together. The trade-off: one description serves all
products of a layer; layers that need two are two layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from narrowgauge.formats import BlockFormat, FormatLike, format_of
from narrowgauge.matmul import MatmulBackward, matmul

_STORED = ("weights", "activations", "gradients")
_SUMS = ("multiply", "accumulate", "fused", "compensated", "chunk", "rounding")


@dataclass(frozen=True)
class LayerFormats:
    """Number formats of a layer; by default nothing is rounded.

    Formats are names, objects or dtypes, as everywhere.

    Args:
        weights: what weights are rounded to when they are used; ``None``: nothing. The parameters
            themselves stay as they are.
        activations: the same for the layer's input, and in attention for all operands that are not
            weights.
        gradients: the same for the gradient that arrives at a product, before the backward
            products use it.
        multiply: format of each product, as in :func:`narrowgauge.matmul`.
        accumulate: format of each sum. ``None``, if all that follows is left as it is too, means
            torch's own products of the rounded operands, and so does ``"fp32"`` with rounding to
            nearest-even.
        fused: as in :func:`narrowgauge.matmul`.
        compensated: as there.
        chunk: as there.
        rounding: as there; of operands too.
        backward: multiply, accumulate, fused, compensated, chunk and rounding of the backward
            products, its rounding being that of gradients too. ``None``: as forward.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an unknown format or rounding; a format without a sign; a combination that
            :func:`narrowgauge.matmul` refuses; a ``backward`` with a ``gradient`` of its own.
    """

    weights: FormatLike | None = None
    activations: FormatLike | None = None
    gradients: FormatLike | None = None
    multiply: FormatLike | None = None
    accumulate: FormatLike | None = None
    fused: bool = False
    compensated: bool = False
    chunk: int = 1
    rounding: str = "nearest-even"
    backward: MatmulBackward | None = None

    # Worked out once, so that a layer's forward, and a compiler tracing it, only read them.
    native: bool = field(init=False, repr=False, compare=False)
    """Whether torch's own products of rounded operands are what is asked for."""
    rounds: bool = field(init=False, repr=False, compare=False)
    """Whether anything at all differs from torch's own layer in float32."""
    rounds_float64: bool = field(init=False, repr=False, compare=False)
    """The same in float64, which fp32 rounds too."""
    forward_sums: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Keywords of ``matmul`` for forward products."""
    backward_sums: dict[str, Any] = field(init=False, repr=False, compare=False)
    """The same for backward products."""
    matmul_backward: MatmulBackward = field(init=False, repr=False, compare=False)
    """What ``matmul`` does backward; of gradients it rounds only blocks, scalars come rounded."""
    blocks: frozenset[str] = field(init=False, repr=False, compare=False)
    """Which of weights, activations and gradients have block formats."""

    def __post_init__(self) -> None:
        for name in _STORED:
            value = getattr(self, name)
            self._set(name, None if value is None else _stored(name, value))
        forward = {name: getattr(self, name) for name in _SUMS}
        backward = forward
        if isinstance(self.backward, MatmulBackward):
            if self.backward.gradient is not None:
                raise ValueError(
                    f"backward.gradient is {self.backward.gradient!r}; the format of a layer's "
                    "gradients is gradients=, so leave it away"
                )
            backward = {name: getattr(self.backward, name) for name in _SUMS}
        elif self.backward is not None:
            raise TypeError(
                f"backward is {type(self.backward).__name__}; it must be a MatmulBackward, or None "
                "for the arithmetic of the forward pass"
            )
        stored = {name: getattr(self, name) for name in _STORED}
        blocks = {n for n, x in stored.items() if x and isinstance(format_of(x), BlockFormat)}
        self._set("blocks", frozenset(blocks))
        self._set("forward_sums", forward)
        self._set("backward_sums", backward)
        gradient = self.gradients if "gradients" in blocks else None
        self._set("matmul_backward", MatmulBackward(gradient, **backward))
        self._try()
        for sums in (forward, backward):
            for name in ("multiply", "accumulate"):
                sums[name] = None if sums[name] is None else format_of(sums[name]).name
        self._set("native", not blocks and _native(forward) and _native(backward))
        self._set("rounds", not self.native or not set(stored.values()) <= {None, "fp32"})
        named = {*stored.values(), forward["accumulate"], backward["accumulate"]}
        self._set("rounds_float64", self.rounds or named != {None})

    def rounds_in(self, dtype: torch.dtype) -> bool:
        """Whether anything differs from torch's own layer with parameters of this dtype."""
        return self.rounds_float64 if dtype == torch.float64 else self.rounds

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _try(self) -> None:
        """Let ``matmul`` say what it thinks of these arguments, now rather than in training."""
        one = torch.zeros(1, 1, device="cpu")
        matmul(
            one,
            one,
            operands=self.operands("weights", "activations"),
            **self.forward_sums,
            backward=MatmulBackward(**self.backward_sums),
            generator=torch.Generator(),  # its own: torch's must not move on
        )

    def operands(self, first: str, second: str) -> tuple[str | None, str | None] | None:
        """What ``matmul`` is to round itself: blocks, which depend on the direction of sums.

        Scalar formats are rounded before, once, wherever a number is used several times.
        """
        if not {first, second} & self.blocks:
            return None
        pair = (getattr(self, name) if name in self.blocks else None for name in (first, second))
        return tuple(pair)  # type: ignore[return-value]

    def __str__(self) -> str:
        given = [x for x in fields(self) if x.init and getattr(self, x.name) != x.default]
        return f"LayerFormats({', '.join(f'{x.name}={getattr(self, x.name)!r}' for x in given)})"


def _stored(name: str, value: FormatLike) -> str:
    format = format_of(value)
    if not isinstance(format, BlockFormat) and not format.signed:
        raise ValueError(
            f"{name} is {format.name}, which has no sign and no zero; use a signed one"
        )
    return format.name


def _native(sums: dict[str, Any]) -> bool:
    exact = sums["rounding"] == "nearest-even"  # of float32 sums, that is torch's own rounding
    return (
        sums["multiply"] is None
        and (sums["accumulate"] is None or (sums["accumulate"] == "fp32" and exact))
        and not sums["fused"]
        and not sums["compensated"]
        and sums["chunk"] == 1
    )
