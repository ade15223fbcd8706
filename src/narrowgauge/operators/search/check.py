"""An epoch of the winner beside float32: whether training keeps up, not only single steps.

A float32 shadow makes the same steps on the same batches with the same random numbers. If the
evaluation leaves float32's band, or the losses run away before, the shadow becomes the training, so
that no epoch is lost. The trade-off: a second forward and backward pass for one epoch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from narrowgauge.operators.replay import StepTape
from narrowgauge.operators.search.contenders import following, harm_of
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.shadow import Shadow

_COMPARED = 10  # ranks compare every so many steps
_MORE = 3  # steps of float32 to see how much its evaluation jumps
_BLOCK = 8  # steps whose losses are averaged
_LEAST, _MOST = 0.02, 0.25  # of the evaluation, that the band may be


@dataclass
class Outcome:
    """What an epoch beside float32 showed.

    Args:
        passed: whether the winner kept up.
        reason: a sentence.
        steps: that were compared.
        evaluation: of the winner, unless it failed before.
        float32: the evaluation of float32, unless it failed before.
        band: how much worse the winner's could be.
    """

    passed: bool
    reason: str
    steps: int
    evaluation: float | None
    float32: float | None
    band: float


class Check:
    """An epoch in which the training follows the winner, and the shadow float32.

    Args:
        setting: the training.
        findings: what is known; whose winner it is.
        seed_band: see ``OperatorSearch``.

    Attributes:
        failure: why it ended before its time, if it did; there is no step to make then.
    """

    failure: Outcome | None = None

    def __init__(self, setting: Setting, findings: Findings, seed_band: float | None) -> None:
        self._setting, self._findings, self._seed_band = setting, findings, seed_band
        self._winner = findings.winner
        self._plan = findings.plan_of(self._winner)
        self._formats = findings.contenders.formats[self._winner]
        self._shadow = Shadow(setting.model, *setting.optimizers)
        self._low: list[float] = []
        self._exact: list[float] = []
        self._skipped = 0
        self._tape: StepTape | None = None  # of the last step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the winner, and the same in float32."""
        setting, clock = self._setting, self._setting.clock
        begin = time.perf_counter()
        setting.ranks.together(self._shadow.follow)
        tape = StepTape(setting.model, *setting.optimizers)
        with following(setting, self._winner, self._plan), tape:
            yield
        setting.ranks.together(tape.check)
        self._tape = tape
        middle = time.perf_counter()
        with self._shadow.in_place():
            exact = tape.step_again()
        end = time.perf_counter()  # float32's step is the training's time, the rest is the search's
        self._low.append(tape.loss)
        self._exact.append(exact)
        self._skipped += tape.scaled and not tape.stepped
        reason = diverged(self._low, self._exact, self._skipped)
        steps = len(self._low)
        if setting.ranks.count > 1:  # the ranks' losses differ, their decision must not
            reasons = [r for r in setting.ranks.all(reason) if r] if steps % _COMPARED == 0 else []
            reason = reasons[0] if reasons else None
        if steps & (steps - 1) == 0:  # 1, 2, 4, 8 …: harm may grow as the training goes on
            reason = reason or self._harm(tape)
        if reason:
            self._fail(reason)
        self._shadow.leave()
        clock.search += middle - begin + time.perf_counter() - end

    def end(self, evaluate: Callable[[], float]) -> tuple[Outcome, float]:
        """The epoch is over; whoever is right goes on.

        Args:
            evaluate: the loss on other data, of the model as it is.

        Returns:
            What was found, and the evaluation of what goes on.
        """
        if self._tape is not None:
            with self._setting.clock.overhead():
                reason = self._harm(self._tape)
            if reason:
                self._fail(reason)
        value = evaluate()
        if self.failure is not None:
            return self.failure, value
        with self._setting.clock.overhead(), self._shadow.in_place():
            exact = evaluate()
        band, how = self._setting.ranks.all(
            seed_band(self._low, self._exact, exact, self._seed_band)
        )[0]
        worst = exact
        if not value <= exact + band and self._tape is not None:
            worst = self._worst_of_float32(exact, evaluate, self._tape)
            how += f"; in {_MORE} more steps float32's rose to {worst:.4g}" if worst > exact else ""
        passed = value <= worst + band
        reason = f"the evaluation was {value:.4g}, float32's {exact:.4g}; band {band:.2g}: {how}"
        if not passed:
            self._shadow.exchange()
        outcome = Outcome(passed, reason, len(self._low), value, exact, band)
        return outcome, value if passed else exact

    def _worst_of_float32(
        self, exact: float, evaluate: Callable[[], float], tape: StepTape
    ) -> float:
        """The worst evaluation of float32 in a few more steps, which are undone.

        Early in a training, evaluations jump from step to step, as with running statistics.
        """
        worst = exact
        with self._setting.clock.overhead(), self._shadow.in_place():
            before = Shadow(self._setting.model, *self._setting.optimizers)
            for _ in range(_MORE):
                tape.step_again()
                worst = max(worst, evaluate())
            before.exchange()
        return worst

    def _fail(self, reason: str) -> None:
        """The shadow takes over."""
        self._shadow.exchange()
        self.failure = Outcome(False, reason, len(self._low), None, None, 0.0)

    def _harm(self, tape: StepTape) -> str | None:
        """What the winner does to a step of its epoch, if that is too much."""
        setting, findings = self._setting, self._findings
        judge = setting.judge(tape, findings.float32)
        if judge is None:
            return None
        harm = harm_of(setting, findings, judge, self._winner, self._formats)
        return f"in step {len(self._low)} of its epoch, {harm}" if harm else None


def seed_band(
    low: Sequence[float], exact: Sequence[float], evaluation: float, given: float | None
) -> tuple[float, str]:
    """By how much the evaluation under a plan may be above float32's.

    Two trainings that differ by rounding only drift apart as two seeds do; how far, their losses on
    the same batches show: averaged over some steps, their relative difference scatters. A harm that
    lasts moves its mean, not its scatter.

    Args:
        low: losses of the steps under the plan.
        exact: losses of the same steps in float32.
        evaluation: float32's.
        given: relative band that the user has measured over seeds, or ``None``.

    Returns:
        The band, in the evaluation's unit, and how it was found.
    """
    scale = abs(evaluation)
    if given is not None:
        return given * scale, f"{given:.1%}, as given"
    differences = []
    for begin in range(len(low) // 2, len(low) - _BLOCK + 1, _BLOCK):
        ours = statistics.fmean(low[begin : begin + _BLOCK])
        theirs = statistics.fmean(exact[begin : begin + _BLOCK])
        differences.append((ours - theirs) / max(abs(theirs), 1e-30))
    if len(differences) < 3:
        return _LEAST * scale, f"{_LEAST:.0%}, as there are too few steps to measure it"
    share = min(max(2 * statistics.stdev(differences), _LEAST), _MOST)
    return share * scale, f"{share:.1%}, as the losses of the same batches scatter"


def diverged(low: Sequence[float], exact: Sequence[float], skipped: int) -> str | None:
    """Why a training under a plan need not go on, or ``None``.

    Args:
        low: losses of the steps under the plan.
        exact: losses of the same steps in float32.
        skipped: steps under the plan that GradScaler skipped.
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
