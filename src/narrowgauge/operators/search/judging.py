"""Stage 1: on steps of the training, sets of operators are judged, and gradients for the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from narrowgauge.formats import FormatLike
from narrowgauge.operators.replay import StepTape
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.signals import Judge, gradient_errors

WARM_UP = 5  # steps before the first is judged: the first gradients are unlike all others
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
        judge = setting.judge(tape, findings.float32, setting.formats if screening.alone else ())
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
