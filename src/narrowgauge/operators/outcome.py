"""What a search writes into the plan it found: why each operator has its format, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from narrowgauge.operators import profile
from narrowgauge.operators.recording import Recording
from narrowgauge.operators.screening import Screening

_NOT_NARROW = ("fp32", "promote")


def evidence_of(
    recording: Recording,
    screening: Screening,
    measured: profile.Profile,
    formats: Mapping[str, str],
    decision: str,
) -> dict[str, Any]:
    """Evidence by operator name, as JSON.

    Each has ``seconds`` (by format, forward and backward, alone), ``signals`` and ``excluded`` (by
    format), ``casts`` (seconds of casting all that it hands on), and ``reason``, a sentence.

    Args:
        recording: the operators.
        screening: what was found about them.
        measured: what they cost.
        formats: the plan's.
        decision: what was taken: a plan, autocast, float32.
    """
    handed_on: dict[str, int] = {}
    for edge in recording.edges:
        handed_on[edge.producer] = handed_on.get(edge.producer, 0) + edge.numel
    evidence: dict[str, Any] = {}
    for call in recording:
        if call.name not in formats:
            continue
        known = screening.evidence(call.name)
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


def _reason(
    format: str, seconds: Mapping[str, float], known: Mapping[str, Any], decision: str
) -> str:
    """Why an operator has its format."""
    excluded = known["excluded"]
    times = ", ".join(f"{f} {s * 1e3:.3g} ms" for f, s in seconds.items())
    if decision in ("fp32", "autocast", "all-low") and format not in excluded:
        why = f"{decision} was taken as a whole"
        return why + (f" (alone: {times})" if times else "")
    if format == "promote":
        return "it writes into its input, or only moves data, and has that input's format"
    if format == "fp32":
        if excluded and len(excluded) == len(known["signals"]):
            return "; ".join(f"{f}: {text}" for f, text in excluded.items())
        if not seconds:
            return "it was not timed"
        return f"narrow formats are harmless here, but with the casts slower (alone: {times})"
    signal = known["signals"].get(format, {})
    error = signal.get("gradient_error", math.nan)
    text = f"harmless: alone it turns the gradient by {error:.2g} of its length"
    return text + (f"; cheapest with its neighbours (alone: {times})" if times else "")


def cost_of(
    seconds: float, epoch_seconds: float, operators: int, formats: int, checked: int
) -> dict[str, Any]:
    """What a search cost beyond the training, and what trying one by one would.

    Args:
        seconds: spent beyond the training.
        epoch_seconds: of an epoch of the training.
        operators: of the model.
        formats: candidates.
        checked: epochs that were trained beside float32.
    """
    one_by_one = operators * formats
    return {
        "seconds": seconds,
        "epoch_seconds": epoch_seconds,
        "epochs": seconds / epoch_seconds if epoch_seconds else 0.0,
        "checked_epochs": checked,
        # an epoch of training with each operator alone in each format
        "one_by_one_epochs": one_by_one,
        "one_by_one_seconds": one_by_one * epoch_seconds,
    }
