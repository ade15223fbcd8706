"""Stage 2: the plans that costs promise take turns on real steps.

float32, torch.autocast and everything narrow are always among them, so that nobody has to take our
word; what was found to harm the training is not, and says why.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from narrowgauge.operators.compute import NATIVE
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.replay import StepTape
from narrowgauge.operators.search import costs
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.signals import Judge, Signal

_EPOCHS = 0.2  # of time to spend on steps slower than float32's, about
_FEWEST = 5  # rounds of a trial
WIDE = ("fp32", "promote")


def following(
    setting: Setting, contender: str, plan: OperatorPlan
) -> contextlib.AbstractContextManager[Any]:
    """A context in which a step is made as a contender does, whose plan this is."""
    if contender == "fp32":
        return contextlib.nullcontext()
    if contender == "autocast":
        return AutocastStep(setting.device, NATIVE[setting.formats[0]])
    return plan.applied(setting.model, mismatch="ignore")


class AutocastStep(TorchFunctionMode):
    """torch.autocast for a whole step, but not for its backward pass."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._autocast = device, torch.autocast(device, dtype)

    def __enter__(self) -> AutocastStep:
        self._autocast.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._autocast.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call."""
        if func is Tensor.backward:
            with torch.autocast(self._device, enabled=False):
                return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def proposed_step(setting: Setting, findings: Findings) -> contextlib.AbstractContextManager[None]:
    """A step after which contenders are chosen."""

    def propose(tape: StepTape) -> None:
        judge = setting.judge(tape, findings.float32)
        if judge is not None:
            _propose(setting, findings, judge)

    return setting.observed(propose)


@contextlib.contextmanager
def trial_step(setting: Setting, findings: Findings) -> Iterator[None]:
    """The step of whoever's turn it is."""
    trial = findings.trial
    assert trial is not None
    contender = trial.next
    begin = time.perf_counter()
    with following(setting, contender, findings.plan_of(contender)):
        yield
    taken = max(setting.ranks.all(time.perf_counter() - begin))
    plain = trial.times["fp32"]
    if plain and contender != "fp32":  # what float32 would have taken is the training's
        setting.clock.search += max(0.0, taken - plain[-1])
    with setting.clock.overhead():
        seconds = trial.took(taken)
        if seconds is not None:
            findings.note("round", seconds=seconds)
        spent = setting.clock.search - findings.before_trial
        long = spent > _EPOCHS * setting.clock.mean_epoch and trial.rounds >= _FEWEST
        if setting.ranks.all(trial.over or long)[0]:
            winner, reason = trial.winner()
            findings.note("tried", winner=winner, reason=reason)


def harm_of(
    setting: Setting, findings: Findings, judge: Judge, contender: str, formats: Mapping[str, str]
) -> str:
    """What a contender with these formats does to a step, if that is too much; ``""`` if not."""

    def judged() -> Signal:
        if contender == "autocast":
            return judge.autocast(NATIVE[setting.formats[0]], setting.device)
        return judge.signal(formats)

    signal = setting.worst(judged)
    if not findings.screening.harmful_together(signal):
        return ""
    if math.isinf(signal.gradient_error):
        return "its gradient is not finite, or torch cannot compute every operator so"
    return (
        f"it turns the gradient by {signal.gradient_error:.2g} of its length and changes the loss "
        f"by {signal.loss_change:.2g} of its value"
    )


def _propose(setting: Setting, findings: Findings, judge: Judge) -> None:
    """Choose the contenders."""
    recording, screening = findings.recording, findings.screening
    low = screening.survivors()
    rules = OperatorPlan.from_autocast_rules(recording, setting.formats[0], setting.device).formats
    found: dict[str, dict[str, str]] = {"fp32": {}, "autocast": rules, "all-low": low}
    for name, caution in (("plan", 1.0), ("plan, casts doubled", 2.0)):
        found[name] = costs.cheapest_plan(
            recording,
            findings.profile,
            screening.allowed(),
            memory_weight=setting.memory_weight,
            caution=caution,
        )
    everything = {call.name for call in recording if not call.in_place}
    formats: dict[str, dict[str, str]] = {}
    saved_bytes: dict[str, int] = {}
    refused = dict(findings.failed)
    for name, wanted in found.items():
        chosen = {n: f for n, f in wanted.items() if f not in WIDE}
        if name == "autocast":  # whose operators promote, where those of a plan are in float32
            chosen = {n: f for n, f in wanted.items() if f != "fp32"}
        if name in refused:
            continue
        if name == "all-low" and set(low) != everything:
            harmful = len(everything - set(low))
            refused[name] = f"{harmful} of {len(everything)} operators harm or are too slow"
            continue
        if name not in ("fp32", "autocast"):
            if not chosen:
                refused[name] = "it is float32: no narrow operator promises a gain with its casts"
                continue
            same = [n for n, f in formats.items() if f == chosen and n != "autocast"]
            if same:
                refused[name] = f"it is the same as {same[0]!r}"
                continue

        if harm := harm_of(setting, findings, judge, name, chosen):
            refused[name] = harm
            continue
        formats[name], saved_bytes[name] = chosen, setting.ranks.all(judge.saved_bytes)[0]
    findings.note("contenders", formats=formats, saved_bytes=saved_bytes, refused=refused)
