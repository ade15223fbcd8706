"""OperatorSearch: finds the precision plan of a model while it trains, in the user's own loop.

Stage 1 guards convergence: operators are judged on real steps, in float32, then all that were found
harmless train an epoch beside a float32 shadow on the same batches. Stage 2 measures operators and
casts, solves for the cheapest formats, and lets the best plans take turns with float32 and autocast.
Every step of the search trains the model; if a plan fails, the shadow, which did not, goes on. The
trade-off: about an epoch and a half of time, for a plan that holds on this model and this machine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from narrowgauge.formats import FormatLike
from narrowgauge.operators import profile
from narrowgauge.operators.agreement import Ranks
from narrowgauge.operators.compute import PROMOTE, compute_of
from narrowgauge.operators.contenders import Contenders, following
from narrowgauge.operators.convergence import Convergence
from narrowgauge.operators.names import unwrapped
from narrowgauge.operators.outcome import cost_of, evidence_of
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.setting import Setting
from narrowgauge.operators.signals import narrowest
from narrowgauge.operators.store import Store
from narrowgauge.operators.turns import Turns


class OperatorSearch:
    """A search that lives in a training loop::

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

    It takes three epochs or more; afterwards ``step`` only applies the plan. Interrupted, the same
    lines go on: findings are read from ``workdir``, and model and optimizer are put back to the end of
    the last epoch (while the search lasts; later, checkpoints are the loop's own business). Under
    DistributedDataParallel every rank runs the same lines, and rank 0 writes.

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
        overhead: epochs of time that the search may take beyond the training.

    Attributes:
        epoch: epochs that are over; where a loop begins.
        stage: ``"screen"``, ``"check"``, ``"time"`` or ``"done"``.

    Raises:
        TypeError: ``model`` or ``optimizer`` is none.
        ValueError: no or unknown formats, native and simulated ones mixed, a negative weight or
            bound, a ``workdir`` of another search.
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
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
            )
        if hasattr(model, "_orig_mod"):
            raise TypeError("model is compiled; search on the model itself, compile with the plan")
        names, simulated = _candidates(formats)
        for argument, value in (("memory_weight", memory_weight), ("overhead", overhead)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number from 0")
        for argument, value in (("gradient_bound", gradient_bound), ("wire_bound", wire_bound)):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number above 0, such as 0.1")
        self._wire_formats, self._wire_bound = tuple(gradient_formats), wire_bound
        self._memory_weight, self._overhead = memory_weight, overhead
        self.epoch, self.stage = 0, "screen"
        self._in_step = False
        self._decision = ""
        self._plan: OperatorPlan | None = None
        ranks = Ranks(model)
        self._store = Store(
            workdir,
            ranks,
            {
                "formats": names,
                "memory_weight": memory_weight,
                "gradient_bound": gradient_bound,
                "parameters": [list(p.shape) for p in unwrapped(model).parameters()],
            },
        )
        self._setting = Setting(
            model, optimizer, names, simulated, gradient_bound, ranks, self._store.journal
        )
        self._clock = self._setting.clock
        self._convergence = Convergence(self._setting, seed_band, self._wire_formats)
        self._turns = Turns(self._setting, self._convergence, memory_weight)
        self._resume()

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
        trial = self._turns.trial
        if self.stage == "time" and trial is not None and trial.over:
            self._decide(*trial.winner())

    def _step(self) -> contextlib.AbstractContextManager[None]:
        if self.finished:
            return self._apply()
        if not self._convergence.recorded:  # new, or resumed
            return self._convergence.record()
        if self.stage == "screen":
            return self._convergence.screen()
        return self._convergence.check() if self.stage == "check" else self._turns.step()

    def _apply(self) -> contextlib.AbstractContextManager[None]:
        setting, plans = self._setting, {self._decision: self.plan}
        return following(self._decision, plans, setting.model, setting.device, setting.formats[0])

    def end_epoch(self, evaluate: Callable[[], float]) -> float:
        """Take the decisions that an epoch allows; write the snapshot.

        Args:
            evaluate: the loss on other data, of the model as it is, in float32; the lower the
                better. At the end of the epoch beside the shadow it is called for both.

        Returns:
            What it gave for the model that goes on.
        """
        value = float(evaluate())
        if self.stage == "check":
            value = self._end_check(value, evaluate)
        elif self.stage == "screen" and self._convergence.recorded:
            self._end_screening()
        self._clock.end_epoch()
        self.epoch += 1
        setting = self._setting
        if not self.finished:
            self._store.save_snapshot(setting.inner, setting.optimizer, self.epoch)
        setting.journal.append(
            "epoch",
            number=self.epoch,
            evaluation=value,
            seconds=self._clock.epochs[-1],
            search_seconds=self._clock.search,
        )
        return value

    @property
    def finished(self) -> bool:
        """Whether the plan is found."""
        return self.stage == "done"

    @property
    def plan(self) -> OperatorPlan:
        """The plan that was found, with the evidence for each operator.

        Raises:
            RuntimeError: the search is not over.
        """
        if self._plan is None:
            needs = {
                "screen": "an epoch to judge operators, an epoch to train them, and steps to time "
                "plans",
                "check": "the rest of the epoch beside float32, and steps to time plans",
                "time": "some more steps to time plans",
            }[self.stage]
            raise RuntimeError(
                f"the search is not over after {self.epoch} epochs; it still needs {needs}. Train "
                f"on, or start again with workdir={str(self._store.folder)!r}: it goes on"
            )
        return self._plan

    @property
    def harmless(self) -> OperatorPlan:
        """All operators that were found harmless in their format, the others in float32.

        What stage 2 may choose from; and the plan for hardware on which narrow is always faster.

        Raises:
            RuntimeError: no step was made yet.
        """
        if not self._convergence.recorded:
            raise RuntimeError("no step was made yet, so nothing is known of the operators")
        return self._convergence.harmless()

    @property
    def decision(self) -> str:
        """What was taken: ``"plan"``, ``"all-low"``, ``"autocast"``, ``"fp32"`` or ``""``."""
        return self._decision

    @property
    def gradient_policy(self) -> dict[str, str]:
        """Formats for gradients on the wire, by parameter name.

        The narrowest of ``gradient_formats`` for which ``‖Q(g) − g‖ / ‖g‖`` stayed within
        ``wire_bound`` on all steps that were judged; ``narrowgauge.gradients.compress(ddp_model,
        policy)`` takes it as it is.

        Raises:
            RuntimeError: no step was judged yet, or no ``gradient_formats`` were given.
        """
        if not self._convergence.wire_errors:
            raise RuntimeError(
                "no gradients were judged: pass gradient_formats=, such as ('e3m0', 'e5m2', "
                "'bf16'), and train until search.stage is 'check'"
            )
        return narrowest(self._convergence.wire_errors, self._wire_formats, self._wire_bound)

    # --- decisions -------------------------------------------------------------------------------

    def _end_screening(self) -> None:
        screening = self._convergence.screening
        if not screening.over:
            return
        survivors = screening.survivors()
        self._setting.journal.append("screened", survivors=survivors)
        if survivors:
            self.stage = "check"
            self._convergence.begin_check()
        else:
            self._decide("fp32", "every operator was found harmful in every format")

    def _end_check(self, value: float, evaluate: Callable[[], float]) -> float:
        tried = self._convergence.screening.survivors()
        passed, value = self._convergence.end_check(value, evaluate)
        if passed and self._setting.simulated:
            self._turns.contenders = Contenders({"plan": self._convergence.harmless()})
            self._decide("plan", "simulated formats are not timed; all that is harmless is low")
        elif passed:
            self.stage = "time"
        else:
            spent = self._clock.search / max(self._clock.mean_epoch, 1e-9)
            if len(tried) == 1 or self._setting.ranks.of_first(spent) > self._overhead - 0.5:
                self._decide("fp32", "training in low precision left float32's band")
            else:
                self.stage = "screen"  # what is left is confirmed together, then trained
        return value

    def _decide(self, winner: str, reason: str) -> None:
        setting, found, turns = self._setting, self._convergence, self._turns
        plan = found.float32 if winner == "fp32" else turns.contenders.plans[winner]
        self._decision = winner.partition(",")[0]
        checks = setting.journal.of("check")
        cost = cost_of(
            self._clock.search,
            self._clock.mean_epoch,
            len(found.float32),
            len(setting.formats),
            len(checks),
        )
        about = {
            "decision": self._decision,
            "reason": reason,
            "formats": list(setting.formats),
            "memory_weight": self._memory_weight,
            "contenders": turns.trial.as_dict() if turns.trial else {},
            "not_tried": turns.contenders.refused,
            "checks": [{k: v for k, v in check.items() if k != "event"} for check in checks],
            "cost": cost,
            "saved_bytes": {
                "fp32": profile.saved_bytes(found.recording, {}),
                "plan": profile.saved_bytes(found.recording, plan.formats),
            },
        }
        evidence = evidence_of(
            found.recording, found.screening, turns.profile, plan.formats, self._decision
        )
        self._plan = setting.ranks.of_first(plan.with_evidence(evidence, about))
        self._store.save_plan(self.plan)
        setting.journal.append("decided", decision=self._decision, reason=reason)
        self.stage = "done"

    def _resume(self) -> None:
        setting = self._setting
        for event in setting.journal:
            if event["event"] == "wires":
                self._convergence.wire_errors = event["errors"]
            elif event["event"] == "screened":
                self.stage = "check"
            elif event["event"] == "check":
                self.stage = "time" if event["passed"] else "screen"
            elif event["event"] == "decided":
                self.stage, self._decision = "done", event["decision"]
            elif event["event"] == "epoch":
                self.epoch = event["number"]
                self._clock.epochs.append(event["seconds"])
                self._clock.search = event["search_seconds"]
        if self.stage == "done":
            self._plan = self._store.load_plan()
        elif setting.journal.last("operators") is not None:
            self.epoch = self._store.load_snapshot(setting.inner, setting.optimizer)


def _candidates(formats: Sequence[FormatLike]) -> tuple[list[str], bool]:
    """Names of the candidates, and whether they are simulated."""
    if isinstance(formats, str) or not isinstance(formats, Sequence) or not formats:
        raise ValueError(f"formats is {formats!r}; pass at least one in a list, such as ['bf16']")
    computes = [compute_of(format) for format in formats]
    for compute in computes:
        if compute.name in ("fp32", PROMOTE):
            raise ValueError(f"formats names {compute.name!r}, which is no narrow format")
    if len({compute.simulated for compute in computes}) > 1:
        raise ValueError(
            f"formats is {[c.name for c in computes]}: native formats are timed, simulated ones "
            "cannot be; search for the ones or for the others"
        )
    return [compute.name for compute in computes], computes[0].simulated
