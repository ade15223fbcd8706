"""What the demo trains: the settings of all its runs, and the variants it compares."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Scale = Literal["local", "shared"]


@dataclass(frozen=True)
class Settings:
    """Settings that every run of one demo shares; runs are comparable only if these are equal.

    Args:
        data: ``"digits"``, ``"fashion-mnist"`` or a folder with IDX files.
        ranks: processes that train together, at least 1.
        steps: optimizer steps of each run, at least 2.
        scale: how the scaled variants find their power of two, see
            :func:`narrowgauge.gradients.compress`.
        batch: samples per step, over all ranks.
        learning_rate: of SGD with momentum 0.9, at its peak: rising over the first tenth of the
            steps, falling to zero over the second half.
        error_every: steps between two measurements of the round-off error; 0 for never.

    Raises:
        ValueError: a number is out of range.
    """

    data: str = "digits"
    ranks: int = 2
    steps: int = 330
    scale: Scale = "local"
    batch: int = 128
    learning_rate: float = 0.05
    error_every: int = 25

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; at least 1 is needed")
        if self.steps < 2:
            raise ValueError(f"steps is {self.steps}; at least 2 are needed")
        if self.scale not in ("local", "shared"):
            raise ValueError(f"scale is {self.scale!r}; allowed: 'local', 'shared'")
        if self.batch < self.ranks or self.batch % self.ranks:
            raise ValueError(
                f"a batch of {self.batch} samples cannot be shared equally by {self.ranks} ranks; "
                "choose a number of ranks that divides it"
            )

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON."""
        return asdict(self)

    def rate(self, step: int) -> float:
        """Learning rate at a step, counted from 0."""
        done = step / self.steps
        return self.learning_rate * min(1.0, (done + 1 / self.steps) / 0.1, 2 * (1 - done))


@dataclass(frozen=True)
class Variant:
    """One way to send gradients.

    Args:
        key: its name in ``results.jsonl``.
        label: its name for people.
        format: on the wire.
        narrowgauge: whether :func:`narrowgauge.gradients.compress` sends it; otherwise DDP itself
            (``fp32``) or a plain hook (``bf16``).
        scaled: whether tensors are scaled by powers of two before they are rounded.
        bits: per gradient element on the wire.
    """

    key: str
    label: str
    format: str
    narrowgauge: bool
    scaled: bool
    bits: int


def variants(scale: Scale) -> list[Variant]:
    """The variants of the demo, in the order of the table."""
    return [
        Variant("float32", "float32, plain DDP", "fp32", False, False, 32),
        Variant("bf16", "bf16, hook", "bf16", False, False, 16),
        Variant("aps-e5m2", f"e5m2, APS {scale}", "e5m2", True, True, 8),
        Variant("aps-e4m3", f"e4m3, APS {scale}", "e4m3", True, True, 8),
        Variant("aps-e3m0", f"e3m0, APS {scale}", "e3m0", True, True, 4),
        Variant("plain-e4m3", "e4m3, no scale", "e4m3", True, False, 8),
        Variant("plain-e3m0", "e3m0, no scale", "e3m0", True, False, 4),
    ]
