"""Who waited for what: the share of time the training waited for its inputs, and why.

A batch passes three stages, each ahead of use: **read** (from the source), **wire** (to the rank)
and **copy** (cutting, copying to the device, ``on_device``). The training waits only when a stage
takes longer than the training step, so that stage is the one to change; the report names it in a
sentence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

_KEPT = 10_000  # of the last steps: enough for a p99, and no more memory however long it runs
_NOTICEABLE = 0.01
_NOTICEABLE_RANKS = 0.05  # ranks never come at the very same moment

_CHANGES = {
    "read": "give the DataLoader more num_workers, make its transforms cheaper, or store the data "
    "in a form that needs less decoding",
    "wire": "send a narrower dtype (uint8, and on_device to make floats of it), or use "
    "source='shard' if every rank can read the data",
    "copy": "make on_device cheaper, or do its work in the DataLoader's workers",
}


@dataclass(frozen=True)
class Step:
    """One batch, in seconds: from one batch to the next, and what of it was waiting.

    Attributes:
        seconds: between the deliveries of the batch before and this one; 0.0 for the first.
        data_wait: waited for this rank's part.
        ranks_wait: waited for the other ranks, once this one had its part.
        read: that reading took.
        wire: that sending or receiving took.
        copy: that cutting and staging took.
    """

    seconds: float
    data_wait: float
    ranks_wait: float
    read: float
    wire: float
    copy: float


@dataclass(frozen=True)
class StallReport:
    """What the batches of one rank cost, in seconds per step.

    Attributes:
        steps: how many are counted; the first batch of an iteration is not: nothing is ahead of it.
        wait_share: waiting for this rank's part, as a share of all time.
        wait_p50: median wait for this rank's part.
        wait_p99: the longest wait but for one step in a hundred.
        ranks_share: waiting for other ranks, as a share of all time.
        ranks_p50: median of that.
        step: median time from batch to batch.
        read: median time of reading a batch.
        wire: median time of sending or receiving one.
        copy: median time of cutting and staging one.
        high_water_bytes: the most that was held on this rank.
        slow_stage: ``"read"``, ``"wire"``, ``"copy"``, ``"ranks"``, or ``""``: nothing waited.
        sentence: what is slow, and what to change.
    """

    steps: int
    wait_share: float
    wait_p50: float
    wait_p99: float
    ranks_share: float
    ranks_p50: float
    step: float
    read: float
    wire: float
    copy: float
    high_water_bytes: int
    slow_stage: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and text."""
        return asdict(self)

    def table(self) -> Table:
        """As a rich table."""
        table = Table(title="Inputs: this rank", caption=self.sentence)
        for heading in ("steps", "waited", "wait p50 ms", "wait p99 ms", "for ranks"):
            table.add_column(heading, justify="right")
        for heading in ("step ms", "read ms", "wire ms", "copy ms", "high water MB"):
            table.add_column(heading, justify="right")
        milliseconds = (self.step, self.read, self.wire, self.copy)
        table.add_row(
            f"{self.steps}",
            f"{self.wait_share:.1%}",
            f"{self.wait_p50 * 1e3:.2f}",
            f"{self.wait_p99 * 1e3:.2f}",
            f"{self.ranks_share:.1%}",
            *(f"{seconds * 1e3:.1f}" for seconds in milliseconds),
            f"{self.high_water_bytes / 1e6:.1f}",
        )
        return table


class Stalls:
    """The last steps of a feed."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=_KEPT)

    def add(self, step: Step) -> None:
        """Count one batch."""
        if step.seconds > 0:
            self._steps.append(step)

    def report(self, high_water_bytes: int) -> StallReport:
        """What there is so far."""
        steps = list(self._steps)
        total = sum(step.seconds for step in steps)
        waits = [step.data_wait for step in steps]
        ranks = [step.ranks_wait for step in steps]
        wait_share = sum(waits) / total if total else 0.0
        ranks_share = sum(ranks) / total if total else 0.0
        stages = {name: quantile([getattr(step, name) for step in steps], 0.5) for name in _CHANGES}
        step = quantile([step.seconds for step in steps], 0.5)
        slow = ""
        if wait_share >= _NOTICEABLE or ranks_share >= _NOTICEABLE_RANKS:
            slowest = max(stages, key=lambda name: stages[name])
            # Rank 0 has its part at once, and waits with those to whom theirs is on its way.
            fills_step = stages[slowest] > 0.7 * step
            slow = slowest if wait_share >= ranks_share or fills_step else "ranks"
        return StallReport(
            steps=len(steps),
            wait_share=wait_share,
            wait_p50=quantile(waits, 0.5),
            wait_p99=quantile(waits, 0.99),
            ranks_share=ranks_share,
            ranks_p50=quantile(ranks, 0.5),
            step=step,
            **stages,
            high_water_bytes=high_water_bytes,
            slow_stage=slow,
            sentence=_sentence(slow, len(steps), wait_share, ranks_share, step, stages),
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed; 0.0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _sentence(
    slow: str,
    count: int,
    wait_share: float,
    ranks_share: float,
    step: float,
    stages: dict[str, float],
) -> str:
    if not count:
        return "Nothing is measured yet: the first batch of an iteration does not count."
    if not slow:
        return f"The inputs keep up: {wait_share:.1%} of the time was spent waiting for them."
    if slow == "ranks":
        return (
            f"{ranks_share:.0%} of the time was spent waiting for other ranks, whose training step "
            "or source takes longer than this rank's: compare the reports of all ranks."
        )
    times = f"{stages[slow] * 1e3:.3g} ms a batch in a step of {step * 1e3:.3g} ms"
    return (
        f"{wait_share + ranks_share:.0%} of the time was spent waiting for inputs; the slow stage "
        f"is {slow}, {times}: {_CHANGES[slow]}."
    )
