"""Everything that a search has found, as it follows from its journal.

Each finding is an event that is written first and taken in then, by the same lines as when an
interrupted search is read again. So a search that was interrupted knows what it knew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.search import costs
from narrowgauge.operators.search.screening import Screening
from narrowgauge.operators.search.setting import Setting
from narrowgauge.operators.search.trial import Trial
from narrowgauge.operators.search.workdir import Journal
from narrowgauge.operators.signals import Signal

_NEXT = {"screened": "time", "tried": "check", "decided": "done"}


def stage_after(stage: str, event: Mapping[str, Any]) -> str:
    """The stage of a search after an event: ``"screen"``, ``"time"``, ``"check"`` or ``"done"``."""
    if event["event"] == "check" and not event["passed"]:
        return "screen"
    return _NEXT.get(event["event"], stage)


@dataclass
class Contenders:
    """Who may be tried on whole steps.

    Args:
        formats: of operators that are not in float32, by contender, ``"fp32"`` first; what autocast
            would do is under ``"autocast"``.
        saved_bytes: of each.
        refused: who is not tried, and why.
    """

    formats: dict[str, dict[str, str]] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Findings:
    """What is known.

    Args:
        setting: the training.
        journal: where it is written.

    Attributes:
        stage: see :func:`stage_after`.
        known: whether the operators are; what follows needs that.
        recording: the operators.
        float32: the plan with all of them in float32.
        screening: which may take which format.
        wire_errors: largest error of a gradient by parameter and format.
        profile: what operators and casts cost.
        contenders: who may be tried.
        trial: their turns, once they began.
        last_trial: the one whose winner failed.
        winner: who was found best, ``""`` before.
        reason: why.
        before_trial: seconds that the search had taken when their turns began.
        failed: contenders that failed an epoch, and how.
    """

    recording: Recording
    float32: OperatorPlan
    screening: Screening

    def __init__(self, setting: Setting, journal: Journal) -> None:
        self._setting, self._journal = setting, journal
        self.known = False
        self.wire_errors: dict[str, dict[str, float]] = {}
        self.profile = costs.Profile()
        self.contenders = Contenders()
        self.trial: Trial | None = None
        self.last_trial: Trial | None = None
        self.winner, self.reason = "", ""
        self.before_trial = 0.0
        self.failed: dict[str, str] = {}
        self.stage = "screen"
        for event in journal:
            self.stage = stage_after(self.stage, event)
            if event["event"] == "wires":
                self.take(event)

    def note(self, event: str, **values: Any) -> None:
        """Write an event with the seconds that the search has taken, and take it in."""
        seconds = self._setting.clock.now
        self.take(self._journal.append(event, **values, search_seconds=seconds))

    def begin(self, recording: Recording) -> None:
        """The operators are known, and with them what the journal says of them.

        Raises:
            ValueError: the journal is about other operators.
        """
        setting = self._setting
        self.recording = recording
        self.float32 = OperatorPlan(
            {call.name: "promote" if call.in_place else "fp32" for call in recording},
            default="fp32",
            signatures={call.name: call.signature for call in recording},
            outside=[call.name for call in recording if not call.inside],
            training=recording.training,
        )
        self.screening = Screening(
            recording, setting.formats, simulated=setting.simulated, bound=setting.gradient_bound
        )
        self.known = True
        operators = self._journal.of("operators")
        if not operators:
            self.note("operators", fingerprint=self.float32.fingerprint)
        elif operators[0]["fingerprint"] != self.float32.fingerprint:
            raise ValueError(
                "workdir holds the search of a model with other operators; name another workdir, "
                "or remove it"
            )
        self.stage = "screen"
        for event in self._journal:
            self.take(event)

    def take(self, event: Mapping[str, Any]) -> None:
        """What follows from an event."""
        self.stage = stage_after(self.stage, event)
        take = getattr(self, f"_take_{event['event']}", None)
        if take is not None:
            take(event)

    def plan_of(self, contender: str) -> OperatorPlan:
        """The plan of a contender."""
        return self.float32.with_formats(self.contenders.formats.get(contender, {}))

    def harmless(self) -> OperatorPlan:
        """All operators that were found harmless in their format, the others in float32."""
        return self.float32.with_formats(self.screening.survivors())

    # --- events ----------------------------------------------------------------------------------

    def _take_judged(self, event: Mapping[str, Any]) -> None:
        if not self.screening.over and event["operators"] == self.screening.next():
            self.screening.judged(
                Signal(
                    float(event["gradient_error"]),
                    float(event["loss_change"]),
                    int(event["overflow"]),
                    int(event["underflow"]),
                )
            )

    def _take_wires(self, event: Mapping[str, Any]) -> None:
        self.wire_errors = event["errors"]

    def _take_timed(self, event: Mapping[str, Any]) -> None:
        self.profile.operators[event["signature"]] = event["seconds"]

    def _take_casts(self, event: Mapping[str, Any]) -> None:
        self.profile.casts = {
            (source, target): [(int(numel), seconds) for numel, seconds in points]
            for source, target, points in event["seconds"]
        }
        if not self._setting.memory_weight:
            slow = costs.never_cheapest(self.recording, self.profile, self._setting.formats)
            self.screening.leave_out(slow)

    def _take_contenders(self, event: Mapping[str, Any]) -> None:
        self.contenders = Contenders(event["formats"], event["saved_bytes"], event["refused"])
        self.before_trial = self._setting.clock.search
        self.trial = Trial(event["saved_bytes"], self._setting.memory_weight)

    def _take_round(self, event: Mapping[str, Any]) -> None:
        if self.trial is not None:
            self.trial.add(event["seconds"])

    def _take_tried(self, event: Mapping[str, Any]) -> None:
        self.winner, self.reason = event["winner"], event["reason"]

    def _take_check(self, event: Mapping[str, Any]) -> None:
        if event["passed"]:
            return
        suspects = self.contenders.formats[self.winner]
        if self.winner == "autocast":
            self.failed["autocast"], suspects = event["reason"], {}
        self.screening.begin_again(suspects, event["reason"])
        self.winner, self.reason = "", ""
        self.last_trial, self.trial = self.trial, None
