"""The plans that are worth trying on whole steps, and how a step is made under each.

float32, torch.autocast and everything narrow are always among them, so that nobody has to take our
word; what was found to harm the training is not, and says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.operators import profile
from narrowgauge.operators.compute import NATIVE
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.screening import Screening
from narrowgauge.operators.signals import Judge, Signal

WIDE = ("fp32", "promote")


@dataclass
class Contenders:
    """Who may be tried.

    Args:
        plans: by name, ``"fp32"`` first; what autocast would do is under ``"autocast"``.
        memory: saved bytes of each.
        refused: who is not tried, and why.
    """

    plans: dict[str, OperatorPlan] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def propose(
    recording: Recording,
    measured: profile.Profile,
    screening: Screening,
    float32: OperatorPlan,
    judge: Judge,
    *,
    device: str,
    memory_weight: float,
    worst: Callable[[Signal], Signal],
) -> Contenders:
    """The contenders of a search.

    Args:
        recording: of a step in float32.
        measured: what its operators and casts cost.
        screening: which operators may take which formats.
        float32: the plan with all operators in float32.
        judge: of the same step.
        device: ``"cpu"`` or ``"cuda"``.
        memory_weight: see :func:`~narrowgauge.operators.profile.cheapest_plan`.
        worst: the worst of what all ranks found.
    """
    names = set(float32.names)
    low, first = screening.survivors(), screening.formats[0]
    rules = OperatorPlan.from_autocast_rules(recording, first, device).formats
    found = {"fp32": {}, "autocast": rules, "all-low": low}
    for name, caution in (("plan", 1.0), ("plan, casts doubled", 2.0)):
        found[name] = profile.cheapest_plan(
            recording,
            measured,
            screening.allowed(),
            memory_weight=memory_weight,
            caution=caution,
        )
    contenders, seen = Contenders(), set[tuple[tuple[str, str], ...]]()
    everything = {call.name for call in recording if not call.in_place}
    for name, formats in found.items():
        chosen = {n: f for n, f in formats.items() if n in names}
        narrow = {n: f for n, f in chosen.items() if f not in WIDE}
        key = tuple(sorted(narrow.items()))
        if name not in ("fp32", "autocast") and (not narrow or key in seen):
            continue
        if name == "all-low" and set(low) != everything:
            harmful = len(everything - set(low))
            contenders.refused[name] = f"{harmful} operators were found harmful"
            continue
        signal = Signal(0.0, 0.0)
        if name == "autocast":
            signal = worst(judge.autocast(NATIVE[first], device))
        elif narrow:
            signal = worst(judge.signal(narrow))
        if signal.gradient_error > 2 * screening.bound or signal.loss_change > 1:
            contenders.refused[name] = (
                f"it turns the gradient by {signal.gradient_error:.2g} of its length and changes "
                f"the loss by {signal.loss_change:.2g} of its value"
            )
            continue
        seen.add(key)
        contenders.plans[name] = float32.with_formats(chosen)
        contenders.memory[name] = profile.saved_bytes(recording, formats)
    return contenders


class AutocastStep(TorchFunctionMode):
    """torch.autocast for a whole step, but not for its backward pass."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._autocast = device, torch.autocast(device, dtype)

    def __enter__(self) -> AutocastStep:
        self._autocast.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._autocast.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call."""
        if func is Tensor.backward:
            with torch.autocast(self._device, enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def following(
    name: str, plans: Mapping[str, OperatorPlan], model: nn.Module, device: str, low: str
) -> contextlib.AbstractContextManager[Any]:
    """A context in which a step is made as a contender does.

    Args:
        name: the contender.
        plans: the contenders' plans.
        model: the model.
        device: ``"cpu"`` or ``"cuda"``.
        low: autocast's format.
    """
    if name == "fp32":
        return contextlib.nullcontext()
    if name == "autocast":
        return AutocastStep(device, NATIVE[low])
    return plans[name].applied(model, mismatch="ignore")
