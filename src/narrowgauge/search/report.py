"""What a search found, for people: tables, the picture of the network, one HTML file.

Everything is read from ``plan.json`` and ``journal.jsonl``, so that a report can be made again
later, elsewhere, without the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.operators import OperatorPlan
from narrowgauge.operators.search.workdir import read_journal
from narrowgauge.report import Figure, Table, bytes_text, write_html
from narrowgauge.search.picture import network

_NONE = "–"
_SHOWN = 20  # kinds of operators, in the terminal
_WHOLE = {
    "fp32": "keep float32",
    "autocast": "keep torch.autocast",
    "all-low": "all operators in low precision",
    "plan": "use the plan",
}


def write_report(folder: str | Path) -> Path:
    """Writes ``report.html`` and ``network.png`` into the folder of a search that is over.

    Args:
        folder: with ``plan.json`` and ``journal.jsonl``.

    Returns:
        The path of the page.

    Raises:
        ValueError: the plan or the journal is none, or was not found by a search.
        OSError: a file cannot be read or written.
    """
    folder = Path(folder)
    plan = OperatorPlan.load(folder / "plan.json")
    if "decision" not in plan.about:
        raise ValueError(
            f"{folder / 'plan.json'} was not found by a search: it says nothing of a decision"
        )
    events = read_journal(folder / "journal.jsonl")
    picture = network(plan)
    picture.save(folder / "network.png")
    parts: Sequence[Table | Figure] = [
        *([contenders(plan)] if plan.about.get("contenders") else []),
        picture,
        operators(plan),
        *([casts(plan)] if _cast_points(plan) else []),
        training(events),
    ]
    return write_html(
        folder / "report.html",
        title="Which operator in which format",
        introduction=introduction(plan),
        parts=parts,
    )


def introduction(plan: OperatorPlan) -> list[str]:
    """The decision, where it was measured, and what the search cost, in sentences."""
    about, here = plan.about, plan.environment
    counts: dict[str, int] = {}
    for format in plan.formats.values():
        counts[format] = counts.get(format, 0) + 1
    listed = ", ".join(f"{count} in {name}" for name, count in counts.items())
    decision = _WHOLE.get(about["decision"], about["decision"])
    sentences = [
        f"Decision: {decision}. {_sentence(about.get('reason', ''))}",
        f"{len(plan)} operators: {listed}. Candidates beside float32: "
        f"{', '.join(about.get('formats', []))}; memory weight {about.get('memory_weight', 0):g}.",
        "Measured on "
        + ", ".join(
            str(here[key]) for key in ("cuda", "machine", "cpu") if here.get(key) is not None
        )
        + f", {here.get('threads', '?')} threads, torch {here.get('torch', '?')}. Elsewhere, "
        "search again: which format is faster is a property of the machine.",
    ]
    cost = about.get("cost")
    if cost:
        steps = cost.get("steps")
        taken = (
            f"{cost['epochs']:.2g} of its epochs" if steps is None else f"{steps:.0f} of its steps"
        )
        sentences.append(
            f"The search took {cost['seconds']:.1f} s beyond the training it rode on, {taken}. "
            f"Trying each operator alone in each format would take "
            f"{cost['one_by_one_epochs']} epochs."
        )
    return sentences


def contenders(plan: OperatorPlan) -> Table:
    """Whole training steps under each plan that was tried, against float32 and autocast."""
    found: Mapping[str, Mapping[str, Any]] = plan.about["contenders"]
    memory = found.get("fp32", {}).get("saved_bytes") or math.nan
    autocast = found.get("autocast", {}).get("times_fp32")
    rows = []
    for name, row in found.items():
        ratio, noise = row["times_fp32"], row.get("noise")
        rows.append(
            [
                name,
                f"{row['seconds'] * 1e3:.4g} ms",
                f"{ratio:.2f} ×" + ("" if noise is None or name == "fp32" else f" ± {noise:.1%}"),
                _NONE if not autocast else f"{ratio / autocast:.2f} ×",
                f"{row['rounds']}",
                bytes_text(row["saved_bytes"]),
                f"{row['saved_bytes'] / memory:.2f} ×",
            ]
        )
    notes = [f"{name} left early: {row['left']}." for name, row in found.items() if "left" in row]
    notes += [
        f"{name} was not tried: {why}." for name, why in plan.about.get("not_tried", {}).items()
    ]
    notes.append(
        "Steps of the training, in turns, medians. Speed: float32's step over its own, ± two "
        "standard errors. Saved: what autograd keeps for the backward pass, reckoned."
    )
    columns = ["steps under", "step", "speed", "to autocast", "rounds", "saved", "to fp32"]
    return Table("Whole training steps", columns, rows, notes)


def operators(plan: OperatorPlan) -> Table:
    """Each operator: times, casts, gradient error, and why it has its format."""
    columns, every = _times_and_errors(plan)
    rows = [
        [name, format, *every(name), _reason(plan, name)] for name, format in plan.formats.items()
    ]
    notes = [
        "Error: by how much of its length this operator alone, or with those of equal "
        "signature, turns the gradient of all parameters, judged in float32."
    ]
    if any(_most(plan, name) for name in plan.names):
        notes.insert(
            0, "Milliseconds forward and backward, alone. Casts: of all that it hands on, and back."
        )
    return Table("Operators", ["operator", "format", *columns, "why"], rows, notes)


def alike(plan: OperatorPlan, shown: int | None = _SHOWN) -> Table:
    """Operators of one signature and format in a row, the dearest first: for the terminal.

    Args:
        plan: of a search, or any other, whose evidence may be anything.
        shown: rows at most; ``None``: all.
    """
    columns, every = _times_and_errors(plan)
    rows = []
    for (_, format), names in _of_one_kind(plan).items():
        label = names[0] if len(names[0]) < 30 else f"…{names[0][-28:]}"
        label += f" and {len(names) - 1} more" if len(names) > 1 else ""
        cost = len(names) * _most(plan, names[0])
        rows.append((cost, [label, format, *every(names[0])]))
    rows.sort(key=lambda row: -row[0])
    left = 0 if shown is None else len(rows) - shown
    return Table(
        f"{len(plan)} operators, those of one kind in a row",
        ["operator", "format", *columns],
        [row for _, row in rows[:shown]],
        [f"And {left} more kinds, which take less time; all are in the report."] * (left > 0),
    )


def reasons(plan: OperatorPlan) -> list[str]:
    """Why operators have their formats, a sentence for each kind; kinds of one reason together."""
    found: dict[str, list[str]] = {}
    for names in _of_one_kind(plan).values():
        if why := _reason(plan, names[0]):
            found.setdefault(why, []).extend(names)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in found.items()
    ]


def _of_one_kind(plan: OperatorPlan) -> dict[tuple[str, str], list[str]]:
    """Names of operators by signature and format."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, format in plan.formats.items():
        kinds.setdefault((plan.signatures.get(name, name), format), []).append(name)
    return kinds


def casts(plan: OperatorPlan) -> Table:
    """What casting a tensor costs, by size."""
    points = _cast_points(plan)
    sizes = sorted({size for row in points.values() for size in row})
    rows = [
        [f"{size:,}", *(_milliseconds(row.get(size)) for row in points.values())] for size in sizes
    ]
    columns = ["elements", *(f"{name} ms" for name in points)]
    return Table("Casts", columns, rows, ["Milliseconds, there and its gradient back."])


def training(events: Sequence[Mapping[str, Any]]) -> Table:
    """The epochs of a search, and what was decided in them."""
    rows, sets, remarks = [], 0, []
    for event in events:
        if event["event"] == "judged":
            sets += 1
        elif event["event"] == "check":
            how = "kept up with" if event["passed"] else "fell behind"
            if event["evaluation"] is None:  # it failed before the end
                remarks.append(f"low precision {how} float32: {event['reason']}")
                continue
            remarks.append(
                f"low precision {how} float32 ({event['evaluation']:.4g}, float32 "
                f"{event['float32']:.4g}, band {event['band']:.2g})"
            )
        elif event["event"] == "decided":
            remarks.append(f"decided: {_WHOLE.get(event['decision'], event['decision'])}")
        elif event["event"] == "epoch":
            if sets:
                remarks.insert(0, f"{sets} sets of operators judged")
            evaluation = f"{event['evaluation']:.4g}"
            took = [f"{event[key]:.1f} s" for key in ("seconds", "search_seconds")]
            rows.append([str(event["number"]), evaluation, *took, "; ".join(remarks) or _NONE])
            sets, remarks = 0, []
    if remarks:  # decided, and not trained on
        rows.append([_NONE, _NONE, _NONE, _NONE, "; ".join(remarks)])
    columns = ["epoch", "evaluation", "training", "search so far", "what happened"]
    return Table("The training it rode on", columns, rows)


def _times_and_errors(plan: OperatorPlan) -> tuple[list[str], Callable[[str], list[str]]]:
    """Columns that the plan has evidence for, and a function that gives an operator's cells."""
    found = [_evidence(plan, name) for name in plan.formats]
    timed = list(dict.fromkeys(f for e in found for f in e.get("seconds", {})))
    narrow = list(dict.fromkeys(f for e in found for f in e.get("signals", {})))

    def cells(name: str) -> list[str]:
        evidence = _evidence(plan, name)
        seconds, signals = evidence.get("seconds", {}), evidence.get("signals", {})
        casts = evidence.get("casts", {}).values()
        return [
            *(_milliseconds(seconds.get(format)) for format in timed),
            *([_milliseconds(max(casts, default=None))] if timed else []),
            *(_share(signals.get(format, {}).get("gradient_error")) for format in narrow),
        ]

    return [
        *(f"{format} ms" for format in timed),
        *(["casts ms"] if timed else []),
        *(f"error {format}" for format in narrow),
    ], cells


def _evidence(plan: OperatorPlan, name: str) -> dict[str, Any]:
    """What a search measured of an operator; empty if the plan is not of one."""
    evidence = plan.evidence.get(name)
    found = evidence if "decision" in plan.about and isinstance(evidence, dict) else {}
    return dict(found)


def _reason(plan: OperatorPlan, name: str) -> str:
    """Why an operator has its format: in a search's words, or whatever its evidence says."""
    if "decision" in plan.about:
        return str(_evidence(plan, name).get("reason", ""))
    return text_of(plan.evidence.get(name))


def text_of(value: Any) -> str:
    """A value of a JSON file as a reader wants it: without braces, with four digits."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text_of(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _most(plan: OperatorPlan, name: str) -> float:
    seconds = _evidence(plan, name).get("seconds", {})
    return max(seconds.values(), default=0.0)


def _cast_points(plan: OperatorPlan) -> dict[str, dict[int, float]]:
    points: Mapping[str, Sequence[Sequence[float]]] = plan.about.get("casts", {})
    return {name: {int(size): value for size, value in row} for name, row in points.items()}


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.3g}"


def _share(error: float | str | None) -> str:
    if error is None or isinstance(error, str):
        return _NONE if error is None else error
    return "infinite" if math.isinf(error) else f"{error:.2g}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." * (bool(text) and not text.endswith("."))
