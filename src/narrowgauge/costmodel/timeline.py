"""One training step on a time axis: the backward pass, and the buckets that travel beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.collectives.link import Link
from narrowgauge.costmodel.algorithms import Plan, all_reduce_cost
from narrowgauge.costmodel.networks import Bucket


@dataclass(frozen=True)
class Compute:
    """Seconds of computation in a step of one node, without communication."""

    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All three."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class StepCost:
    """What one training step costs.

    Attributes:
        seconds: of the whole step.
        communication_seconds: of all all-reduces, were they alone.
        exposed_seconds: by which communication makes the step longer than computation alone.
        bytes_sent: by the busiest node, per direction.
        steps: messages that must follow each other, in the all-reduce of one bucket.
    """

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    bytes_sent: float
    steps: int


def step_cost(
    buckets: Sequence[Bucket], compute: Compute, plan: Plan, link: Link, message_seconds: float
) -> StepCost:
    """The step with its buckets reduced one after the other, each as soon as it is ready.

    A bucket starts when its gradients are there and the bucket before it is through. Where ranks
    have no processor to spare, the work of sending and coding delays the backward pass, so that the
    buckets behind it are ready later. The optimizer waits for all buckets.
    """
    end = delay = total = 0.0
    for bucket in buckets:
        cost = all_reduce_cost(plan, link, bucket.numel, message_seconds)
        ready = compute.backward * bucket.ready + delay
        end = max(ready, end) + cost.seconds
        delay += cost.stolen
        total += cost.seconds
    backward = max(end, compute.backward)
    seconds = compute.forward + backward + compute.optimizer
    return StepCost(
        seconds=seconds,
        communication_seconds=total,
        exposed_seconds=backward - compute.backward,
        bytes_sent=sum(plan.bytes_sent(bucket.numel) for bucket in buckets),
        steps=plan.steps,
    )
