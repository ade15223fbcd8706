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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.formats import FormatLike
from narrowgauge.operators import profile
from narrowgauge.operators.agreement import Ranks
from narrowgauge.operators.compute import PROMOTE, compute_of
from narrowgauge.operators.contenders import Contenders, following, propose
from narrowgauge.operators.names import unwrapped
from narrowgauge.operators.outcome import cost_of, evidence_of
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.replay import ReplayError, Shadow, StepTape
from narrowgauge.operators.screening import Screening, signal_from
from narrowgauge.operators.signals import Judge, Signal, gradient_errors, narrowest
from narrowgauge.operators.store import Store
from narrowgauge.operators.trial import Trial, diverged, seed_band

_WARM_UP = 5  # steps before the first is judged: the first gradients are unlike all others
_PER_STEP = 4  # sets that are judged on one step


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
        self._formats, self._simulated = _candidates(formats)
        for argument, value in (("memory_weight", memory_weight), ("overhead", overhead)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number from 0")
        for argument, value in (("gradient_bound", gradient_bound), ("wire_bound", wire_bound)):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{argument} is {value!r}; allowed: a number above 0, such as 0.1")
        self.model, self.optimizer = model, optimizer
        self._inner = unwrapped(model)
        self._memory_weight, self._bound, self._band = memory_weight, gradient_bound, seed_band
        self._wire_formats, self._wire_bound = tuple(gradient_formats), wire_bound
        self._overhead_allowed = overhead
        self._ranks = Ranks(model)
        self.epoch, self.stage = 0, "screen"
        self._steps, self._in_step = 0, False  # of this epoch
        self._recording: Recording | None = None
        self._screening: Screening | None = None
        self._float32 = OperatorPlan({})
        self._wire_errors: dict[str, dict[str, float]] = {}
        self._shadow: Shadow | None = None
        self._losses: tuple[list[float], list[float]] = ([], [])
        self._skipped, self._failure = 0, ""
        self._contenders: Contenders | None = None
        self._profile = profile.Profile()
        self._trial: Trial | None = None
        self._decision = ""
        self._plan: OperatorPlan | None = None
        self._search_seconds = 0.0
        self._training_seconds = 0.0  # of this epoch, without the search
        self._epoch_seconds: list[float] = []
        self._store = Store(
            workdir,
            self._ranks,
            {
                "formats": self._formats,
                "memory_weight": memory_weight,
                "gradient_bound": gradient_bound,
                "parameters": [list(p.shape) for p in self._inner.parameters()],
            },
        )
        self._journal = self._store.journal
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
        self._steps += 1
        before = self._search_seconds
        begin = time.perf_counter()
        try:
            run = {"screen": self._screen, "check": self._check, "time": self._try}
            with run.get(self.stage, self._apply)():
                yield
        finally:
            self._in_step = False
            taken = time.perf_counter() - begin
            self._training_seconds += taken - (self._search_seconds - before)

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
        elif self.stage == "screen" and self._screening is not None and self._screening.over:
            self._after_screening()
        self._epoch_seconds.append(self._training_seconds)
        self._training_seconds, self._steps = 0.0, 0
        self.epoch += 1
        if not self.finished:
            self._store.save_snapshot(self._inner, self.optimizer, self.epoch)
        self._journal.append(
            "epoch",
            number=self.epoch,
            evaluation=value,
            seconds=self._epoch_seconds[-1],
            search_seconds=self._search_seconds,
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
        if not self._wire_errors:
            raise RuntimeError(
                "no gradients were judged: pass gradient_formats=, such as ('e3m0', 'e5m2', "
                "'bf16'), and train until search.stage is 'check'"
            )
        return narrowest(self._wire_errors, self._wire_formats, self._wire_bound)

    # --- stage 1: steps --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _screen(self) -> Iterator[None]:
        recording = (
            None if self._recording is not None else Recording(training=self._inner.training)
        )
        plan = OperatorPlan({})
        screening = self._screening
        if recording is None and (self._steps <= _WARM_UP or (screening and screening.over)):
            yield
            return
        with plan.applied(self.model, mismatch="ignore", recording=recording) as applied:

            def judge(tape: StepTape) -> None:
                with self._overhead():
                    if recording is not None:
                        applied._mode.recording = None
                        recording.finish()
                        self._recorded(recording)
                    else:
                        self._judge(Judge(tape, applied, self._float32, self._formats))

            tape = StepTape(self.model, self.optimizer, judge)
            with tape:
                yield
        _check_backward(tape)

    def _judge(self, judge: Judge) -> None:
        assert self._screening is not None
        if not all(self._ranks.all(judge.usable)):
            return
        self._judge_wires(judge)
        for _ in range(_PER_STEP):
            if self._screening.over:
                break
            chosen = self._screening.next()
            signal = self._worst(judge.signal(chosen))
            self._journal.append("judged", operators=chosen, **signal.as_dict())
            self._screening.judged(signal)

    def _judge_wires(self, judge: Judge) -> None:
        if not self._wire_formats:
            return
        named = [(n, p) for n, p in self._inner.named_parameters() if p.requires_grad]
        gradients = {
            n: g for (n, _), g in zip(named, judge.gradients, strict=True) if g is not None
        }
        everybodys = self._ranks.all(gradient_errors(gradients, self._wire_formats))
        for errors in everybodys:
            for name, by_format in errors.items():
                worst = self._wire_errors.setdefault(name, {})
                for format, error in by_format.items():
                    worst[format] = max(error, worst.get(format, 0.0))
        self._journal.append("wires", errors=self._wire_errors)

    def _worst(self, signal: Signal) -> Signal:
        worst, *others = self._ranks.all(signal)
        for other in others:
            worst = worst.worst(other)
        result: Signal = worst
        return result

    def _recorded(self, recording: Recording) -> None:
        self._recording = recording
        self._float32 = OperatorPlan(
            {call.name: "promote" if call.in_place else "fp32" for call in recording},
            default="fp32",
            signatures={call.name: call.signature for call in recording},
            outside=[call.name for call in recording if not call.inside],
            training=recording.training,
        )
        self._screening = Screening(
            recording, self._formats, simulated=self._simulated, bound=self._bound
        )
        known = self._journal.last("operators")
        if known is None:
            self._journal.append("operators", fingerprint=self._float32.fingerprint)
        elif known["fingerprint"] != self._float32.fingerprint:
            raise ValueError(
                f"{self._store.folder} holds the search of a model with other operators; name another "
                "workdir"
            )
        for event in self._journal:
            if event["event"] == "judged" and event["operators"] == self._screening.next():
                self._screening.judged(signal_from(event))
            if event["event"] == "check" and not event["passed"]:
                self._screening.give_up_worst(event["reason"])

    # --- stage 1: an epoch beside float32 --------------------------------------------------------

    def _after_screening(self) -> None:
        assert self._screening is not None
        survivors = self._screening.survivors()
        self._journal.append("screened", survivors=survivors)
        if survivors:
            self._begin_check()
        else:
            self._decide("fp32", "every operator was found harmful in every format")

    def _begin_check(self) -> None:
        self.stage = "check"
        self._losses, self._skipped, self._failure = ([], []), 0, ""
        self._shadow = Shadow(self.model, self.optimizer)

    @contextlib.contextmanager
    def _check(self) -> Iterator[None]:
        if self._failure:  # the shadow has taken over
            yield
            return
        if self._recording is None or self._shadow is None:  # resumed
            with self._screen():
                yield
            self._begin_check()
            return
        assert self._screening is not None
        plan = self._float32.with_formats(self._screening.survivors())
        tape = StepTape(self.model, self.optimizer)
        with plan.applied(self.model, mismatch="ignore"), tape:
            yield
        _check_backward(tape)
        with self._overhead():
            with self._shadow.in_place():
                exact = tape.step_again()
            low, losses = self._losses
            low.append(tape.loss)
            losses.append(exact)
            self._skipped += tape.skipped
            reason = diverged(low, losses, self._skipped)
            if self._ranks.count > 1 and len(low) % 10:
                reason = None  # ranks compare every ten steps
            reasons = [r for r in self._ranks.all(reason) if r] if not len(low) % 10 else [reason]
            if reasons and reasons[0]:
                self._failure = str(reasons[0])
                self._shadow.exchange()

    def _end_check(self, value: float, evaluate: Callable[[], float]) -> float:
        assert self._screening is not None
        if self._shadow is None:
            return value
        low, exact, band, how = value, value, 0.0, ""
        if not self._failure:
            with self._overhead(), self._shadow.in_place():
                exact = float(evaluate())
            band, how = seed_band(*self._losses, exact, self._band)
            low, exact, band = self._ranks.of_first((value, exact, band))
            if not low <= exact + band:
                self._failure = f"the evaluation was {low:.4g}, float32's {exact:.4g}, band {how}"
                self._shadow.exchange()
                value = exact
        self._shadow = None
        self._journal.append(
            "check",
            passed=not self._failure,
            reason=f"an epoch with it failed: {self._failure}" if self._failure else how,
            evaluation=low,
            float32=exact,
            band=band,
            steps=len(self._losses[0]),
        )
        if not self._failure:
            self.stage = "time"
            if self._simulated:
                self._contenders = Contenders(
                    {"plan": self._float32.with_formats(self._screening.survivors())}
                )
                self._decide("plan", "simulated formats are not timed; all that is harmless is low")
            return value
        survivors = self._screening.survivors()
        self._screening.give_up_worst(f"an epoch with it failed: {self._failure}")
        spent = self._ranks.of_first(self._search_seconds / max(self._mean_epoch(), 1e-9))
        if len(survivors) == 1 or spent + 1 > self._overhead_allowed + 0.5:
            self._decide("fp32", f"training in low precision failed: {self._failure}")
        else:
            self.stage = "screen"  # what is left is confirmed together, then trained
        return value

    # --- stage 2 ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _try(self) -> Iterator[None]:
        if self._recording is None:  # resumed
            with self._screen():
                yield
            return
        if self._trial is None or self._contenders is None:
            with self._measuring():
                yield
            return
        name = self._trial.next
        begin = time.perf_counter()
        with self._following(name):
            yield
        taken = max(self._ranks.all(time.perf_counter() - begin))
        plain = self._trial.times["fp32"]
        if plain and name != "fp32":
            self._search_seconds += max(0.0, taken - plain[-1])
        self._trial.took(taken)
        if self._trial.over:
            self._decide(*self._trial.winner())

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        recording = Recording(keep_arguments=True, training=self._inner.training)
        plan = OperatorPlan({})
        with plan.applied(self.model, mismatch="ignore", recording=recording) as applied:

            def measure(tape: StepTape) -> None:
                with self._overhead():
                    applied._mode.recording = None
                    recording.finish()
                    self._measure(recording, Judge(tape, applied, self._float32))

            tape = StepTape(self.model, self.optimizer, measure)
            with tape:
                yield
        _check_backward(tape)

    def _measure(self, recording: Recording, judge: Judge) -> None:
        assert self._screening is not None
        if not all(self._ranks.all(judge.usable)):
            return
        measured = profile.measure(
            recording,
            ["fp32", *self._formats],
            0.25 * self._mean_epoch(),
            lambda signature, times: self._journal.append(
                "timed", signature=signature, seconds=times
            ),
            {event["signature"]: event["seconds"] for event in self._journal.of("timed")},
        )
        self._profile = self._ranks.of_first(measured)
        self._contenders = propose(
            recording,
            self._profile,
            self._screening,
            self._float32,
            judge,
            device=self._device,
            memory_weight=self._memory_weight,
            worst=self._worst,
        )
        self._trial = Trial(self._contenders.memory, self._memory_weight)

    # --- the end ---------------------------------------------------------------------------------

    def _decide(self, winner: str, reason: str) -> None:
        recording, screening, contenders = self._recording, self._screening, self._contenders
        assert recording is not None
        assert screening is not None
        plan = self._float32 if winner == "fp32" else contenders.plans[winner]  # type: ignore[union-attr]
        self._decision = winner.partition(",")[0]
        checks = [{k: v for k, v in e.items() if k != "event"} for e in self._journal.of("check")]
        about = {
            "decision": self._decision,
            "reason": reason,
            "formats": self._formats,
            "memory_weight": self._memory_weight,
            "contenders": self._trial.as_dict() if self._trial else {},
            "not_tried": contenders.refused if contenders else {},
            "checks": checks,
            "cost": cost_of(
                self._search_seconds,
                self._mean_epoch(),
                len(self._float32),
                len(self._formats),
                len(checks),
            ),
            "saved_bytes": {
                "fp32": profile.saved_bytes(recording, {}),
                "plan": profile.saved_bytes(recording, plan.formats),
            },
        }
        evidence = evidence_of(recording, screening, self._profile, plan.formats, self._decision)
        self._plan = self._ranks.of_first(plan.with_evidence(evidence, about))
        self.stage = "done"
        self._store.save_plan(self._plan)
        self._journal.append("decided", decision=self._decision, reason=reason)
        self._shadow = self._trial = None

    @contextlib.contextmanager
    def _apply(self) -> Iterator[None]:
        with self._following(self._decision):
            yield

    def _following(self, name: str) -> contextlib.AbstractContextManager[Any]:
        plans = self._contenders.plans if self._contenders and not self._plan else {}
        if self._plan is not None:
            plans = {name: self._plan}
        return following(name, plans, self.model, self._device, self._formats[0])

    @property
    def _device(self) -> str:
        return next(self._inner.parameters()).device.type

    @contextlib.contextmanager
    def _overhead(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._search_seconds += time.perf_counter() - begin

    def _mean_epoch(self) -> float:
        done = self._epoch_seconds
        return sum(done) / len(done) if done else self._training_seconds

    def _resume(self) -> None:
        for event in self._journal:
            if event["event"] == "wires":
                self._wire_errors = event["errors"]
            elif event["event"] == "screened":
                self.stage = "check"
            elif event["event"] == "check":
                self.stage = "time" if event["passed"] else "screen"
            elif event["event"] == "decided":
                self.stage, self._decision = "done", event["decision"]
            elif event["event"] == "epoch":
                self.epoch = event["number"]
                self._epoch_seconds.append(event["seconds"])
                self._search_seconds = event["search_seconds"]
        if self.stage == "done":
            self._plan = self._store.load_plan()
        elif self._journal.last("operators") is not None:
            self.epoch = self._store.load_snapshot(self._inner, self.optimizer)


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


def _check_backward(tape: StepTape) -> None:
    if not tape.reached_backward:
        raise ReplayError(
            "the step ended without loss.backward(); it must be called within search.step()"
        )
