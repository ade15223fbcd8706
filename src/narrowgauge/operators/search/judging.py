"""Stage 1: operators are timed, and judged on steps; gradients for the wire as well.

What is so slow in a narrow format that no plan would have it there is not judged, which would cost
steps that are as slow: it is why times come first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from narrowgauge.formats import FormatLike
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.replay import StepTape
from narrowgauge.operators.search import costs
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.signals import Judge, gradient_errors

WARM_UP = 5  # steps before the first is judged: the first gradients are unlike all others
_EPOCHS = 0.2  # of time to spend on timing operators, about
_PER_STEP = 4  # sets that are judged on one step


def recorded_step(setting: Setting, findings: Findings) -> contextlib.AbstractContextManager[None]:
    """A step whose operators are noted."""

    def note(tape: StepTape) -> None:
        setting.ranks.together(lambda: findings.begin(setting.record(tape)))

    return setting.observed(note)


def judged_step(
    setting: Setting, findings: Findings, wire_formats: Sequence[FormatLike]
) -> contextlib.AbstractContextManager[None]:
    """A step on which some sets of operators are judged."""
    screening = findings.screening

    def judge_some(tape: StepTape) -> None:
        if not setting.simulated and not findings.profile.complete:
            _time_operators(setting, findings, setting.record(tape, keep_arguments=True))
        judge = setting.judge(tape, findings.float32, screening.upcoming(_PER_STEP))
        if judge is None:
            return
        if wire_formats:
            _judge_wires(setting, findings, judge, wire_formats)
        for _ in range(_PER_STEP):
            if screening.over:
                break
            chosen = screening.next()
            signal = setting.worst(lambda chosen=chosen: judge.signal(chosen))  # type: ignore[misc]
            findings.note("judged", operators=chosen, **signal.as_dict())
        if screening.over:
            findings.note("screened", survivors=screening.survivors())

    return setting.observed(judge_some)


def _time_operators(setting: Setting, findings: Findings, recording: Recording) -> None:
    """Time signatures and casts on rank 0, which others wait for."""
    known = findings.profile.operators
    measured: costs.Profile = setting.ranks.of_first(
        lambda: costs.measure(
            recording, ["fp32", *setting.formats], _EPOCHS * setting.clock.mean_epoch, known
        )
    )
    for signature, seconds in measured.operators.items():
        if signature not in known:
            findings.note("timed", signature=signature, seconds=seconds)
    casts = [[source, target, points] for (source, target), points in measured.casts.items()]
    findings.note("casts", seconds=casts)


def _judge_wires(
    setting: Setting, findings: Findings, judge: Judge, formats: Sequence[FormatLike]
) -> None:
    named = [n for n, p in setting.inner.named_parameters() if p.requires_grad]
    found = zip(named, judge.gradients, strict=True)
    gradients = {name: g for name, g in found if g is not None}
    worst = {name: dict(by_format) for name, by_format in findings.wire_errors.items()}
    for errors in setting.ranks.together(lambda: gradient_errors(gradients, formats)):
        for name, by_format in errors.items():
            known = worst.setdefault(name, {})
            for format, error in by_format.items():
                known[format] = max(error, known.get(format, 0.0))
    findings.note("wires", errors=worst)
