"""Stage 1 of a search: which operators may be narrow without harm to the training.

Sets of operators are judged on steps of the training; then all that were found harmless train an
epoch, beside a float32 shadow that makes the same steps. If the evaluation leaves float32's band, or
the losses run away before, the shadow becomes the training, so that no epoch is lost, and the more
harmful half is given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from narrowgauge.formats import FormatLike
from narrowgauge.operators.applying import Applied
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.replay import Shadow, StepTape
from narrowgauge.operators.screening import Screening, signal_from
from narrowgauge.operators.setting import Setting
from narrowgauge.operators.signals import Judge, gradient_errors
from narrowgauge.operators.trial import diverged, seed_band

_WARM_UP = 5  # steps before the first is judged: the first gradients are unlike all others
_PER_STEP = 4  # sets that are judged on one step
_COMPARED = 10  # ranks compare every so many steps


@contextlib.contextmanager
def observed_step(
    setting: Setting, recording: Recording | None, then: Callable[[StepTape, Applied], None]
) -> Iterator[None]:
    """A step as the loop makes it; before its ``backward`` something is done with its tape.

    Args:
        setting: the training.
        recording: to note the forward pass in, or ``None``.
        then: what is done; its time is the search's.
    """
    plan = OperatorPlan({})
    with plan.applied(setting.model, mismatch="ignore", recording=recording) as applied:

        def act(tape: StepTape) -> None:
            with setting.clock.overhead():
                if recording is not None:
                    applied._mode.recording = None
                    recording.finish()
                then(tape, applied)

        tape = StepTape(setting.model, setting.optimizer, act)
        with tape:
            yield
    tape.check()


class Convergence:
    """The state of stage 1.

    Args:
        setting: the training.
        seed_band: see ``OperatorSearch``.
        wire_formats: formats for gradients on the wire to be judged as well.

    Attributes:
        recording: the operators, once a step was made.
        screening: what was found about them.
        float32: the plan with all in float32.
        wire_errors: largest error by parameter and format.
    """

    recording: Recording
    screening: Screening
    float32: OperatorPlan

    def __init__(
        self, setting: Setting, seed_band: float | None, wire_formats: Sequence[FormatLike]
    ) -> None:
        self._setting = setting
        self._band = seed_band
        self._wire_formats = wire_formats
        self.wire_errors: dict[str, dict[str, float]] = {}
        self.recorded = False
        self._steps = 0
        self._shadow: Shadow | None = None
        self._losses: tuple[list[float], list[float]] = ([], [])
        self._skipped, self._failure = 0, ""

    def harmless(self) -> OperatorPlan:
        """All operators that were found harmless in their format, the others in float32."""
        return self.float32.with_formats(self.screening.survivors())

    # --- judging on steps ------------------------------------------------------------------------

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """A step whose operators are noted."""
        recording = Recording(training=self._setting.inner.training)
        with observed_step(self._setting, recording, lambda tape, applied: None):
            yield
        self._begin(recording)

    @contextlib.contextmanager
    def screen(self) -> Iterator[None]:
        """A step on which some sets of operators are judged."""
        self._steps += 1
        if self._steps <= _WARM_UP or self.screening.over:
            yield
            return
        watched = self._setting.formats if self.screening.alone else ()
        with observed_step(
            self._setting,
            None,
            lambda tape, applied: self._judge(Judge(tape, applied, self.float32, watched)),
        ):
            yield

    def _judge(self, judge: Judge) -> None:
        setting = self._setting
        if not all(setting.ranks.all(judge.usable)):
            return
        self._judge_wires(judge)
        for _ in range(_PER_STEP):
            if self.screening.over:
                break
            chosen = self.screening.next()
            signal = setting.worst(judge.signal(chosen))
            setting.journal.append("judged", operators=chosen, **signal.as_dict())
            self.screening.judged(signal)

    def _judge_wires(self, judge: Judge) -> None:
        if not self._wire_formats:
            return
        named = [n for n, p in self._setting.inner.named_parameters() if p.requires_grad]
        found = zip(named, judge.gradients, strict=True)
        gradients = {name: g for name, g in found if g is not None}
        for errors in self._setting.ranks.all(gradient_errors(gradients, self._wire_formats)):
            for name, by_format in errors.items():
                worst = self.wire_errors.setdefault(name, {})
                for format, error in by_format.items():
                    worst[format] = max(error, worst.get(format, 0.0))
        self._setting.journal.append("wires", errors=self.wire_errors)

    def _begin(self, recording: Recording) -> None:
        setting, journal = self._setting, self._setting.journal
        self.recording, self.recorded = recording, True
        self.float32 = OperatorPlan(
            {call.name: "promote" if call.in_place else "fp32" for call in recording},
            default="fp32",
            signatures={call.name: call.signature for call in recording},
            outside=[call.name for call in recording if not call.inside],
            training=recording.training,
        )
        self.screening = Screening(
            recording, setting.formats, simulated=setting.simulated, bound=setting.bound
        )
        known = journal.last("operators")
        if known is None:
            journal.append("operators", fingerprint=self.float32.fingerprint)
        elif known["fingerprint"] != self.float32.fingerprint:
            raise ValueError(
                "the workdir holds the search of a model with other operators; name another workdir"
            )
        for event in journal:  # what was found before an interruption
            if event["event"] == "judged" and event["operators"] == self.screening.next():
                self.screening.judged(signal_from(event))
            if event["event"] == "check" and not event["passed"]:
                self.screening.give_up_worst(event["reason"])

    # --- an epoch beside float32 -----------------------------------------------------------------

    def begin_check(self) -> None:
        """From here on the training is narrow, and the shadow float32."""
        self._losses, self._skipped, self._failure = ([], []), 0, ""
        self._shadow = Shadow(self._setting.model, self._setting.optimizer)

    @contextlib.contextmanager
    def check(self) -> Iterator[None]:
        """A step with all that is harmless in low precision, and the same in float32."""
        setting = self._setting
        if self._failure:  # the shadow has taken over
            yield
            return
        if self._shadow is None:  # resumed
            self.begin_check()
        assert self._shadow is not None
        tape = StepTape(setting.model, setting.optimizer)
        with self.harmless().applied(setting.model, mismatch="ignore"), tape:
            yield
        tape.check()
        with setting.clock.overhead():
            with self._shadow.in_place():
                exact = tape.step_again()
            low, losses = self._losses
            low.append(tape.loss)
            losses.append(exact)
            self._skipped += tape.scaled and not tape.stepped
            reason = diverged(low, losses, self._skipped)
            if setting.ranks.count > 1:  # the ranks' losses differ, their decision must not
                together = len(low) % _COMPARED == 0
                reasons = [r for r in setting.ranks.all(reason) if r] if together else []
                reason = reasons[0] if reasons else None
            if reason:
                self._failure = reason
                self._shadow.exchange()

    def end_check(self, value: float, evaluate: Callable[[], float]) -> tuple[bool, float]:
        """The epoch is over; whoever is right goes on.

        Args:
            value: the evaluation of the training as it is.
            evaluate: makes one.

        Returns:
            Whether low precision kept up with float32, and the evaluation of what goes on.
        """
        if self._shadow is None:  # no step was made
            return False, value
        setting = self._setting
        low, exact, band, how = value, value, 0.0, "the losses ran away"
        if not self._failure:
            with setting.clock.overhead(), self._shadow.in_place():
                exact = float(evaluate())
            band, how = seed_band(*self._losses, exact, self._band)
            low, exact, band = setting.ranks.of_first((value, exact, band))
            if not low <= exact + band:
                self._failure = f"the evaluation was {low:.4g}, float32's {exact:.4g}, band {how}"
                self._shadow.exchange()
                value = exact
        self._shadow = None
        passed = not self._failure
        reason = how if passed else f"an epoch with it failed: {self._failure}"
        numbers: dict[str, Any] = {"evaluation": low, "float32": exact, "band": band}
        setting.journal.append(
            "check", passed=passed, reason=reason, steps=len(self._losses[0]), **numbers
        )
        if not passed:
            self.screening.give_up_worst(reason)
        return passed, value
