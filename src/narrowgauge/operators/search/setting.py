"""The training that a search rides on: model and optimizer, ranks, and the time it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.operators.names import unwrapped
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.replay import StepTape
from narrowgauge.operators.signals import Judge, Signal


class Ranks:
    """The ranks that train a model together: those of its DistributedDataParallel, or one.

    They decide alike: what they measured is compared, and rank 0 has the last word.

    Args:
        model: the model as it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        together = isinstance(model, DistributedDataParallel)
        self._group: Any = getattr(model, "process_group", None) if together else None
        self.count = dist.get_world_size(self._group) if together else 1
        self.number = dist.get_rank(self._group) if together else 0
        self.first = self.number == 0

    def all(self, value: Any) -> list[Any]:
        """What every rank passes, in rank order; each must call this."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, make: Callable[[], Any]) -> list[Any]:
        """What each rank makes, in rank order; if one raises, all raise, and nobody waits."""
        made: Any = None
        mine: Exception | None = None
        try:
            made = make()
        except Exception as error:
            mine = error
        text = "" if mine is None else str(mine) or type(mine).__name__
        kind = type(mine) if type(mine) in (OSError, TypeError, ValueError) else RuntimeError
        found = self.all((made, mine is not None, kind, text))
        if mine is not None:
            raise mine
        for rank, (_, raised, its_kind, message) in enumerate(found):
            if raised:
                raise its_kind(f"rank {rank} raised: {message}")
        return [made for made, *_ in found]

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks; if it raises, all raise."""
        return self.together(lambda: make() if self.first else None)[0]


@dataclass
class Clock:
    """Seconds of the search and of the training, apart.

    Args:
        search: seconds that the search took beyond the training, since it began.
        epoch: seconds of the training in this epoch.
        epochs: seconds of the training in each epoch before.
        steps: of the training, in this epoch and those before.
    """

    search: float = 0.0
    epoch: float = 0.0
    epochs: list[float] = field(default_factory=list)
    steps: int = 0
    _since: float | None = None  # when what the search is doing began

    @contextlib.contextmanager
    def overhead(self) -> Iterator[None]:
        """What is done within belongs to the search."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self.search, self._since = self.now, None

    @property
    def now(self) -> float:
        """Seconds of the search, what it is doing included."""
        return self.search + (time.perf_counter() - self._since if self._since is not None else 0)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, of which what is not the search's is the training's."""
        begin, before = time.perf_counter(), self.search
        try:
            yield
        finally:
            self.epoch += time.perf_counter() - begin - (self.search - before)
            self.steps += 1

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs.append(self.epoch)
        self.epoch = 0.0

    @property
    def mean_step(self) -> float:
        """Seconds of a step of the training."""
        return (sum(self.epochs) + self.epoch) / max(1, self.steps)

    @property
    def mean_epoch(self) -> float:
        """Seconds of an epoch of the training; of what there was of it, if it is the first."""
        return sum(self.epochs) / len(self.epochs) if self.epochs else self.epoch


@dataclass
class Setting:
    """The training that a search rides on.

    Args:
        model: as it is called, perhaps in DistributedDataParallel.
        optimizers: of its parameters.
        formats: candidates, the preferred first.
        simulated: whether they are.
        gradient_bound: largest harmless relative error of the gradient.
        memory_weight: what saved bytes are worth.
        ranks: who train together.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    formats: Sequence[str]
    simulated: bool
    gradient_bound: float
    memory_weight: float
    ranks: Ranks
    clock: Clock = field(default_factory=Clock)

    @property
    def inner(self) -> nn.Module:
        """The model without wrappers."""
        return unwrapped(self.model)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return next(self.inner.parameters()).device.type

    def worst(self, judged: Callable[[], Signal]) -> Signal:
        """The worst of what all ranks find."""
        worst: Signal
        worst, *others = self.ranks.together(judged)
        for other in others:
            worst = worst.worst(other)
        return worst

    @contextlib.contextmanager
    def observed(self, then: Callable[[StepTape], None]) -> Iterator[None]:
        """A step as the loop makes it; when it is over, something is done with its tape.

        Args:
            then: what is done; its time is the search's.
        """
        tape = StepTape(self.model, *self.optimizers)
        with tape:
            yield
        with self.clock.overhead():
            self.ranks.together(tape.check)
            then(tape)

    def record(self, tape: StepTape, keep_arguments: bool = False) -> Recording:
        """The operators of a step that is over."""
        recording = Recording(keep_arguments=keep_arguments, training=self.inner.training)
        as_it_is = OperatorPlan({})
        tape.gradients(lambda: as_it_is.applied(self.model, mismatch="ignore", recording=recording))
        recording.finish()
        return recording

    def judge(
        self, tape: StepTape, float32: OperatorPlan, watched: Collection[str] = ()
    ) -> Judge | None:
        """A judge of a step on each rank; none if a rank's batch gave no gradient to judge by."""
        judges: list[Judge] = []

        def make() -> bool:
            judges.append(Judge(self.model, tape, float32, self.formats, watched))
            return judges[0].usable

        return judges[0] if all(self.ranks.together(make)) else None
