"""What a search has found so far, one JSON object a line, only ever appended.

A process that is killed leaves at most its last line torn; that line is dropped when the file is
read, and everything before it counts. So a search that is started again goes on where it was, and
the file is its log as well. The trade-off: each line is forced to the disk, which costs
milliseconds, so only what took longer to find is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """A file of events.

    Args:
        path: the file, made with its first event; its folder must exist.
        writable: whether events are written; under DDP only rank 0 writes. Other ranks' events are
            kept in memory.

    Raises:
        ValueError: a line other than the last is no JSON object: the file is no journal.
    """

    def __init__(self, path: str | Path, writable: bool = True) -> None:
        self._path = Path(path)
        self._writable = writable
        self._events: list[dict[str, Any]] = []
        if self._path.exists():
            self._events, whole = _read(self._path)
            if writable and whole < self._path.stat().st_size:
                with self._path.open("r+b") as file:
                    file.truncate(whole)

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
                file.flush()
                os.fsync(file.fileno())
        entry: dict[str, Any] = json.loads(line)
        self._events.append(entry)
        return entry

    def of(self, event: str) -> list[dict[str, Any]]:
        """All events of a kind, oldest first."""
        return [entry for entry in self._events if entry["event"] == event]

    def last(self, event: str) -> dict[str, Any] | None:
        """The latest event of a kind."""
        return next((e for e in reversed(self._events) if e["event"] == event), None)

    def replace(self, events: list[dict[str, Any]]) -> None:
        """Take over another rank's events; nothing is written."""
        self._events = list(events)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(list(self._events))

    def __len__(self) -> int:
        return len(self._events)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole events, and the bytes they take."""
    events: list[dict[str, Any]] = []
    whole = 0
    content = path.read_bytes()
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        last = whole + len(line) == len(content)
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or "event" not in entry:
                raise ValueError("no event")
        except ValueError:
            if last:
                break  # torn
            raise ValueError(
                f"line {number} of {path} is {line[:60]!r}, no event of a search; name another "
                "workdir, or move this file away"
            ) from None
        if not line.endswith(b"\n"):
            break  # it may be whole and still lack its end: as good as torn
        events.append(entry)
        whole += len(line)
    return events, whole
