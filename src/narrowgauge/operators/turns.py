"""Stage 2 of a search: costs are measured, and the plans they promise take turns on real steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from narrowgauge.operators import profile
from narrowgauge.operators.contenders import Contenders, following, propose
from narrowgauge.operators.convergence import Convergence, observed_step
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.setting import Setting
from narrowgauge.operators.signals import Judge
from narrowgauge.operators.trial import Trial

_EPOCHS = 0.25  # of time to spend on measuring operators, about


class Turns:
    """The state of stage 2.

    Args:
        setting: the training.
        convergence: what stage 1 found.
        memory_weight: what saved bytes are worth.

    Attributes:
        profile: what operators and casts cost.
        contenders: who may be tried.
        trial: their turns, once they began.
    """

    def __init__(self, setting: Setting, convergence: Convergence, memory_weight: float) -> None:
        self._setting, self._convergence = setting, convergence
        self._memory_weight = memory_weight
        self.profile = profile.Profile()
        self.contenders = Contenders()
        self.trial: Trial | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The step of whoever's turn it is; the first measures instead."""
        setting, trial = self._setting, self.trial
        if trial is None:
            recording = Recording(keep_arguments=True, training=setting.inner.training)
            with observed_step(
                setting,
                recording,
                lambda tape, applied: self._measure(
                    recording, Judge(tape, applied, self._convergence.float32)
                ),
            ):
                yield
            return
        name = trial.next
        begin = time.perf_counter()
        with self.following(name):
            yield
        taken = max(setting.ranks.all(time.perf_counter() - begin))
        plain = trial.times["fp32"]
        if plain and name != "fp32":  # what float32 would have taken is the training's
            setting.clock.search += max(0.0, taken - plain[-1])
        trial.took(taken)

    def following(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A context in which a step is made as this contender does."""
        setting, plans = self._setting, self.contenders.plans
        return following(name, plans, setting.model, setting.device, setting.formats[0])

    def _measure(self, recording: Recording, judge: Judge) -> None:
        setting = self._setting
        if not all(setting.ranks.all(judge.usable)):
            return
        journal = setting.journal
        measured = profile.measure(
            recording,
            ["fp32", *setting.formats],
            _EPOCHS * setting.clock.mean_epoch,
            lambda signature, times: journal.append("timed", signature=signature, seconds=times),
            {event["signature"]: event["seconds"] for event in journal.of("timed")},
        )
        self.profile = setting.ranks.of_first(measured)
        self.contenders = propose(
            recording,
            self.profile,
            self._convergence.screening,
            self._convergence.float32,
            judge,
            device=setting.device,
            memory_weight=self._memory_weight,
            worst=setting.worst,
        )
        self.trial = Trial(self.contenders.memory, self._memory_weight)
