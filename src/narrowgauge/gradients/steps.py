"""What compressions under DDP and under FSDP2 share: steps, their end, and their ledger entries.

A step is a backward pass that synchronises. Its end is told by autograd itself, not by the training
loop, so that nothing has to be added there.
"""

from __future__ import annotations

import torch

from narrowgauge.collectives.reduction import Reduction
from narrowgauge.collectives.two_level import TwoLevelReduction
from narrowgauge.gradients.checks import checked_count
from narrowgauge.gradients.policy import FixedPolicy
from narrowgauge.ledger import Ledger


class StepwiseCompression:
    """The reductions of one backward pass after the other.

    Attributes:
        ledger: one entry per step (per backward pass that synchronises), movement ``"gradients"``.
    """

    def __init__(self, policy: FixedPolicy, ledger: Ledger) -> None:
        self.ledger = ledger
        self._policy = policy
        self._steps = 0
        self._epoch = 0
        self._backward = -1  # autograd's number of the backward pass under way
        self._under_way: list[Reduction | TwoLevelReduction] = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the epoch, for a :class:`Schedule` by epochs; on every rank.

        Raises:
            ValueError: it is no whole number from 0.
        """
        self._epoch = checked_count("epoch", epoch)

    def _enter_backward(self) -> int:
        """Before a reduction starts: see to the end of this backward pass; autograd's number."""
        backward = torch._C._current_graph_task_id()
        if backward not in (self._backward, -1):
            # Runs when this backward pass is over. An error set on a future would reach the user
            # as a failed cast; raised from here it arrives as it is.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_step)
            self._backward = backward
        if not self._under_way:
            self._policy.begin_step(self._steps, self._epoch)
        return backward

    def _is_complete(self) -> bool:
        """Whether all reductions of the step have begun."""
        return bool(self._under_way)

    def _finish_step(self) -> None:
        """Wait for all reductions of this backward pass and enter them into the ledger."""
        if not self._is_complete():  # a pass within another, as reentrant checkpoints make it
            return
        under_way, self._under_way, self._backward = self._under_way, [], -1
        self._steps += 1
        for reduction in under_way:
            reduction.wait()
        self.ledger.record(
            "gradients",
            bytes_sent=sum(reduction.bytes_sent for reduction in under_way),
            codec_seconds=sum(reduction.codec_seconds for reduction in under_way),
            wire_seconds=sum(reduction.wire_seconds for reduction in under_way),
            round_off_error=self._round_off_error(),
            levels=_levels(under_way),
        )
        self._after_step()

    def _after_step(self) -> None:
        """Called at the end of each step."""

    def _round_off_error(self) -> float | None:
        """Of the step that is over, if it was measured."""
        return None


def _levels(
    reductions: list[Reduction | TwoLevelReduction],
) -> dict[str, dict[str, int]] | None:
    """Per level, the steps and bytes of all reductions together; ``None`` without levels."""
    totals: dict[str, dict[str, int]] = {}
    for reduction in reductions:
        if isinstance(reduction, TwoLevelReduction):
            for level, counted in reduction.levels.items():
                total = totals.setdefault(level, dict.fromkeys(counted, 0))
                for name, number in counted.items():
                    total[name] += number
    return totals or None
