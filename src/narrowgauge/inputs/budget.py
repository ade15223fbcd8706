"""How far ahead batches may be fetched: bounded in number and in bytes.

A batch may be fetched when it is at most ``room`` ahead of the one that was asked for last. The
room is ``depth``, or less where so many batches would need more than ``max_bytes``. What is counted
are the tensors that the feed holds on this rank, the batch in the user's hands among them; what a
DataLoader's workers prepare before they hand it over is not.
"""

from __future__ import annotations

import threading
import time

_COURTESY = 1e-3
_MOST_AHEAD = 1 << 30  # ranks tell each other in 64 bits


class Closed(Exception):
    """The iteration is over: its threads end."""


class Budget:
    """Bytes held on one rank.

    Args:
        depth: batches ahead, at most.
        max_bytes: bytes held, at most.

    Attributes:
        held: bytes held now.
        high_water: the most that was held.
        most: bytes of the largest batch.
    """

    def __init__(self, depth: int, max_bytes: int) -> None:
        self._depth = depth
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.held = 0
        self.high_water = 0
        self.most = 0

    def hold(self, size: int, batch: int | None = None) -> None:
        """Count ``size`` bytes more; ``batch``: those of the whole batch they belong to.

        Raises:
            ValueError: two such batches, the one in use and the next, need more than is allowed.
        """
        batch = size if batch is None else batch
        with self._lock:
            self.held += size
            self.high_water = max(self.high_water, self.held)
            self.most = max(self.most, batch)
        if 2 * batch > self._max_bytes:
            raise ValueError(
                f"a batch takes {batch:,} bytes on this rank, and there are at least two: the one "
                f"in use and the next. max_bytes is {self._max_bytes:,}; it must be "
                f"{2 * batch:,} or more, or batches smaller"
            )

    def release(self, size: int) -> None:
        """Count ``size`` bytes less."""
        with self._lock:
            self.held -= size

    @property
    def room(self) -> int:
        """How many batches there may be beside the one in use; 1 until one was seen."""
        if not self.most:
            return 1
        return max(1, min(self._depth, self._max_bytes // self.most - 1, _MOST_AHEAD))


class Horizon:
    """The number of the last batch that may be fetched, for a thread that waits for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._last = 0
        self._closed = False

    def advance(self, last: int) -> None:
        """Allow batches up to number ``last``; what was allowed stays so."""
        with self._condition:
            self._last = max(self._last, last)
            self._condition.notify_all()

    def close(self) -> None:
        """Let whoever waits end."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the iteration is over."""
        return self._closed

    def allows(self, number: int, seconds: float | None = None) -> bool:
        """Wait until batch ``number`` may be fetched, but no longer than ``seconds``.

        Raises:
            Closed: the iteration is over.
        """
        with self._condition:
            waits = number > self._last and not self._closed
            allowed = self._condition.wait_for(
                lambda: self._closed or number <= self._last, seconds
            )
            if self._closed:
                raise Closed
        if waits and allowed:
            # It was woken by the thread that is about to hand over a batch: let that one have the
            # interpreter. Nothing waits for this one, which is ahead.
            time.sleep(_COURTESY)
        return allowed
