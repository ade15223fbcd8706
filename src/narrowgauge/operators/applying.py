"""Lets a model follow a plan: for a block of code, or until the plan is removed."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from narrowgauge.operators import mode as modes
from narrowgauge.operators.mode import MISMATCH, OperatorMismatch
from narrowgauge.operators.names import did_you_mean, module_paths, unwrapped
from narrowgauge.operators.recompute import follow_checkpoints

if TYPE_CHECKING:
    from narrowgauge.operators.plan import OperatorPlan
    from narrowgauge.operators.recording import Recording


class Applied:
    """A block in which a model follows a plan; see :meth:`OperatorPlan.applied`."""

    def __init__(
        self,
        plan: OperatorPlan,
        model: nn.Module,
        mismatch: str,
        recording: Recording | None,
    ) -> None:
        self._mode = _mode_for(plan, model, mismatch)
        self._mismatch = mismatch
        self._recording = recording
        self._here = False
        self.plan = plan

    def use(self, plan: OperatorPlan) -> None:
        """Follow another plan from the next forward on, without leaving the block.

        Raises:
            RuntimeError: the block was left.
        """
        if not self._here:
            raise RuntimeError("the plan's `with` block is not entered; .use(plan) within it")
        self._mode.rules = plan.rules()
        self.plan = plan

    def record(self, recording: Recording | None) -> None:
        """Note what is called from now on in this recording; ``None``: nowhere."""
        self._mode.recording = recording

    def __enter__(self) -> Applied:
        _take(self._mode)
        mode = self._mode
        mode.hold()
        mode.rules = self.plan.rules()
        mode.mismatch, mode.everywhere, mode.recording = self._mismatch, True, self._recording
        mode.path, mode.counts, mode.casts = [], {}, {}
        mode.differentiates = torch.is_grad_enabled()
        modes._entered.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._here = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        mode = self._mode
        self._here = False
        mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        del modes._entered[_last(mode) :]
        _give_up(mode)
        mode.release()


class Attached:
    """A plan that a model's forwards follow; see :meth:`OperatorPlan.attach`."""

    def __init__(self, plan: OperatorPlan, model: nn.Module, mismatch: str) -> None:
        self._mode = _mode_for(plan, model, mismatch)
        _take(self._mode)
        self._mode.rules = plan.rules()
        self._mode.mismatch, self._mode.everywhere = mismatch, False
        self._mode.hold()
        self._here = True
        self.plan = plan

    def use(self, plan: OperatorPlan) -> None:
        """Follow another plan from the next forward on; cheaper than removing and attaching.

        Raises:
            RuntimeError: it was removed.
        """
        if not self._here or self._mode.rules is None:
            raise RuntimeError("the plan was removed from the model; attach one again")
        self._mode.rules = plan.rules()
        self.plan = plan

    def remove(self) -> None:
        """Let the model compute as it did before; does nothing the second time."""
        if self._here:
            self._here = False
            if self._mode.rules is not None:
                _detach(self._mode)


def detach(model: nn.Module) -> None:
    """Remove the plan that is attached to a model, if there is one."""
    mode = modes.mode_of(unwrapped(model))
    if mode.rules is not None and not mode.everywhere:
        _detach(mode)


def _detach(mode: modes.PlanMode) -> None:
    if mode in modes._entered:  # by a forward that was interrupted, or is running
        modes._entered.remove(mode)
        if torch.overrides._get_current_function_mode() is mode:
            mode.__exit__(None, None, None)
    _give_up(mode)
    mode.release()


def _mode_for(plan: OperatorPlan, model: nn.Module, mismatch: str) -> modes.PlanMode:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    if mismatch not in MISMATCH:
        raise ValueError(f"mismatch is {mismatch!r}; allowed: {', '.join(map(repr, MISMATCH))}")
    model = unwrapped(model)
    paths = set()
    for path, module in module_paths(model):
        paths.add(path)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"module {path!r} is in TorchScript, whose operators cannot be seen; use the "
                "module that it was made from"
            )
    lost = [name for name in plan.names if name.rpartition("::")[0] not in paths]
    if lost and mismatch == "error":
        gone = sorted({name.rpartition("::")[0] for name in lost})
        hints = [f"{path!r}{did_you_mean(path, paths)}" for path in gone[:4]]
        raise OperatorMismatch(
            f"{modes.mismatch_text([], lost, plan.names)}. The model has no module "
            f"{', '.join(hints)}{' …' if len(gone) > 4 else ''}. {modes.ADVICE}"
        )
    follow_checkpoints()
    return modes.mode_of(model)


def _take(mode: modes.PlanMode) -> None:
    """Refuse a model that follows a plan already, or a part of it does."""
    model = None if mode.model is None else mode.model()
    assert model is not None
    for path, module in module_paths(model):
        for other in modes.modes_on(module):
            if other.rules is None:
                continue
            whose = "the model" if other is mode else f"module {path!r}, or a model around it,"
            way = "leave its `with` block" if other.everywhere else "call .remove() of what attach"
            raise RuntimeError(
                f"{whose} follows a plan already; {way}"
                f"{'' if other.everywhere else ' returned, or narrowgauge.operators.detach(model)'}"
                ", or change plans with .use(plan)"
            )


def _give_up(mode: modes.PlanMode) -> None:
    mode.rules = mode.recording = None
    mode.everywhere = False
    mode.path, mode.counts, mode.casts = [], {}, {}


def _last(mode: modes.PlanMode) -> int:
    """Where the mode's block begins among those that are entered; later ones are left-overs."""
    return modes._entered.index(mode)
