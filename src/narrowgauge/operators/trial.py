"""Plans against each other, on real steps: which one is taken, and whether it is worth it.

float32, torch.autocast, everything narrow and the plans that the costs promise take turns, step by
step; the ratio within each round counts. What is clearly slower leaves early. The trade-off: some
steps of the training run under a contender that is not the best; all of them train it, as each was
found harmless before.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.operators.timing import Comparison, compare, rotated

_FEW = 3  # rounds before a contender may leave
_MUCH = 1.25  # times slower than the fastest, in each of them


@dataclass
class Trial:
    """Contenders that take turns.

    Args:
        memory: saved bytes of each contender; the first is float32.
        memory_weight: what saved bytes are worth, see ``cheapest_plan``.
        most: rounds at most.
        noise: rounds end when all comparisons are known this well.
    """

    memory: dict[str, int]
    memory_weight: float = 0.0
    most: int = 40
    noise: float = 0.01
    times: dict[str, list[float]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Who left early, and why."""

    def __post_init__(self) -> None:
        self._round = -1  # one to get warm
        self._current: dict[str, float] = {}
        self.times = {name: [] for name in self.memory}
        self._todo = list(self.memory)

    @property
    def over(self) -> bool:
        """Whether enough rounds were made."""
        rounds = self.rounds
        if rounds >= self.most or len(self.running) == 1:
            return True
        if rounds < 8:
            return False
        found = [self.against(name, "fp32") for name in self.running if name != "fp32"]
        return all(c.noise < self.noise or abs(c.ratio - 1) > 4 * c.noise for c in found)

    @property
    def rounds(self) -> int:
        """Rounds that count."""
        return max(0, self._round)

    @property
    def running(self) -> list[str]:
        """Contenders that have not left; float32 stays."""
        return [name for name in self.memory if name not in self.left]

    @property
    def next(self) -> str:
        """Whose turn the next step is."""
        return self._todo[0]

    def took(self, seconds: float) -> None:
        """The step of :attr:`next` took that long."""
        self._current[self._todo.pop(0)] = seconds
        if self._todo:
            return
        if self._round >= 0:
            for name, value in self._current.items():
                self.times[name].append(value)
        self._round += 1
        self._current = {}
        self._drop_the_slow()
        self._todo = rotated(self.running, max(0, self._round))

    def _drop_the_slow(self) -> None:
        if self._round != _FEW:
            return
        fastest = min(statistics.median(self.times[name]) for name in self.running)
        for name in self.running:
            taken = min(self.times[name])
            if name != "fp32" and taken > _MUCH * fastest and not self._saves_memory(name):
                self.left[name] = f"{taken / fastest:.2f} × the fastest in {_FEW} rounds"

    def _saves_memory(self, name: str) -> bool:
        return self.memory_weight > 0 and self.memory[name] < self.memory["fp32"]

    def against(self, name: str, other: str) -> Comparison:
        """How much faster one is than another, in the rounds of both."""
        rounds = min(len(self.times[name]), len(self.times[other]))
        return compare(self.times[name][:rounds], self.times[other][:rounds])

    def objective(self, name: str) -> float:
        """(time / time₃₂) + memory_weight · (saved bytes / bytes₃₂)."""
        time = 1 / self.against(name, "fp32").ratio
        return time + self.memory_weight * self.memory[name] / max(1, self.memory["fp32"])

    def winner(self) -> tuple[str, str]:
        """The contender to be taken, and the reason in a sentence.

        float32 is taken unless something beats it by more than the noise, autocast unless a plan
        beats that.
        """
        best, reason = "fp32", "nothing beats float32 by more than the noise"
        for name in self.running:
            if name != "fp32" and len(self.times[name]) >= 4 and self._beats(name, best):
                found = self.against(name, "fp32")
                share = self.memory[name] / max(1, self.memory["fp32"])
                reason = (
                    f"{found.ratio:.3f} × as fast as float32 (± {found.noise:.1%}, "
                    f"{found.rounds} rounds), {share:.2f} of its saved activations"
                )
                if best != "fp32":
                    other = self.against(name, best)
                    reason += f"; {other.ratio:.3f} × as fast as {best} (± {other.noise:.1%})"
                best = name
        return best, reason

    def _beats(self, name: str, best: str) -> bool:
        paired = self.against(name, best)
        if not self.memory_weight:
            return paired.faster
        gain = self.objective(best) - self.objective(name)
        return gain > paired.noise / max(paired.ratio, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a report."""
        found: dict[str, Any] = {}
        for name, times in self.times.items():
            if not times:
                continue
            comparison = self.against(name, "fp32")
            found[name] = {
                "seconds": statistics.median(times),
                "times_fp32": comparison.ratio,
                "noise": comparison.noise if math.isfinite(comparison.noise) else None,
                "rounds": len(times),
                "saved_bytes": self.memory[name],
            }
            if name in self.left:
                found[name]["left"] = self.left[name]
        return found


def seed_band(
    low: list[float], exact: list[float], evaluation: float, given: float | None
) -> tuple[float, str]:
    """By how much the evaluation under a plan may be above float32's.

    Args:
        low: losses of the steps under the plan.
        exact: losses of the same steps in float32.
        evaluation: float32's.
        given: relative band that the user has measured over seeds, or ``None``.

    Returns:
        The band, in the evaluation's unit, and how it was found.
    """
    if given is not None:
        return given * abs(evaluation), f"{given:.1%} of float32's, as given"
    floor, ceiling = 0.02 * abs(evaluation), 0.25 * abs(evaluation)
    half = len(low) // 2
    blocks = [
        statistics.fmean(a - b for a, b in zip(low[i : i + 8], exact[i : i + 8], strict=True))
        for i in range(half, len(low) - 7, 8)
    ]
    if len(blocks) < 3:
        return floor, "2 % of float32's"
    spread = 3 * statistics.stdev(blocks) / math.sqrt(len(blocks))
    band = min(max(spread, floor), ceiling)
    return band, f"{band / max(abs(evaluation), 1e-30):.1%} of float32's, by the paired losses"


def diverged(low: list[float], exact: list[float], skipped: int) -> str | None:
    """Why a training under a plan need not go on, or ``None``.

    Args:
        low: losses of the steps under the plan.
        exact: losses of the same steps in float32.
        skipped: steps under the plan without a step of the optimizer.
    """
    if low and not math.isfinite(low[-1]) and math.isfinite(exact[-1]):
        return f"the loss became {low[-1]} in step {len(low)}"
    if skipped > max(3, 0.25 * len(low)):
        return f"{skipped} of {len(low)} steps were skipped, their gradients not being finite"
    if len(low) >= 20:
        a, b = statistics.fmean(low[-20:]), statistics.fmean(exact[-20:])
        if a > 2 * b + 3 * statistics.pstdev(exact[-20:]) and a > b > 0:
            return f"after {len(low)} steps the loss was {a:.3g}, float32's {b:.3g}"
    return None
