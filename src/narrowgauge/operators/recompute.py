"""Lets activation checkpointing compute its second pass in the formats of the first.

torch restores autocast and random numbers for the second pass, but no function mode
(pytorch/pytorch#148023), and the second pass may run when the plan is no longer applied. So what
torch.utils.checkpoint is given to call again is wrapped, once per process, in a function that
restores the mode as it was: the modules that were running and the calls counted so far.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpoint

from narrowgauge.operators import mode as modes

_REENTRANT = "CheckpointFunction"
_OTHER = "_checkpoint_without_reentrant_generator"


class Snapshot:
    """A mode at the moment when a checkpointed part begins."""

    def __init__(self, mode: modes.PlanMode) -> None:
        self.mode = mode
        self.rules = mode.rules
        self.path = list(mode.path)
        self.counts = dict(mode.counts)
        mode.hold()
        weakref.finalize(self, mode.release)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function as if the first pass went on."""
        mode = self.mode
        kept = (
            mode.rules, mode.path, mode.counts, mode.casts, mode.recording, mode.differentiates,
        )  # fmt: skip
        mode.rules, mode.path, mode.counts = self.rules, list(self.path), dict(self.counts)
        mode.casts, mode.recording, mode.differentiates = None, None, True
        modes._entered.append(mode)
        try:
            with mode:
                return function(*args, **kwargs)
        finally:
            modes._entered.pop()
            (
                mode.rules, mode.path, mode.counts, mode.casts, mode.recording, mode.differentiates,
            ) = kept  # fmt: skip


def _again(function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
    """The function, which after ``calls_before`` plain calls is called in a snapshot of now."""
    if not modes._entered:
        return function
    snapshot = Snapshot(modes._entered[-1])
    left = calls_before

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return function(*args, **kwargs)
        return snapshot.call(function, *args, **kwargs)

    return call


@functools.cache
def follow_checkpoints() -> None:
    """Wrap what torch.utils.checkpoint calls again; does nothing while no plan is applied."""
    reentrant = getattr(checkpoint, _REENTRANT, None)
    other = getattr(checkpoint, _OTHER, None)
    if reentrant is None or other is None:
        warnings.warn(
            "this version of torch has no torch.utils.checkpoint."
            f"{_OTHER if other is None else _REENTRANT}, so functional operators inside "
            "activation checkpoints do not follow a plan when they are recomputed",
            stacklevel=2,
        )
        return
    apply = reentrant.apply

    def applied(function: Any, *args: Any) -> Any:
        return apply(_again(function, 1), *args)

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        return other(_again(function, 0), *args, **kwargs)

    reentrant.apply = applied
    setattr(checkpoint, _OTHER, generator)
