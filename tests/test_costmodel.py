"""The cost model: what it counts, what it promises, what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from narrowgauge.collectives.link import Link, all_reduce_seconds, float32_seconds
from narrowgauge.costmodel import bits_per_second, predict
from narrowgauge.costmodel.algorithms import Plan, all_reduce_cost, with_bandwidth
from narrowgauge.costmodel.networks import Layer, Network, buckets_of, network_of

LINK = Link(1e-3, 1e8, 2e9, 1e-4, 1.2e8)


def plan(algorithm: Any, nodes: int, group_size: int = 16, bits: float = 8) -> Plan:
    return Plan(algorithm, nodes, group_size, bits, coded=bits < 16)


def test_steps_are_those_of_the_aps_paper() -> None:
    assert plan("ring", 256).steps == 510
    assert plan("two-level", 256, 16).steps == 90
    assert plan("two-shot", 256).steps == 2
    assert plan("two-shot", 2).steps == 1
    assert plan("ring", 1).steps == 0


def test_bytes_of_the_busiest_node() -> None:
    for algorithm in ("ring", "two-shot"):
        assert plan(algorithm, 4, bits=32).bytes_sent(1000) == 6000
        assert plan(algorithm, 2).bytes_sent(1000) == 1000
        assert plan(algorithm, 4, bits=4).bytes_sent(1000) == 750
    # 4 groups of 4: 4 x 3/4 within groups, 2 x 3/4 between their masters.
    assert plan("two-level", 16, 4).bytes_sent(1000) == 4500


@pytest.mark.parametrize("nodes", [2, 4, 32])
def test_two_shot_and_ring_cost_what_the_link_says(nodes: int) -> None:
    numel = 5_000_000
    ours = all_reduce_cost(plan("two-shot", nodes), LINK, numel, 0.0)
    assert ours.seconds == pytest.approx(all_reduce_seconds(LINK, numel, 8, nodes))
    gloo = all_reduce_cost(plan("ring", nodes, bits=32), LINK, numel, 0.0)
    assert gloo.seconds == pytest.approx(float32_seconds(LINK, numel, nodes))


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("resnet50", 25_557_032),
        ("vgg16", 138_357_544),
        ("bert-large", 335_141_888),
        ("gpt2", 124_439_808),
    ],
)
def test_built_in_networks_have_the_parameters_of_the_originals(name: str, numel: int) -> None:
    network = network_of(name)
    assert network.numel == numel
    assert sum(bucket.numel for bucket in buckets_of(network)) == numel


def test_built_in_networks_compute_what_is_known_of_them() -> None:
    assert network_of("resnet50").forward_operations == pytest.approx(2 * 4.09e9, rel=1e-2)
    assert network_of("vgg16").forward_operations == pytest.approx(2 * 15.5e9, rel=1e-2)


def test_a_module_is_counted_once_per_parameter() -> None:
    shared = torch.nn.Linear(10, 10)
    frozen = torch.nn.Linear(10, 10).requires_grad_(False)
    network = network_of(torch.nn.Sequential(shared, frozen, shared, torch.nn.Linear(10, 5)))
    assert [layer.sizes for layer in network.layers] == [(100, 10), (50, 5)]


def test_buckets_are_those_of_ddp_from_the_last_layer_on() -> None:
    network = Network("three", (Layer((700,), 3.0), Layer((300, 10), 1.0), Layer((400,), 4.0)))
    buckets = buckets_of(network, first_bytes=1000, bytes=1240)
    assert [(bucket.numel, bucket.ready) for bucket in buckets] == [
        (400, 0.5),
        (310, 0.625),
        (700, 1.0),
    ]


def test_one_bucket_after_the_backward_pass_adds_up() -> None:
    model = torch.nn.Linear(1_000_000, 1, bias=False)  # one bucket, ready at the end
    found = predict(
        model, nodes=2, link=LINK, compute_seconds=0.3, optimizer_seconds=0.01, format="e5m2"
    )
    assert found.float32.seconds == pytest.approx(0.31 + 2e-4 + 4e6 / 1.2e8)
    assert found.narrow.seconds == pytest.approx(0.31 + all_reduce_seconds(LINK, 10**6, 8, 2))
    assert found.narrow.exposed_seconds == pytest.approx(all_reduce_seconds(LINK, 10**6, 8, 2))
    assert found.narrow.bytes_sent == 10**6
    assert found.bf16.bytes_sent == 2 * 10**6


def test_early_buckets_hide_behind_the_backward_pass_where_processors_are_free() -> None:
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers)

    def exposed(link: Link) -> float:
        found = predict(
            model, nodes=2, link=link, compute_seconds=3.0, first_bucket_bytes=1, bucket_bytes=1
        )
        assert found.narrow.communication_seconds == pytest.approx(4 * found_one(link))
        return found.narrow.exposed_seconds / found_one(link)

    def found_one(link: Link) -> float:
        return all_reduce_seconds(link, 10**6, 8, 2)

    assert exposed(LINK) == pytest.approx(1)  # the last one only
    busy = dataclasses.replace(LINK, latency=1e-12, wire_overlap=0.0, codec_overlap=0.0)
    assert exposed(busy) == pytest.approx(4)


@pytest.mark.parametrize("algorithm", ["ring", "two-shot", "two-level"])
@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
def test_slower_links_and_wider_formats_never_make_a_step_shorter(
    algorithm: Any, model: str
) -> None:
    slow_to_fast = [
        predict(model, nodes=64, bandwidth=rate, algorithm=algorithm).narrow.seconds
        for rate in ("100mbit", "1gbit", "10gbit", "100gbit")
    ]
    assert slow_to_fast == sorted(slow_to_fast, reverse=True)
    narrow_to_wide = [
        predict(model, nodes=64, bandwidth="1gbit", algorithm=algorithm, format=f).narrow.seconds
        for f in ("e2m1fn", "e5m2", "bf16", "fp32")
    ]
    assert narrow_to_wide == sorted(narrow_to_wide)


def test_ring_takes_longer_on_more_nodes() -> None:
    seconds = [
        predict("resnet50", nodes=n, bandwidth="10gbit").float32.seconds for n in (1, 8, 256, 4096)
    ]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize("baseline", ["fp32", "bf16"])
def test_the_break_even_is_where_the_step_times_say(baseline: Any) -> None:
    def at(rate: float) -> float:
        return predict("vgg16", nodes=16, bandwidth=rate, baseline=baseline).speed_up

    limit = predict("vgg16", nodes=16, bandwidth="1gbit", baseline=baseline).break_even_bandwidth
    assert at(limit) == pytest.approx(1.05, abs=1e-6)
    assert at(0.9 * limit) > 1.05 > at(1.1 * limit)


def test_the_verdict_says_whether_and_from_which_bandwidth_on() -> None:
    slow = predict("resnet50", nodes=8, bandwidth="1gbit")
    assert "ResNet-50 on 8 nodes at 1 Gbit/s: e5m2 is worth it" in slow.worth_it
    assert "at least 5 % faster below" in slow.worth_it
    fast = predict("resnet50", nodes=8, bandwidth="400gbit")
    assert "e5m2 is not worth it" in fast.worth_it
    assert fast.break_even_bandwidth == pytest.approx(slow.break_even_bandwidth)
    wide = predict("resnet50", nodes=8, bandwidth="1gbit", format="fp32")
    assert wide.break_even_bandwidth == 0
    assert "at no bandwidth" in wide.worth_it
    many = predict("resnet50", nodes=4096, bandwidth="1gbit")  # against 8190 latencies
    assert many.break_even_bandwidth == math.inf
    assert "at any bandwidth" in many.worth_it
    assert "one node sends nothing" in predict("gpt2", nodes=1, bandwidth="1gbit").worth_it


def test_a_measured_link_keeps_its_processor_time_at_another_bandwidth() -> None:
    busy = dataclasses.replace(LINK, wire_overlap=0.9)
    assert with_bandwidth(busy, 2e8).wire_overlap == pytest.approx(0.8)
    assert with_bandwidth(busy, 1e10).wire_overlap == 0
    found = predict("resnet50", nodes=4, link=busy)
    assert found.bandwidth == pytest.approx(8e8)
    assert predict("resnet50", nodes=4, link=busy, bandwidth="1gbit").bandwidth == 1e9


def test_arguments_that_are_given_count_more_than_a_measured_link() -> None:
    settings: dict[str, Any] = {"nodes": 4, "compute_seconds": 1e-3}
    slow = predict("gpt2", link=LINK, codec_bytes_per_second=1e8, **settings)
    fast = predict("gpt2", link=LINK, codec_bytes_per_second=1e11, **settings)
    measured = predict("gpt2", link=LINK, **settings)
    assert slow.narrow.seconds > measured.narrow.seconds > fast.narrow.seconds
    assert slow.float32 == measured.float32 == fast.float32


@pytest.mark.parametrize(
    ("text", "bits"),
    [("10gbit", 1e10), ("2.5 Gbit/s", 2.5e9), ("100m", 1e8), ("64000", 64e3), (5e6, 5e6)],
)
def test_bandwidths_are_read(text: Any, bits: float) -> None:
    assert bits_per_second(text) == bits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet"}, "model is 'resnet'; allowed: resnet50, vgg16, bert-large, gpt2"),
        ({"model": torch.nn.ReLU()}, "ReLU has no parameters that get gradients"),
        ({"model": torch.nn.Linear(2, 2)}, "compute_seconds is missing"),
        ({"nodes": 0}, "nodes is 0; allowed: 1 to 4096"),
        ({"nodes": 4097}, "nodes is 4097"),
        ({"bandwidth": None}, "bandwidth is missing; pass it, such as '10gbit'"),
        ({"bandwidth": "fast"}, "bandwidth is 'fast'; allowed: bits per second"),
        ({"bandwidth": "1.2.3gbit"}, "allowed: bits per second"),
        ({"bandwidth": -1}, "bandwidth is -1"),
        ({"latency": 0}, "latency is 0; it must be positive"),
        ({"format": "fp24"}, "format 'fp24' is unknown"),
        ({"format": "tf32"}, "format 'tf32' cannot travel"),
        ({"baseline": "fp16"}, "baseline is 'fp16'; allowed: 'fp32', 'bf16'"),
        ({"algorithm": "tree"}, "algorithm is 'tree'; allowed: 'ring', 'two-shot', 'two-level'"),
        ({"algorithm": "two-level", "group_size": 3}, "group_size is 3, which does not divide 8"),
        ({"compute_seconds": -1.0}, "compute_seconds is"),
        ({"forward_share": 2}, "forward_share is 2; allowed: 0 to 1"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0; it must be positive"),
        ({"at_least": -0.1}, "at_least is -0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": "resnet50", "nodes": 8, "bandwidth": "1gbit"} | arguments
    with pytest.raises(ValueError, match=message):
        predict(given.pop("model"), **given)


def test_a_model_must_be_a_name_or_a_module() -> None:
    with pytest.raises(TypeError, match="model is a int; allowed"):
        predict(50, nodes=2, bandwidth="1gbit")  # type: ignore[arg-type]
