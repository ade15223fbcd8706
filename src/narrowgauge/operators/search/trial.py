"""Plans against each other, on real steps: which one is taken, and whether it is worth it.

float32, torch.autocast, everything narrow and the plans that the costs promise take turns, step by
step; the ratio within each round counts. What is clearly slower leaves early. The trade-off: some
steps of the training run under a contender that is not the best; all of them train it, as each was
found harmless before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.operators.search.timing import Comparison, compare, rotated

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

    memory: Mapping[str, int]
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

    def took(self, seconds: float) -> dict[str, float] | None:
        """The step of :attr:`next` took that long.

        Returns:
            The seconds of all in this round if it is over, for :meth:`add`.
        """
        self._current[self._todo.pop(0)] = seconds
        return None if self._todo else self._current

    def add(self, seconds: Mapping[str, float]) -> None:
        """A round is over; the first one only made everything warm."""
        if self._round >= 0:
            for name, value in seconds.items():
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
