"""Predict what a training step takes with gradients in float32, in bf16 and in a narrow format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import nn

from narrowgauge.collectives.link import Link
from narrowgauge.collectives.reduce import wire_format
from narrowgauge.costmodel.algorithms import ALGORITHMS, Algorithm, Plan, with_bandwidth
from narrowgauge.costmodel.networks import Network, buckets_of, network_of
from narrowgauge.costmodel.timeline import Compute, StepCost, step_cost
from narrowgauge.formats import FormatLike

Baseline: TypeAlias = Literal["fp32", "bf16"]

MOST_NODES = 4096
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_CODEC = 4e9  # bytes of float32 per second
_BANDWIDTHS = (1e3, 1e15)  # bits/s; the break-even is looked for in between


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict` found.

    Attributes:
        model: name of the network.
        nodes: how many train together, one replica each.
        bandwidth: of the link of a node, bits per second.
        format: name of the narrow format.
        baseline: what it is compared with, ``"fp32"`` or ``"bf16"``.
        algorithm: of the format, see :func:`predict`.
        baseline_algorithm: of float32 and bf16.
        compute_seconds: of a step without communication.
        float32: the step with gradients in float32, by the baseline's algorithm.
        bf16: the same in bf16.
        narrow: the step with gradients in the format, by its algorithm.
        at_least: the gain from which on the format is worth it; 0.05 is 5 %.
        break_even_bandwidth: bits per second below which the format gains that much: 0 if nowhere,
            infinite if everywhere.
    """

    model: str
    nodes: int
    bandwidth: float
    format: str
    baseline: Baseline
    algorithm: Algorithm
    baseline_algorithm: Algorithm
    compute_seconds: float
    float32: StepCost
    bf16: StepCost
    narrow: StepCost
    at_least: float
    break_even_bandwidth: float

    @property
    def speed_up(self) -> float:
        """Seconds of the baseline's step / seconds of the format's."""
        return self._baseline.seconds / self.narrow.seconds

    @property
    def worth_it(self) -> str:
        """The verdict, as a sentence."""
        where = f"{self.model} on {self.nodes} nodes at {bandwidth_text(self.bandwidth)}"
        if self.nodes == 1:
            return f"{self.model} on one node: not worth it, one node sends nothing."
        gains = self.speed_up >= 1 + self.at_least
        times = (
            f"{self.narrow.seconds * 1e3:.4g} ms a step by {self.algorithm} instead of "
            f"{self._baseline.seconds * 1e3:.4g} ms in {self.baseline} by "
            f"{self.baseline_algorithm}, {self.speed_up:.2f} times as fast"
        )
        limit = self.break_even_bandwidth
        gain = f"at least {self.at_least * 100:g} % faster"
        if limit == 0:
            border = f"it is {gain} at no bandwidth"
        elif limit == math.inf:
            border = f"it is {gain} at any bandwidth"
        else:
            border = f"it is {gain} below {bandwidth_text(limit)}"
        return f"{where}: {self.format} is {'' if gains else 'not '}worth it ({times}); {border}."

    @property
    def _baseline(self) -> StepCost:
        return self.float32 if self.baseline == "fp32" else self.bf16


def predict(
    model: str | nn.Module,
    *,
    nodes: int,
    bandwidth: float | str | None = None,
    latency: float | None = None,
    link: Link | None = None,
    format: FormatLike = "e5m2",
    baseline: Baseline = "fp32",
    algorithm: Algorithm = "two-shot",
    baseline_algorithm: Algorithm = "ring",
    group_size: int = 16,
    compute_seconds: float | None = None,
    optimizer_seconds: float = 0.0,
    forward_share: float = 1 / 3,
    batch: int = 32,
    operations_per_second: float = 1e13,
    first_bucket_bytes: int = 1 << 20,
    bucket_bytes: int = 25 << 20,
    codec_bytes_per_second: float | None = None,
    message_seconds: float = 5e-6,
    at_least: float = 0.05,
) -> Prediction:
    """Predict a data-parallel training step with gradients in a narrow format and in float32.

    Nothing is run. Latency, bandwidth and codec come from the arguments, or measured, in ``link``;
    an argument that is given counts more than ``link``.

    Args:
        model: ``"resnet50"``, ``"vgg16"``, ``"bert-large"``, ``"gpt2"``, or any module.
        nodes: 1 to 4096, one replica each.
        bandwidth: of a node's link in each direction, bits per second, or text as ``"10gbit"``.
        latency: seconds of a small message, one way; 50 microseconds unless ``link`` says.
        link: measured, see ``narrowgauge calibrate``; without it a processor of its own sends and
            codes, as beside a GPU.
        format: of the compressed gradients, as in :func:`narrowgauge.gradients.compress`.
        baseline: what the format is compared with.
        algorithm: of the compressed all-reduce: ``"two-shot"`` (this library's), ``"ring"``,
            ``"two-level"``.
        baseline_algorithm: of float32 and bf16; Gloo's is the ring.
        group_size: nodes per group of a two-level reduction; must divide ``nodes``.
        compute_seconds: forward and backward pass of a step on one node, without communication. For
            built-in networks by default 3 x forward operations x ``batch`` /
            ``operations_per_second`` (a backward pass takes twice a forward pass).
        optimizer_seconds: what follows the backward pass.
        forward_share: share of ``compute_seconds`` in the forward pass.
        batch: samples per node and step, for that default.
        operations_per_second: that a node really makes, for that default; 10^13 by default.
        first_bucket_bytes: DDP's first bucket.
        bucket_bytes: DDP's other buckets (``bucket_cap_mb``).
        codec_bytes_per_second: bytes of float32 encoded and decoded per second; 4e9 unless
            ``link`` says.
        message_seconds: what a message costs its sender, where one step sends several.
        at_least: the gain from which on the format is called worth it.

    Raises:
        ValueError: an argument is unknown, out of range or missing; the text says what is allowed.
        TypeError: ``model`` is neither a name nor a module.
    """
    network = network_of(model)
    narrow_format = wire_format(format)
    _check_choice("algorithm", algorithm, ALGORITHMS)
    _check_choice("baseline_algorithm", baseline_algorithm, ALGORITHMS)
    _check_choice("baseline", baseline, ("fp32", "bf16"))
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"nodes is {nodes!r}; allowed: 1 to {MOST_NODES}")
    if "two-level" in (algorithm, baseline_algorithm) and (group_size < 1 or nodes % group_size):
        raise ValueError(
            f"group_size is {group_size}, which does not divide {nodes} nodes into equal groups; "
            "pass a divisor, or another algorithm"
        )
    for name, value in (
        ("operations_per_second", operations_per_second),
        ("batch", batch),
        ("first_bucket_bytes", first_bucket_bytes),
        ("bucket_bytes", bucket_bytes),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be positive and finite")
    for name, value in (
        ("optimizer_seconds", optimizer_seconds),
        ("message_seconds", message_seconds),
        ("at_least", at_least),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    if not 0 <= forward_share <= 1:
        raise ValueError(f"forward_share is {forward_share}; allowed: 0 to 1")
    compute = _compute(
        network, compute_seconds, forward_share, optimizer_seconds, batch, operations_per_second
    )
    measured = _link(link, bandwidth, latency, codec_bytes_per_second)
    buckets = buckets_of(network, first_bucket_bytes, bucket_bytes)

    def cost(link: Link, plan: Plan) -> StepCost:
        return step_cost(buckets, compute, plan, link, message_seconds)

    plans = {
        "fp32": Plan(baseline_algorithm, nodes, group_size, 32, coded=False),
        "bf16": Plan(baseline_algorithm, nodes, group_size, 16, coded=False),
        "narrow": Plan(algorithm, nodes, group_size, narrow_format.bits, coded=True),
    }

    def gains(bits_per_second: float) -> bool:
        other = with_bandwidth(measured, bits_per_second / 8)
        before, after = cost(other, plans[baseline]), cost(other, plans["narrow"])
        return before.seconds >= (1 + at_least) * after.seconds

    return Prediction(
        model=network.name,
        nodes=nodes,
        bandwidth=8 * measured.bytes_per_second,
        format=narrow_format.name,
        baseline=baseline,
        algorithm=algorithm,
        baseline_algorithm=baseline_algorithm,
        compute_seconds=compute.seconds,
        float32=cost(measured, plans["fp32"]),
        bf16=cost(measured, plans["bf16"]),
        narrow=cost(measured, plans["narrow"]),
        at_least=at_least,
        break_even_bandwidth=_break_even(gains) if nodes > 1 else 0.0,
    )


def bits_per_second(bandwidth: float | str) -> float:
    """A bandwidth as a number: bits per second, or text such as ``"100mbit"`` or ``"2.5gbit"``.

    Raises:
        ValueError: it is neither, or not positive and finite.
    """
    value = bandwidth
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9.]+) ?([kmgt]?)(?:bit)?(?:/s)?", value.strip().lower())
        try:
            value = float(match[1]) * _PREFIXES.get(match[2], 1.0) if match else math.nan
        except ValueError:  # such as 1.2.3
            value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"bandwidth is {bandwidth!r}; allowed: bits per second, positive and finite, or text "
            "such as '100mbit', '2.5gbit'"
        )
    return value


def bandwidth_text(bits_per_second: float) -> str:
    """A bandwidth for people: ``"100 Mbit/s"``."""
    for prefix in ("t", "g", "m", "k"):
        if bits_per_second >= _PREFIXES[prefix]:
            letter = prefix if prefix == "k" else prefix.upper()
            return f"{bits_per_second / _PREFIXES[prefix]:.3g} {letter}bit/s"
    return f"{bits_per_second:.3g} bit/s"


def _link(
    link: Link | None,
    bandwidth: float | str | None,
    latency: float | None,
    codec_bytes_per_second: float | None,
) -> Link:
    if link is None:
        if bandwidth is None:
            raise ValueError("bandwidth is missing; pass it, such as '10gbit', or a measured link")
        rate = bits_per_second(bandwidth) / 8
        seconds = 50e-6 if latency is None else latency
        link = Link(seconds, rate, _CODEC, seconds, rate)
    elif bandwidth is not None:
        link = with_bandwidth(link, bits_per_second(bandwidth) / 8)
    if latency is not None:
        link = replace(link, latency=latency, float32_latency=latency)
    if codec_bytes_per_second is not None:
        link = replace(link, codec_bytes_per_second=codec_bytes_per_second)
    return link


def _compute(
    network: Network,
    seconds: float | None,
    forward_share: float,
    optimizer_seconds: float,
    batch: int,
    operations_per_second: float,
) -> Compute:
    if seconds is None:
        if network.forward_operations is None:
            raise ValueError(
                f"compute_seconds is missing; how long {network.name} computes is known for the "
                "built-in networks only: measure a step without communication and pass its seconds"
            )
        seconds = 3 * network.forward_operations * batch / operations_per_second
    if not 0 < seconds < math.inf:
        raise ValueError(f"compute_seconds is {seconds}; it must be positive and finite")
    return Compute(forward_share * seconds, (1 - forward_share) * seconds, optimizer_seconds)


def _break_even(gains: Callable[[float], bool]) -> float:
    """The bandwidth up to which, from the slowest link on, the format gains enough."""
    low, end = _BANDWIDTHS
    if not gains(low):
        return 0.0
    while gains(2 * low):  # first a bracket, for a gain may come back on far faster links
        low *= 2
        if low > end:
            return math.inf
    high = 2 * low
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
