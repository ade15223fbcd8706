"""What the link between ranks costs: measured on real ranks, and computed by hand."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from narrowgauge.collectives.link import (
    Link,
    all_reduce_seconds,
    codec_seconds,
    float32_seconds,
    measure_link,
)
from narrowgauge.collectives.transport import Transport
from tests.ranks import run_ranks

LINK = Link(
    latency=1e-3,
    bytes_per_second=1e8,
    codec_bytes_per_second=2e9,
    float32_latency=1e-4,
    float32_bytes_per_second=1.2e8,
)


def measured() -> tuple[float, ...]:
    return dataclasses.astuple(measure_link(Transport(None, timedelta(seconds=30))))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_measures_the_same_positive_numbers(world_size: int) -> None:
    first, *others = run_ranks(measured, world_size)
    assert all(other == first for other in others)
    assert all(value > 0 for value in first[:5])
    assert all(0 <= value <= 1 for value in first[5:])


def test_one_rank_has_no_link() -> None:
    (raised,) = run_ranks(measured, 1, catch=True)
    assert "one rank, which sends nothing" in raised.message


def test_two_ranks_take_one_exchange() -> None:
    # 8 MB of codes: 15 messages; 80 ms on the wire; 1.5 codec passes of 32 MB: 24 ms.
    numel = 8_000_000
    assert codec_seconds(LINK, numel, 2) == pytest.approx(24e-3)
    assert all_reduce_seconds(LINK, numel, 8, 2) == pytest.approx(1e-3 + 80e-3 + 24e-3 / 15)


def test_four_ranks_take_two_exchanges() -> None:
    # 8 MB of codes: 4 chunks of 4 messages; 1.5 x 80 ms; 1.625 passes: 26 ms.
    numel = 8_000_000
    expected = 2e-3 + 120e-3 + 26e-3 / 4
    assert all_reduce_seconds(LINK, numel, 8, 4) == pytest.approx(expected)


def test_without_overlap_codec_and_wire_add_up() -> None:
    link = dataclasses.replace(LINK, wire_overlap=0.0)
    assert all_reduce_seconds(link, 8_000_000, 8, 2) == pytest.approx(105e-3)


def test_float32_takes_a_ring() -> None:
    assert float32_seconds(LINK, 3_000_000, 4) == pytest.approx(6e-4 + 18e6 / 1.2e8)
    assert float32_seconds(LINK, 3_000_000, 4, 2) == pytest.approx(6e-4 + 9e6 / 1.2e8)


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_more_numbers_and_more_bits_take_longer(ranks: int) -> None:
    sizes = [1, 1000, 10**6, 10**7, 10**8]
    for seconds in (
        [all_reduce_seconds(LINK, size, 8, ranks) for size in sizes],
        [all_reduce_seconds(LINK, 10**8, bits, ranks) for bits in (4, 8, 16, 32)],
        [float32_seconds(LINK, size, ranks) for size in sizes],
    ):
        assert seconds == sorted(set(seconds))


def test_one_rank_and_no_numbers_take_no_time() -> None:
    for numel, ranks in ((1000, 1), (0, 4)):
        assert all_reduce_seconds(LINK, numel, 8, ranks) == 0
        assert float32_seconds(LINK, numel, ranks) == 0


def test_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="latency is 0; it must be positive and finite"):
        dataclasses.replace(LINK, latency=0)
    with pytest.raises(ValueError, match=r"wire_overlap is 1\.5; allowed: 0 to 1"):
        dataclasses.replace(LINK, wire_overlap=1.5)
    with pytest.raises(ValueError, match="world_size 0; allowed: numel from 0"):
        all_reduce_seconds(LINK, 1, 8, 0)
    with pytest.raises(ValueError, match="numel is -1"):
        float32_seconds(LINK, -1, 2)
