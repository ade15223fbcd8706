"""The ledger: how many bytes each movement sent, how long it took, and what rounding it cost.

Movements write one entry per training step; people read it as a dict, a table, or JSON lines. It
keeps plain numbers only and never synchronises anything: what is not measured is absent, not zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table


@dataclass(frozen=True)
class Entry:
    """What one movement did in one training step, on this rank.

    Attributes:
        step: number of the step, from 0, counted per movement.
        movement: ``"gradients"``, ``"inputs"`` or ``"parameters"``.
        bytes_sent: payload handed to the transport by this rank, headers of ours included.
        codec_seconds: time in encode, reduce and decode kernels, summed over the stage threads.
        wire_seconds: time the stage threads waited for messages. Both overlap with computation.
        round_off_error: the paper's metric for this step, or ``None`` where it was not measured.
        levels: per level of a two-level reduction, its steps and bytes; ``None`` without levels.
        wait_seconds: time the training step waited for this movement; ``None`` if it never does.
        read_seconds: time to read a batch from its source; ``None`` but for ``"inputs"``, whose
            ``codec_seconds`` are those of cutting and copying it.
    """

    step: int
    movement: str
    bytes_sent: int
    codec_seconds: float
    wire_seconds: float
    round_off_error: float | None = None
    levels: dict[str, dict[str, int]] | None = None
    wait_seconds: float | None = None
    read_seconds: float | None = None


class Ledger:
    """Entries of all movements, in the order they happened."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(
        self,
        movement: str,
        *,
        bytes_sent: int,
        codec_seconds: float,
        wire_seconds: float,
        round_off_error: float | None = None,
        levels: dict[str, dict[str, int]] | None = None,
        wait_seconds: float | None = None,
        read_seconds: float | None = None,
    ) -> Entry:
        """Append the next step of ``movement`` and return it."""
        last = next((e for e in reversed(self.entries) if e.movement == movement), None)
        step = 0 if last is None else last.step + 1
        entry = Entry(
            step,
            movement,
            bytes_sent,
            codec_seconds,
            wire_seconds,
            round_off_error,
            levels,
            wait_seconds,
            read_seconds,
        )
        self.entries.append(entry)
        return entry

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Every entry as a dict, oldest first."""
        return [asdict(entry) for entry in self.entries]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Per movement: the number of steps, and the means over them.

        ``round_off_error`` is the mean over the steps that measured it, ``None`` if none did;
        likewise waiting and reading.
        """
        result: dict[str, dict[str, Any]] = {}
        for movement in dict.fromkeys(entry.movement for entry in self.entries):
            entries = [entry for entry in self.entries if entry.movement == movement]
            errors = [e.round_off_error for e in entries if e.round_off_error is not None]
            waits = [e.wait_seconds for e in entries if e.wait_seconds is not None]
            reads = [e.read_seconds for e in entries if e.read_seconds is not None]
            result[movement] = {
                "steps": len(entries),
                "bytes_sent_per_step": _mean(entry.bytes_sent for entry in entries),
                "codec_seconds_per_step": _mean(entry.codec_seconds for entry in entries),
                "wire_seconds_per_step": _mean(entry.wire_seconds for entry in entries),
                "round_off_error": _mean(errors) if errors else None,
                "wait_seconds_per_step": _mean(waits) if waits else None,
                "read_seconds_per_step": _mean(reads) if reads else None,
            }
        return result

    def table(self) -> Table:
        """The summary of :meth:`as_dict` as a rich table."""
        table = Table(title="Ledger: means per step, this rank")
        table.add_column("movement")
        for heading in ("steps", "bytes sent", "codec ms", "wire ms", "wait ms", "round-off error"):
            table.add_column(heading, justify="right")
        for movement, summary in self.as_dict().items():
            error, wait = summary["round_off_error"], summary["wait_seconds_per_step"]
            table.add_row(
                movement,
                f"{summary['steps']}",
                f"{summary['bytes_sent_per_step']:,.0f}",
                f"{summary['codec_seconds_per_step'] * 1e3:.2f}",
                f"{summary['wire_seconds_per_step'] * 1e3:.2f}",
                "–" if wait is None else f"{wait * 1e3:.2f}",
                "not measured" if error is None else f"{error:.2%}",
            )
        return table

    def write_json_lines(self, path: str | Path) -> None:
        """Write one JSON object per entry to ``path``, replacing what is there."""
        Path(path).write_text("".join(json.dumps(step) + "\n" for step in self.steps))


def round_off_sums(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[float, int]:
    """Sum of relative errors and number of elements behind the paper's round-off error.

    Source: APS (arXiv 1911.08907): the mean of ``|(exact - rounded) / exact|`` over the elements
    with ``exact != 0``. Elements where either side is not finite are left out as well.

    Args:
        exact: float32 reference, any shape.
        rounded: same shape.

    Returns:
        ``(sum, count)``; the error is ``sum / count``, over as many tensors as were added up.
    """
    counted = (exact != 0) & exact.isfinite() & rounded.isfinite()
    reference = exact[counted].double()
    relative = (reference - rounded[counted].double()) / reference
    return float(relative.abs().sum()), int(counted.sum())


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values)
