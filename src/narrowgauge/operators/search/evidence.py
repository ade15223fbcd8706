"""What a search writes into the plan it found: why each operator has its format; what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from narrowgauge.operators.search.costs import saved_bytes
from narrowgauge.operators.search.findings import Findings
from narrowgauge.operators.search.setting import Setting


def progress(findings: Findings) -> str:
    """Where a search stands, in a few words."""
    stage, trial = findings.stage, findings.trial
    if stage == "done":
        return "the plan is found"
    if stage == "check":
        return f"{findings.winner or 'the winner'} trains an epoch beside float32"
    if stage == "time" and trial is not None:
        return f"contenders take turns, round {trial.rounds + 1} of at most {trial.most}"
    if stage == "time":
        return "operators are timed"
    if not findings.known:
        return "operators are judged"
    judged, sets = findings.screening.judged_sets, findings.screening.sets
    return f"operators are judged, {judged} of about {sets} sets"


def evidence_of(findings: Findings, formats: Mapping[str, str], decision: str) -> dict[str, Any]:
    """Evidence by operator name, as JSON.

    Each has ``seconds`` (by format, forward and backward, alone), ``signals`` and ``excluded`` (by
    format), ``casts`` (seconds of casting all that it hands on, there and back), and ``reason``.

    Args:
        findings: what was found.
        formats: the plan's.
        decision: what was taken: a plan, autocast, float32.
    """
    recording, measured = findings.recording, findings.profile
    handed_on: dict[str, int] = {}
    for edge in recording.edges:
        handed_on[edge.producer] = handed_on.get(edge.producer, 0) + edge.numel
    evidence: dict[str, Any] = {}
    for call in recording:
        known = findings.screening.evidence(call.name)
        seconds = measured.operators.get(call.signature, {})
        casts = {
            f"{source} → {target}": measured.cast(source, target, handed_on.get(call.name, 0))
            for source, target in measured.casts
        }
        evidence[call.name] = {
            **known,
            "seconds": dict(seconds),
            "casts": casts,
            "reason": _reason(formats[call.name], seconds, known, decision),
        }
    return evidence


def about(findings: Findings, setting: Setting, formats: Mapping[str, str]) -> dict[str, Any]:
    """On the plan as a whole, as JSON; see the documentation of the search.

    Args:
        findings: what was found.
        setting: the training.
        formats: the plan's.
    """
    recording, contenders = findings.recording, findings.contenders
    trial = findings.trial or findings.last_trial
    places = {call.name: place for place, call in enumerate(recording)}
    edges = sorted({(places[e.producer], places[e.consumer], e.numel) for e in recording.edges})
    return {
        "formats": list(setting.formats),
        "memory_weight": setting.memory_weight,
        "contenders": trial.as_dict() if trial else {},
        "not_tried": contenders.refused,
        "saved_bytes": {
            "fp32": contenders.saved_bytes.get("fp32") or saved_bytes(recording, {}),
            "plan": contenders.saved_bytes.get(findings.winner) or saved_bytes(recording, formats),
        },
        "edges": [list(edge) for edge in edges],
        "casts": {
            f"{source} → {target}": [list(point) for point in points]
            for (source, target), points in findings.profile.casts.items()
        },
        "cost": cost_of(setting, len(recording)),
    }


def _reason(
    format: str, seconds: Mapping[str, float], known: Mapping[str, Any], decision: str
) -> str:
    """Why an operator has its format."""
    harm = "; ".join(f"{f}: {text}" for f, text in known["excluded"].items())
    times = ", ".join(f"{f} {s * 1e3:.3g} ms" for f, s in seconds.items())
    alone = f" (alone: {times})" if times else ""
    if decision in ("fp32", "autocast"):
        return f"{decision} was taken as a whole{alone}" + (f"; {harm}" if harm else "")
    if format == "promote":
        return "it writes into its input, and has that tensor's format"
    if format == "fp32":
        if harm:
            return harm
        if not known["signals"]:
            return "it was not judged"
        return f"narrow formats are harmless here, but gain nothing with their casts{alone}"
    error = known["signals"].get(format, {}).get("gradient_error", math.nan)
    text = f"harmless: alone it turns the gradient by {error:.2g} of its length"
    return text + (f"; cheapest with its neighbours{alone}" if times else "")


def cost_of(setting: Setting, operators: int) -> dict[str, Any]:
    """What the search cost beyond the training, and what trying one by one would.

    That is an epoch of training with each operator alone in each format, in float32's time. Before
    the end of the first epoch, what is counted in epochs is ``None``.

    Args:
        setting: the training.
        operators: of the model.
    """
    clock, one_by_one = setting.clock, operators * len(setting.formats)
    epoch = clock.mean_epoch if clock.epochs else None  # only a whole one counts
    return {
        "seconds": clock.search,
        "step_seconds": clock.mean_step,
        "steps": clock.search / max(clock.mean_step, 1e-9),
        "epoch_seconds": epoch,
        "epochs": clock.search / epoch if epoch else None,
        "one_by_one_epochs": one_by_one,
        "one_by_one_seconds": one_by_one * epoch if epoch else None,
    }
