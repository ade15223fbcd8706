"""What an all-reduce costs over many nodes: steps, bytes and seconds, by algorithm.

A step is a message that can only be sent when another has arrived. Every step costs the latency;
bytes count where they pass the busiest node. R. Thakur et al., "Optimization of collective
communication operations in MPICH", IJHPCA 19, 2005, derive the ring; X. Jia et al., arXiv
1807.11205, the hierarchical one, whose steps APS counts (arXiv 1911.08907).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from narrowgauge.collectives.layout import MESSAGE_BYTES
from narrowgauge.collectives.link import Link, codec_seconds

Algorithm: TypeAlias = Literal["ring", "two-shot", "two-level"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "two-shot", "two-level")


@dataclass(frozen=True)
class Plan:
    """How numbers are reduced, and in what they travel.

    Attributes:
        algorithm: ``"ring"``: everybody sends to the next. ``"two-shot"``: everybody sends each its
            piece, sums one, and sends the sum to all; what this library does. ``"two-level"``: a
            ring within each group brings the sum to its master, a ring of masters sums those, a
            ring within each group spreads the result.
        nodes: how many take part.
        group_size: nodes per group of a two-level reduction.
        bits: of a number on the wire.
        coded: whether numbers are encoded and decoded by us.
    """

    algorithm: Algorithm
    nodes: int
    group_size: int
    bits: float
    coded: bool

    @property
    def steps(self) -> int:
        """Messages that must follow each other: 2(p-1), 2 (1 for two nodes), 4(k-1) + 2(p/k-1)."""
        if self.nodes == 1:
            return 0
        if self.algorithm == "ring":
            return 2 * (self.nodes - 1)
        if self.algorithm == "two-shot":
            return 1 if self.nodes == 2 else 2
        return 4 * (self.group_size - 1) + 2 * (self.nodes // self.group_size - 1)

    def bytes_sent(self, numel: int) -> float:
        """Bytes through the busiest node in each direction, for ``numel`` numbers."""
        packed = numel * self.bits / 8
        if self.algorithm != "two-level":
            return 2 * (self.nodes - 1) / self.nodes * packed
        k, groups = self.group_size, self.nodes // self.group_size
        return 4 * (k - 1) / k * packed + 2 * (groups - 1) / groups * packed


@dataclass(frozen=True)
class Cost:
    """Seconds of one all-reduce, and how many of them other work of the node must give up."""

    seconds: float
    stolen: float


def all_reduce_cost(plan: Plan, link: Link, numel: int, message_seconds: float) -> Cost:
    """The cost of reducing ``numel`` numbers.

    The wire takes steps x latency + bytes / bandwidth. A two-shot sends p-1 messages per step, of
    which each but the first costs ``message_seconds`` of its sender (the overhead o of LogP: D.
    Culler et al., PPoPP 1993). The codec works beside the wire, message by message, as in
    :func:`narrowgauge.collectives.link.all_reduce_seconds`, which this equals for two-shot.
    """
    if plan.nodes == 1 or not numel:
        return Cost(0.0, 0.0)
    waiting = plan.steps * link.latency
    if plan.algorithm == "two-shot":
        waiting += plan.steps * (plan.nodes - 2) * message_seconds
    if not plan.coded:
        waiting = plan.steps * link.float32_latency
        wire = plan.bytes_sent(numel) / link.float32_bytes_per_second
        return Cost(waiting + wire, (1 - link.wire_overlap) * wire)
    wire = plan.bytes_sent(numel) / link.bytes_per_second
    codec = codec_seconds(link, numel, plan.nodes)
    pieces = 1 if plan.nodes == 2 else plan.nodes
    messages = max(1, round(numel * plan.bits / 8 / (MESSAGE_BYTES * pieces)))
    if plan.algorithm != "two-shot":
        messages = max(1, plan.steps)  # a piece per step
    hidden = link.wire_overlap * min(wire, codec) * (1 - 1 / messages)
    stolen = (1 - link.wire_overlap) * wire + (1 - link.codec_overlap) * codec
    return Cost(waiting + wire + codec - hidden, stolen)


def with_bandwidth(link: Link, bytes_per_second: float) -> Link:
    """The link at another bandwidth; its processors work as long per byte as before."""
    busy = (1 - link.wire_overlap) / link.bytes_per_second
    return replace(
        link,
        bytes_per_second=bytes_per_second,
        float32_bytes_per_second=bytes_per_second,
        wire_overlap=max(0.0, 1 - busy * bytes_per_second),
    )
