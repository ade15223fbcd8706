"""What a search keeps on disk: its journal, the snapshot of the last epoch's end, the plan.

The journal is one JSON object a line, only ever appended: a process that is killed leaves at most
its last line torn; that line is dropped when the file is read, and everything before it counts. So
a search that is started again goes on where it was, and the file is its log as well. Under
DistributedDataParallel rank 0 reads and writes, and tells the others; so ranks need no disk in
common. The trade-off: a snapshot is a copy of model and optimizer, written at the end of each
epoch.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.search.setting import Ranks

_NEEDED = {
    "operators": ("fingerprint",),
    "wires": ("errors",),
    "judged": ("operators", "gradient_error", "loss_change", "overflow", "underflow"),
    "timed": ("signature", "seconds"),
    "casts": ("seconds",),
    "contenders": ("formats", "saved_bytes", "refused"),
    "round": ("seconds",),
    "tried": ("winner", "reason"),
    "check": ("passed", "reason"),
    "decided": ("decision",),
    "epoch": ("seconds", "steps", "search_seconds"),
}
"""What events must say, by their kind."""


class Journal:
    """A file of events.

    Args:
        path: the file, made with its first event; its folder must exist.
        events: what is known already.
        writable: whether events are written; under DDP only rank 0 writes, and others keep events
            in memory.
    """

    def __init__(
        self, path: Path, events: Sequence[dict[str, Any]] = (), writable: bool = True
    ) -> None:
        self._path, self._events, self._writable = path, list(events), writable

    def append(self, event: str, **values: Any) -> dict[str, Any]:
        """Add an event: what happened, and plain numbers, text, lists and dicts.

        Returns:
            The event as it will be read again.

        Raises:
            OSError: the file cannot be written.
            TypeError: a value is nothing that JSON knows.
        """
        line = json.dumps({"event": event, **values})
        if self._writable:
            with self._path.open("ab") as file:
                file.write(line.encode("utf-8") + b"\n")
        entry: dict[str, Any] = json.loads(line)
        self._events.append(entry)
        return entry

    def of(self, event: str) -> list[dict[str, Any]]:
        """All events of a kind, oldest first."""
        return [entry for entry in self._events if entry["event"] == event]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(list(self._events))

    def __len__(self) -> int:
        return len(self._events)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole events of a journal; a torn last line is cut off the file.

    Raises:
        ValueError: another line is no event: the file is no journal.
    """
    events: list[dict[str, Any]] = []
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1  # a line without its end is as good as torn
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
                raise ValueError("no event of a search")
            lost = [key for key in _NEEDED.get(entry["event"], ()) if key not in entry]
            if lost:
                raise ValueError(f"which lacks {lost[0]!r}")
        except (ValueError, RecursionError) as error:
            known = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
            text = error if known else "no event of a search"
            raise ValueError(
                f"line {number} of {path} is {line[:60]!r}, {text}; name another workdir, or move "
                "this file away"
            ) from None
        events.append(entry)
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return events


def _read_snapshot(path: Path) -> dict[str, Any]:
    needed = ("model", "optimizer", "others", "random", "epoch")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        lost = [key for key in needed if key not in state]
        text = f"it lacks {lost[0]!r}" if lost else ""
    except Exception as error:  # of whatever kind: torch has many for a file that is cut off
        text = f"{type(error).__name__} while reading it"
    if text:
        raise ValueError(
            f"{path} is no whole snapshot of a search: {text}. Put back a copy of it; or remove "
            "it, and the training begins anew, with what the search has found"
        )
    return state


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"


class Workdir:
    """The folder of a search.

    Args:
        folder: made if missing.
        ranks: who train together.
        settings: of the search; those of a folder that is not new must be the same.
        stateful: what goes into the snapshot besides model and optimizer.

    Raises:
        TypeError: the folder is no path.
        ValueError: it is a file, or holds a search with other settings, or what is no journal.
        OSError: it cannot be read or written.
    """

    def __init__(
        self, folder: str | Path, ranks: Ranks, settings: Mapping[str, Any], stateful: Sequence[Any]
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"workdir is {folder!r}; it must be the path of a folder")
        self.folder, self._ranks, self._stateful = Path(folder), ranks, stateful
        path = self.folder / "journal.jsonl"

        def begin() -> list[dict[str, Any]]:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"workdir is {str(self.folder)!r}, which is a file; name a folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            events = read_journal(path)
            if not events:
                return []
            known = events[0]
            for key, value in settings.items():
                if known.get(key) != value:
                    raise ValueError(
                        f"{self.folder} holds a search with {key}={_short(known.get(key))}, not "
                        f"{_short(value)}; name another workdir, or remove it"
                    )
            return events

        self.journal = Journal(path, ranks.of_first(begin), ranks.first)
        if not len(self.journal):
            self.journal.append("settings", **settings)

    def save_snapshot(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Replace the snapshot, so that there is a whole one at any time."""
        path = self.folder / "snapshot.pt"
        random = self._ranks.all(torch.get_rng_state())

        def save() -> None:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "others": [x.state_dict() for x in self._stateful],
                "random": random,
                "epoch": epoch,
                "kind": type(optimizer).__name__,
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)

        self._ranks.of_first(save)

    def load_snapshot(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Put everything back to the last snapshot, if there is one.

        Returns:
            Epochs that were over then.

        Raises:
            ValueError: the file is damaged, or that of another training; nothing was put back, or
                only a part.
        """
        path = self.folder / "snapshot.pt"
        state = self._ranks.of_first(lambda: _read_snapshot(path) if path.exists() else None)
        if state is None:
            if over := self.journal.of("epoch"):
                warnings.warn(
                    f"{self.folder} has no snapshot.pt, although {len(over)} epochs of its search "
                    "are over: the training begins anew, with what the search has found",
                    stacklevel=3,
                )
            return 0
        others, kind = state["others"], type(optimizer).__name__
        if len(others) != len(self._stateful):
            raise ValueError(
                f"{path} was written with {len(others)} objects in stateful=, and now there are "
                f"{len(self._stateful)}; pass the same ones"
            )
        if state.get("kind", kind) != kind:
            raise ValueError(
                f"{path} was written with the optimizer {state['kind']}, and now it is {kind}; "
                "pass the same one, or name another workdir"
            )
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is of another training; name another workdir: {error}"
            ) from None
        for x, of_x in zip(self._stateful, others, strict=True):
            x.load_state_dict(of_x)
        random = state["random"]
        torch.set_rng_state(random[self._ranks.number % len(random)])
        epoch: int = state["epoch"]
        return epoch

    def save_plan(self, plan: OperatorPlan) -> None:
        """Write ``plan.json``."""
        self._ranks.of_first(lambda: plan.save(self.folder / "plan.json"))

    def load_plan(self) -> OperatorPlan:
        """The plan that was decided."""
        loaded: OperatorPlan = self._ranks.of_first(
            lambda: OperatorPlan.load(self.folder / "plan.json")
        )
        return loaded
