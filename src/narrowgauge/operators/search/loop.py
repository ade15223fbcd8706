"""OperatorSearch: finds the precision plan of a model while it trains, in the user's own loop.

Operators are judged on real steps, in float32; what is harmless is timed, the cheapest formats are
solved for, and the best plans take turns with float32 and torch.autocast; the winner trains an
epoch beside a float32 shadow on the same batches. Every step of the search trains the model; if the
winner fails, the shadow, which did not, goes on. Timing comes before that epoch, as formats that
are slow here need no proof that they converge. The trade-off: up to two epochs of time, for a plan
that holds on this model and this machine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.collectives.reduce import wire_format
from narrowgauge.formats import FormatLike
from narrowgauge.operators.compute import PROMOTE, compute_of
from narrowgauge.operators.names import unwrapped
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.search.check import Check, Outcome
from narrowgauge.operators.search.contenders import (
    following,
    proposed_step,
    trial_step,
)
from narrowgauge.operators.search.evidence import about, cost_of, evidence_of, progress
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.judging import WARM_UP, judged_step, recorded_step
from narrowgauge.operators.search.setting import Ranks, Setting
from narrowgauge.operators.search.workdir import Workdir
from narrowgauge.operators.signals import narrowest


class OperatorSearch:
    """A search that lives in a training loop.

    ::

        search = OperatorSearch(model, optimizer, formats=["bf16"], workdir="search")
        for epoch in range(search.epoch, epochs):
            for x, y in loader:
                with search.step((x, y)):
                    loss = loss_fn(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            search.end_epoch(evaluate)
        search.plan.save("plan.json")

    It takes an epoch if float32 wins, two if another does, more if that fails; afterwards ``step``
    only applies the plan. Interrupted, the same lines go on: findings are read from ``workdir``,
    and model and optimizer are put back to the end of the last epoch. Under DistributedDataParallel
    every rank runs the same lines, and rank 0 reads and writes.

    Args:
        model: the model as it is called in the loop, not compiled; compile it with the plan.
        optimizer: of its parameters.
        formats: candidates besides float32, the preferred first: native (``"bf16"``, ``"fp16"``,
            which wants a GradScaler in the loop), or simulated ones (``"e4m3/e5m2"``) for hardware
            that is not there, which are not timed; not both.
        memory_weight: what saved activations are worth: the objective is (time / time₃₂) +
            ``memory_weight`` · (saved bytes / bytes₃₂).
        workdir: folder of ``journal.jsonl``, ``snapshot.pt`` and ``plan.json``; made if missing.
        gradient_bound: largest relative error of the gradient that an operator alone may cause.
        seed_band: by how much, as a share, the evaluation may differ between seeds in float32;
            ``None``: 2 %, or more if losses of the same steps scatter more.
        gradient_formats: formats for gradients on the wire, to choose from per parameter; see
            :attr:`gradient_policy`.
        wire_bound: largest relative error of a parameter's gradient on the wire.
        overhead: epochs of time that the search may take beyond the training: another plan is tried
            for an epoch only if that is within it.
        stateful: what else goes into the snapshot, by its ``state_dict``: a scheduler, a
            GradScaler, further optimizers that make their step in the loop.

    Attributes:
        epoch: epochs that are over; where a loop begins.

    Raises:
        TypeError: ``model`` or ``optimizer`` is none; ``workdir`` is no path.
        ValueError: nothing to train; no or unknown formats, native and simulated ones mixed, a
            negative weight or bound, a ``workdir`` of another search.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        formats: Sequence[FormatLike] = ("bf16",),
        *,
        memory_weight: float = 0.0,
        workdir: str | Path = "search",
        gradient_bound: float = 0.1,
        seed_band: float | None = None,
        gradient_formats: Sequence[FormatLike] = (),
        wire_bound: float = 0.1,
        overhead: float = 2.0,
        stateful: Sequence[Any] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
            )
        if hasattr(model, "_orig_mod"):
            raise TypeError("model is compiled; search on the model itself, compile with the plan")
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"module {path!r} is in TorchScript, whose operators cannot be seen; search on "
                    "the module that it was made from"
                )
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f"model, a {type(model).__name__}, has no parameter that requires a gradient, so "
                "there is no gradient to judge formats by"
            )
        names, simulated = _candidates(formats)
        for argument, value in (("memory_weight", memory_weight), ("overhead", overhead)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number from 0")
        for argument, value in (("gradient_bound", gradient_bound), ("wire_bound", wire_bound)):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number above 0, such as 0.1")
        if seed_band is not None and not (
            isinstance(seed_band, (int, float)) and 0 <= seed_band < math.inf
        ):
            raise ValueError(f"seed_band is {seed_band!r}; allowed: a number from 0, None")
        if isinstance(gradient_formats, str) or not isinstance(gradient_formats, Sequence):
            raise ValueError(
                f"gradient_formats is {gradient_formats!r}; pass a list, such as ['bf16']"
            )
        if not isinstance(stateful, Sequence) or not all(
            hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in stateful
        ):
            raise TypeError(
                f"stateful is {stateful!r}; pass a list of what has a state_dict, such as "
                "[scheduler, scaler]"
            )
        self._wire_formats = [wire_format(format).name for format in gradient_formats]
        self._wire_bound, self._seed_band, self._overhead = wire_bound, seed_band, overhead
        optimizers = [optimizer, *(x for x in stateful if isinstance(x, torch.optim.Optimizer))]
        self._optimizer = optimizer
        ranks = Ranks(model)
        self._workdir = Workdir(
            workdir,
            ranks,
            {
                "formats": names,
                "memory_weight": memory_weight,
                "gradient_bound": gradient_bound,
                "gradient_formats": self._wire_formats,
                "parameters": {
                    name: list(p.shape) for name, p in unwrapped(model).named_parameters()
                },
            },
            stateful,
        )
        self._setting = Setting(
            model, optimizers, names, simulated, gradient_bound, memory_weight, ranks
        )
        self._clock = self._setting.clock
        self._findings = Findings(self._setting, self._workdir.journal)
        self._check: Check | None = None
        self._plan: OperatorPlan | None = None
        self._in_step = False
        self._steps = 0  # of this epoch
        self.epoch = self._workdir.load_snapshot(self._setting.inner, optimizer)
        for event in self._workdir.journal.of("epoch"):
            self._clock.epochs.append(event["seconds"])
            self._clock.steps = event["steps"]
            self._clock.search = event["search_seconds"]
        if self.finished:
            self._plan = self._workdir.load_plan()

    # --- the user's loop -------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, batch: object = None) -> Iterator[None]:
        """One training step: forward, loss, ``backward``, ``optimizer.step``.

        What lies between two ``step`` blocks is the loop's own. Losses must be computed from the
        model's outputs within the block by torch functions, or inside the model.

        Args:
            batch: what the step trains on; it is held until the step is over, as the step may be
                made again. It must not be overwritten meanwhile.

        Raises:
            RuntimeError: within another step; or under ``torch.autocast``, whose choice this is.
            ReplayError: the step called no ``backward``, or cannot be made again.
        """
        if self._in_step:
            raise RuntimeError("search.step() was entered within search.step(); leave it first")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise RuntimeError(
                "search.step() was entered under torch.autocast; leave autocast out of the loop, "
                "the search tries it by itself"
            )
        self._in_step = True
        try:
            with self._clock.step(), self._step():
                yield
        finally:
            self._in_step = False
        self._steps += 1
        findings = self._findings
        if self._check is not None and self._check.failure is not None:
            self._checked(self._check.failure)
        elif self.stage == "check" and findings.known and findings.winner == "fp32":
            self._decide()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        setting, findings, stage = self._setting, self._findings, self.stage
        with contextlib.ExitStack() as stack:
            if stage == "done":
                stack.enter_context(following(setting, self.decision, self.plan))
            elif not findings.known:  # new, or resumed
                stack.enter_context(recorded_step(setting, findings))
                self._steps -= stage == "check"  # which begins with the epoch
            elif stage == "screen" and self._steps >= WARM_UP:
                stack.enter_context(judged_step(setting, findings, self._wire_formats))
            elif stage == "time" and findings.trial is None:
                stack.enter_context(proposed_step(setting, findings))
            elif stage == "time":
                stack.enter_context(trial_step(setting, findings))
            elif stage == "check":
                if self._steps == 0:
                    self._check = Check(setting, findings, self._seed_band)
                if self._check is not None:
                    stack.enter_context(self._check.step())
            yield
        self._after(stage)

    def _after(self, stage: str) -> None:
        """What follows from a step without another."""
        findings = self._findings
        if not findings.known or self.stage != "time" or findings.trial is not None:
            return
        survivors = findings.screening.survivors()
        if not survivors:
            findings.note(
                "tried",
                winner="fp32",
                reason="each operator is harmful in every format, or too slow for any plan",
            )
        elif self._setting.simulated:
            findings.note(
                "contenders", formats={"fp32": {}, "plan": survivors}, saved_bytes={}, refused={}
            )
            findings.note(
                "tried",
                winner="plan",
                reason="simulated formats are not timed: all that is harmless is narrow",
            )

    def end_epoch(self, evaluate: Callable[[], float]) -> float:
        """Take the decisions that an epoch allows; write the snapshot.

        Args:
            evaluate: the loss on other data, of the model as it is, in float32; the lower the
                better. At the end of the epoch beside the shadow it is called for both. Under DDP
                ranks may give different values, whose mean counts.

        Returns:
            What it gave for the model that goes on.

        Raises:
            RuntimeError: within a step.
            TypeError: it gave no number.
        """
        if self._in_step:
            raise RuntimeError(
                "search.end_epoch() was called within search.step(); leave the block first"
            )

        def evaluation() -> float:
            values: list[float] = self._setting.ranks.together(lambda: _number(evaluate()))
            return sum(values) / len(values)

        check = self._check
        if check is None:
            value = evaluation()
            self._clock.end_epoch()
        else:
            outcome, value = check.end(evaluation)
            self._clock.end_epoch()
            self._checked(outcome)
        self.epoch += 1
        self._steps = 0
        if self._plan is not None and self.plan.about["cost"]["epochs"] is None:
            cost = cost_of(self._setting, len(self.plan))
            plan = self.plan.with_evidence({}, {"cost": cost})
            self._plan = self._setting.ranks.of_first(lambda: plan)
            self._workdir.save_plan(self.plan)
        self._workdir.save_snapshot(self._setting.inner, self._optimizer, self.epoch)
        self._workdir.journal.append(
            "epoch",
            number=self.epoch,
            evaluation=value,
            seconds=self._clock.epochs[-1],
            steps=self._clock.steps,
            search_seconds=self._clock.search,
        )
        return value

    def _checked(self, outcome: Outcome) -> None:
        """A winner's epoch is over, or has failed."""
        self._check = None
        self._findings.note("check", **asdict(outcome))
        spent = self._clock.search > (self._overhead - 1) * self._clock.mean_epoch
        if not outcome.passed and self._setting.ranks.all(spent)[0]:
            self._findings.note(
                "tried", winner="fp32", reason=f"an epoch of another failed: {outcome.reason}"
            )
        if self.stage == "check":
            self._decide()

    # --- what it found ---------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """``"screen"``, ``"time"``, ``"check"`` or ``"done"``."""
        return self._findings.stage

    @property
    def finished(self) -> bool:
        """Whether the plan is found."""
        return self.stage == "done"

    @property
    def progress(self) -> str:
        """Where the search stands, in a few words."""
        return progress(self._findings)

    @property
    def plan(self) -> OperatorPlan:
        """The plan that was found, with the evidence for each operator.

        Raises:
            RuntimeError: the search is not over.
        """
        if self._plan is None:
            raise RuntimeError(
                f"the search is not over after {self.epoch} epochs: {self.progress}. Train on, or "
                f"start again with workdir={str(self._workdir.folder)!r}: it goes on"
            )
        return self._plan

    @property
    def harmless(self) -> OperatorPlan:
        """All operators that were found harmless in their format, the others in float32.

        What is chosen from, judged on single steps and not for an epoch.

        Raises:
            RuntimeError: no step was made yet.
        """
        if not self._findings.known:
            raise RuntimeError("no step was made yet, so nothing is known of the operators")
        return self._findings.harmless()

    @property
    def decision(self) -> str:
        """What was taken: ``"plan"``, ``"all-low"``, ``"autocast"``, ``"fp32"``; ``""`` before."""
        decided = self._workdir.journal.of("decided")
        return str(decided[-1]["decision"]) if decided else ""

    @property
    def gradient_policy(self) -> dict[str, str]:
        """Formats for gradients on the wire, by parameter name.

        The narrowest of ``gradient_formats`` for which ``‖Q(g) − g‖ / ‖g‖`` stayed within
        ``wire_bound`` on all steps that were judged, fp32 if there is none;
        ``narrowgauge.gradients.compress(ddp_model, policy)`` takes it as it is.

        Raises:
            RuntimeError: no step was judged yet, or no ``gradient_formats`` were given.
        """
        if not self._findings.wire_errors:
            raise RuntimeError(
                "no gradients were judged: pass gradient_formats=, such as ('e3m0', 'e5m2', "
                "'bf16'), and train until search.stage is not 'screen'"
            )
        found = narrowest(self._findings.wire_errors, self._wire_formats, self._wire_bound)
        named = self._setting.inner.named_parameters()
        return {name: found.get(name, "fp32") for name, p in named if p.requires_grad}

    def _decide(self) -> None:
        """The search is over: the winner is the plan."""
        setting, findings = self._setting, self._findings
        decision = findings.winner.partition(",")[0]
        plan = findings.plan_of(findings.winner)
        known = about(findings, setting, plan.formats)
        known.update(decision=decision, reason=findings.reason)
        known["checks"] = [
            {key: value for key, value in check.items() if key not in ("event", "search_seconds")}
            for check in self._workdir.journal.of("check")
        ]
        if findings.wire_errors:
            known["gradient_policy"] = self.gradient_policy
        evidence = evidence_of(findings, plan.formats, decision)
        self._plan = setting.ranks.of_first(lambda: plan.with_evidence(evidence, known))
        self._workdir.save_plan(self.plan)
        findings.note("decided", decision=decision, reason=findings.reason)


def _number(value: object) -> float:
    """What an evaluation gave."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"evaluate() gave {type(value).__name__}, {str(value)[:40]!r}; it must give one "
            "number, the lower the better, such as a mean loss"
        ) from None


def _candidates(formats: Sequence[FormatLike]) -> tuple[list[str], bool]:
    """Names of the candidates, and whether they are simulated."""
    if isinstance(formats, str) or not isinstance(formats, Sequence) or not formats:
        raise ValueError(f"formats is {formats!r}; pass at least one in a list, such as ['bf16']")
    computes = [compute_of(format) for format in formats]
    for compute in computes:
        if compute.name in ("fp32", PROMOTE):
            raise ValueError(f"formats names {compute.name!r}, which is no narrow format")
    computes = list(dict.fromkeys(computes))
    if len({compute.simulated for compute in computes}) > 1:
        raise ValueError(
            f"formats is {[c.name for c in computes]}: native formats are timed, simulated ones "
            "cannot be; search for the ones or for the others"
        )
    return [compute.name for compute in computes], computes[0].simulated
