"""What both stages of a search share: the training it rides on, its ranks, journal and clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from narrowgauge.operators.agreement import Ranks
from narrowgauge.operators.journal import Journal
from narrowgauge.operators.names import unwrapped
from narrowgauge.operators.signals import Signal


@dataclass
class Clock:
    """Seconds of the search and of the training, apart.

    Args:
        search: seconds that the search took beyond the training, since it began.
        epoch: seconds of the training in this epoch.
        epochs: seconds of the training in each epoch before.
    """

    search: float = 0.0
    epoch: float = 0.0
    epochs: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def overhead(self) -> Iterator[None]:
        """What is done within belongs to the search."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.search += time.perf_counter() - begin

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, of which what is not the search's is the training's."""
        begin, before = time.perf_counter(), self.search
        try:
            yield
        finally:
            self.epoch += time.perf_counter() - begin - (self.search - before)

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs.append(self.epoch)
        self.epoch = 0.0

    @property
    def mean_epoch(self) -> float:
        """Seconds of an epoch of the training."""
        return sum(self.epochs) / len(self.epochs) if self.epochs else self.epoch


@dataclass
class Setting:
    """The training that a search rides on.

    Args:
        model: as it is called, perhaps in DistributedDataParallel.
        optimizer: of its parameters.
        formats: candidates, the preferred first.
        simulated: whether they are.
        bound: largest harmless relative error of the gradient.
        ranks: who train together.
        journal: what was found.
        clock: what it took.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    formats: Sequence[str]
    simulated: bool
    bound: float
    ranks: Ranks
    journal: Journal
    clock: Clock = field(default_factory=Clock)

    @property
    def inner(self) -> nn.Module:
        """The model without wrappers."""
        return unwrapped(self.model)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return next(self.inner.parameters()).device.type

    def worst(self, signal: Signal) -> Signal:
        """The worst of what all ranks found."""
        worst: Signal
        worst, *others = self.ranks.all(signal)
        for other in others:
            worst = worst.worst(other)
        return worst
