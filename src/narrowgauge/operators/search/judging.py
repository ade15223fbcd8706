"""Stage 1: on steps of the training, sets of operators are judged, and gradients for the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from narrowgauge.formats import FormatLike
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.signals import Judge, gradient_errors

WARM_UP = 5  # steps before the first is judged: the first gradients are unlike all others
_PER_STEP = 4  # sets that are judged on one step


@contextlib.contextmanager
def recorded_step(setting: Setting, findings: Findings) -> Iterator[None]:
    """A step whose operators are noted."""
    recording = Recording(training=setting.inner.training)
    with setting.observed(recording, lambda tape, applied: None):
        yield
    with setting.clock.overhead():
        setting.ranks.together(lambda: findings.begin(recording))


@contextlib.contextmanager
def judged_step(
    setting: Setting, findings: Findings, wire_formats: Sequence[FormatLike]
) -> Iterator[None]:
    """A step on which some sets of operators are judged."""
    screening = findings.screening
    watched = setting.formats if screening.alone else ()

    def judge_some(judge: Judge) -> None:
        if wire_formats:
            _judge_wires(setting, findings, judge, wire_formats)
        for _ in range(_PER_STEP):
            if screening.over:
                break
            chosen = screening.next()
            signal = setting.worst(lambda chosen=chosen: judge.signal(chosen))  # type: ignore[misc]
            findings.note("judged", operators=chosen, **signal.as_dict())

    with setting.observed(
        None,
        lambda tape, applied: setting.judged(
            lambda: Judge(tape, applied, findings.float32, watched), judge_some
        ),
    ):
        yield
    if screening.over:
        findings.note("screened", survivors=screening.survivors())


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
