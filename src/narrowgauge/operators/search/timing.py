"""Times that can be compared on a machine that others use too.

Two things are timed in turn, never one after the other, so that a slow minute slows both; what
counts is the ratio within each round. The noise is how far the median of these ratios may be off,
by their own spread. The trade-off: every comparison costs several rounds of both, and a difference
within the noise is none.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_MUCH = 3.0  # times slower than the fastest: not timed again

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Comparison:
    """How much faster one thing is than another, timed in the same rounds.

    Args:
        ratio: median over rounds of (seconds of the other) / (seconds of the one); above 1 the one
            is faster.
        noise: two standard errors of that median, as a share of it.
        rounds: pairs of measurements.
    """

    ratio: float
    noise: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Whether the one beats the other by more than the noise."""
        return self.ratio * (1 - self.noise) > 1


def compare(one: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compares paired times: the n-th of each were measured next to each other.

    Args:
        one: seconds of the one, in rounds.
        other: seconds of the other, in the same rounds.

    Raises:
        ValueError: not the same number of rounds, or none, or a time that is not positive.
    """
    if len(one) != len(other) or not one:
        raise ValueError(
            f"there are {len(one)} times of the one and {len(other)} of the other; both need the "
            "same number of rounds, at least 1"
        )
    if min(*one, *other) <= 0:
        raise ValueError(f"a time is {min(*one, *other)} s; times are positive")
    logs = [math.log(b / a) for a, b in zip(one, other, strict=True)]
    middle = statistics.median(logs)
    return Comparison(math.exp(middle), 2 * _standard_error(logs), len(logs))


def _standard_error(values: Sequence[float]) -> float:
    """Of the median, from the median distance to it: one slow round does not count.

    1.4826 × the median distance estimates the deviation of normal values, and the median's standard
    error is 1.2533 × deviation / √n. Below 4 rounds nothing is known, and the error is infinite.
    """
    if len(values) < 4:
        return math.inf
    middle = statistics.median(values)
    distance = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * distance / math.sqrt(len(values))


def rotated(things: Sequence[K], round: int) -> list[K]:
    """The things in another order each round, every other time backwards.

    What follows a slow thing finds its memory in no cache; so each follows either neighbour as
    often.
    """
    shift = round // 2 % len(things) if things else 0
    order = [*things[shift:], *things[:shift]]
    return order[::-1] if round % 2 else order


def time_in_turn(
    functions: Mapping[K, Callable[[], object]],
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """Times functions in turn; the fastest of each counts, as others can only slow it down.

    Args:
        functions: what to time.
        rounds: how often at most; 3 at least, or 1 for what is much slower than the fastest.
        seconds: after which no new round begins.
        clock: seconds now.

    Returns:
        Seconds of one call of each.
    """
    best: dict[K, float] = {}
    for function in functions.values():
        function()  # first calls allocate and choose kernels
    end = clock() + seconds
    for round in range(rounds):
        for key in rotated(list(functions), round):
            if best.get(key, 0.0) > _MUCH * min(best.values(), default=0.0):
                continue  # known well enough
            begin = clock()
            functions[key]()
            taken = clock() - begin
            best[key] = min(taken, best.get(key, math.inf))
        if clock() > end and round >= 2:
            break
    return best
