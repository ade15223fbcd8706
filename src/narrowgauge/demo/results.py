"""Finished runs, one line each of ``results.jsonl``: what an interrupted demo goes on from.

The file outlives the program that wrote it and can be edited by hand, so nothing in it is taken for
granted: a line that is no complete result is left out and counted.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from narrowgauge.demo.settings import Settings

_NUMBERS = ("accuracy", "parameters", "bytes_sent_per_step", "codec_seconds_per_step")
_NUMBERS_OR_NONE = ("step_seconds", "round_off_error")
_CURVES = ("loss_curve", "accuracy_curve")
_COUNTED = ("cores", "threads_per_rank")  # of the environment
_NAMED = ("torch", "kernels")  # of the environment


def finished(path: Path, settings: Settings) -> tuple[dict[tuple[str, int], dict[str, Any]], int]:
    """The runs of ``path`` made with these settings, by variant and seed.

    Returns:
        The runs, and how many lines were left out because they are no complete results. Complete
        results with other settings are neither.
    """
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    left_out = 0
    steps: list[list[Any]] | None = None
    for entry in json_lines(path):
        if not _is_complete(entry):
            left_out += 1
        elif entry["settings"] == settings.as_dict():
            its_steps = [[step for step, _ in entry[curve]] for curve in _CURVES]
            steps = steps or its_steps
            if its_steps == steps:  # equal settings measure at the same steps
                runs[entry["variant"], entry["seed"]] = entry
            else:
                left_out += 1
    return runs, left_out


def json_lines(path: Path) -> list[Any]:
    """What the lines of a file hold, without empty ones; ``None`` for a line that is no JSON."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.strip():
            entry = None
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
            entries.append(entry)
    return entries


def end_last_line(path: Path) -> None:
    """Sets what comes next apart from a last line that was cut short when it was written."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")


def _is_complete(entry: Any) -> bool:
    """Whether ``entry`` holds all that the table and the figures are made of."""
    if not isinstance(entry, dict):
        return False
    environment = entry.get("environment")
    return (
        isinstance(entry.get("settings"), dict)
        and isinstance(entry.get("variant"), str)
        and _is_count(entry.get("seed"))
        and all(_is_number(entry.get(name)) for name in _NUMBERS)
        and all(name in entry for name in _NUMBERS_OR_NONE)
        and all(entry[name] is None or _is_number(entry[name]) for name in _NUMBERS_OR_NONE)
        and all(_is_curve(entry.get(name)) for name in _CURVES)
        and isinstance(environment, dict)
        and all(_is_count(environment.get(name)) for name in _COUNTED)
        and all(isinstance(environment.get(name), str) for name in _NAMED)
    )


def _is_curve(value: Any) -> bool:
    """Pairs of step and value; a value that JSON lacks, such as NaN, was written as ``null``."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(point, list) and len(point) == 2 for point in value)
        and all(_is_number(step) and (y is None or _is_number(y)) for step, y in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
