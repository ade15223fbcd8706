"""Feeds between real ranks: the same samples, once each, together to the end; and on again."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from narrowgauge import Feed, Ledger
from narrowgauge.inputs import FeedError
from narrowgauge.report import stalls
from tests.feed_data import Images, Numbers, Slow
from tests.ranks import Raised, run_ranks

Source = Literal["shard", "rank0"]


def feed_threads() -> list[str]:
    """Threads that feeds left behind, after a moment to end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("feed")]
        if not names:
            return []
        time.sleep(0.02)
    return names


def read_images(source: Source, samples: int, batch: int, tail: Any, workers: int) -> Any:
    loader = DataLoader(
        Images(samples),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    ledger = Ledger()
    found = []
    with Feed(loader, source=source, tail=tail, seed=7, timeout=20, ledger=ledger) as feed:
        for _ in range(2):
            for images, numbers, names in feed:
                info = feed.batch
                assert info is not None
                assert len(images) == len(numbers) == len(names)
                assert images.dtype == torch.uint8
                assert images.flatten(1).float().mean(1).tolist() == numbers.tolist()
                assert list(names) == [f"image {number}" for number in numbers.tolist()]
                found.append((info.epoch, info.number, numbers.tolist(), info.counts, info.weight))
        state = feed.state_dict()
        steps = ledger.as_dict()["inputs"]["steps"]
        report = feed.stalls()
    return found, state, steps, report.as_dict(), feed_threads()


@pytest.mark.parametrize(("world", "samples", "batch"), [(2, 21, 8), (3, 10, 4), (3, 2, 8)])
def test_every_rank_gets_its_samples_once_whoever_reads(
    world: int, samples: int, batch: int
) -> None:
    by_rank0 = run_ranks(read_images, world, "rank0", samples, batch, "exact", 0)
    by_all = run_ranks(read_images, world, "shard", samples, batch, "exact", 0)
    for rank in range(world):
        assert by_rank0[rank][0] == by_all[rank][0]
        assert by_rank0[rank][1] == by_all[rank][1] == by_rank0[0][1]
        assert by_rank0[rank][4] == by_all[rank][4] == []
        assert by_rank0[rank][2] == 2 * -(-samples // batch)
        for _, number, numbers, counts, weight in by_all[rank][0]:
            assert counts[rank] == len(numbers)
            assert sum(counts) == min(batch, samples - number * batch)
            assert weight == pytest.approx(counts[rank] * world / sum(counts))
    assert by_rank0[0][3]["high_water_bytes"] > 0
    for epoch in (0, 1):
        got = [n for rank in by_all for e, _, ns, *_ in rank[0] if e == epoch for n in ns]
        assert sorted(got) == list(range(samples))
    orders = [[ns for e, _, ns, *_ in by_all[0][0] if e == epoch] for epoch in (0, 1)]
    if samples > 2:
        assert orders[0] != orders[1]


@pytest.mark.parametrize("source", ["rank0", "shard"])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_equal_parts_for_all(source: Source, tail: str) -> None:
    ranks = run_ranks(read_images, 2, source, 21, 8, tail, 0)
    for batches, *_ in ranks:
        assert {len(numbers) for _, _, numbers, *_ in batches} == {4}
    counted = [n for r, rank in enumerate(ranks) for _, _, ns, c, _ in rank[0] for n in ns[: c[r]]]
    assert len(counted) == 2 * (16 if tail == "drop" else 21)


def test_loader_workers_read_and_end() -> None:
    one, two = run_ranks(read_images, 2, "rank0", 30, 8, "exact", 2)
    assert sorted(n for e, _, ns, *_ in one[0] + two[0] if e == 0 for n in ns) == list(range(30))
    assert one[4] == two[4] == []


def shapes_that_change(source: Source) -> list[Any]:
    batches = [
        {"x": torch.ones(4, 2)},
        {"x": torch.ones(6, 3).double(), "name": "wider"},
        (torch.zeros(2, 0), torch.tensor(True)),
        {"x": torch.ones(1, 2)},
        {"x": torch.ones(0, 2)},
        {"x": torch.ones(4, 2)},
    ]
    return list(Feed(batches, source=source, timeout=10))


@pytest.mark.parametrize("source", ["rank0", "shard"])
def test_the_structure_may_change_and_parts_be_empty(source: Source) -> None:
    first, second = run_ranks(shapes_that_change, 2, source)
    assert [type(batch) for batch in second] == [dict, dict, tuple, dict, dict]
    assert second[1]["x"].dtype == torch.float64
    assert second[1]["x"].shape == (3, 3)
    assert second[1]["name"] == "wider"
    assert second[2][1].item() is True
    assert second[3]["x"].shape == (0, 2)
    assert first[3]["x"].shape == (1, 2)


def kept_batches() -> list[Any]:
    feed = Feed(DataLoader(Numbers(60), batch_size=4), source="rank0", depth=2, timeout=10)
    kept = list(feed)  # nothing is overwritten in the hands of who keeps it
    last = None
    for batch in feed:
        last = batch
        if feed.batch.number == 3:  # type: ignore[union-attr]
            break
    list(feed)
    return [torch.cat(kept).tolist(), None if last is None else last.tolist()]


def test_a_batch_that_is_kept_is_not_overwritten() -> None:
    first, second = run_ranks(kept_batches, 2)
    assert second[0] == [n for n in range(60) if n % 4 > 1]
    assert first[0] == [n for n in range(60) if n % 4 < 2]
    assert second[1] == [14, 15]


def run_to(stop: int, state: Any, batch: int, source: Source, kind: str) -> tuple[list[int], Any]:
    """Samples of ``stop`` batches behind a state, and the state then."""
    dataset = Images(47)
    if kind == "sampler":
        loader = DataLoader(dataset, batch_size=batch, sampler=Backwards(47))
    elif kind == "batches":
        loader = DataLoader(dataset, batch_sampler=BatchSampler(Backwards(47), batch, False))
    else:
        loader = DataLoader(dataset, batch_size=batch, shuffle=True)
    found: list[int] = []
    with Feed(loader, source=source, timeout=10) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for _, numbers, _ in feed:
            found += numbers.tolist()
            if feed.batch is not None and feed.batch.number + 1 == stop:
                break
        return found, feed.state_dict()


class Backwards(torch.utils.data.Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(n + self.epoch) % self.count for n in reversed(range(self.count))])

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("kind", "worlds", "batches", "sources"),
    [
        ("shuffled", (3, 2), (6, 10), ("rank0", "shard")),
        ("sampler", (1, 3), (5, 5), ("shard", "rank0")),
        ("batches", (2, 3), (4, 4), ("rank0", "rank0")),
    ],
)
def test_a_run_goes_on_at_another_world_size(
    kind: str, worlds: Any, batches: Any, sources: Any
) -> None:
    first = run_ranks(run_to, worlds[0], 3, None, batches[0], sources[0], kind)
    state = first[0][1]
    assert all(rank[1] == state for rank in first)
    assert state["samples"] == 3 * batches[0]
    second = run_ranks(run_to, worlds[1], 99, state, batches[1], sources[1], kind)
    assert second[0][1]["epoch"] == 1
    got = [number for rank in first + second for number in rank[0]]
    assert sorted(got) == list(range(47))


def test_nothing_is_read_again_when_a_run_goes_on() -> None:
    reads: list[int] = []

    class Counted(Numbers):
        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return index

    loader = DataLoader(Counted(1_000_000), batch_size=10)
    with Feed(loader) as feed:
        state = {**feed.state_dict(), "samples": 999_980}
        import numpy

        from narrowgauge.inputs.source import Digest

        digest = Digest()
        digest.add(numpy.arange(999_980))
        state["digest"] = digest.text
        feed.load_state_dict(state)
        assert torch.cat(list(feed)).tolist() == list(range(999_980, 1_000_000))
        assert reads == list(range(999_980, 1_000_000))


def resume_from(state: Any, samples: int) -> None:
    feed = Feed(DataLoader(Numbers(samples), batch_size=6, shuffle=True), source="rank0", timeout=5)
    feed.load_state_dict(state)
    next(iter(feed))


def test_a_digest_proves_that_the_samples_are_the_same() -> None:
    _, state = run_ranks(run_to, 1, 3, None, 6, "shard", "shuffled")[0]
    other = {**state, "seed": state["seed"] ^ 1}
    for result in run_ranks(resume_from, 2, other, 47, catch=True):
        assert isinstance(result, Raised)
        assert "first 18 samples of epoch 0 are others than when the state was saved" in (
            result.message
        )


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        raise ZeroDivisionError


def fail_and_leave_at_once() -> None:
    """Rank 0's error is told, but the process is gone before it says that there is no more."""
    from narrowgauge.inputs.wire import Sender

    Sender.announce = lambda self, kind: time.sleep(60)  # type: ignore[method-assign]
    feed = Feed(DataLoader(Broken(30), batch_size=6), source="rank0", timeout=5)
    next(iter(feed))


def test_a_rank_whose_peer_ended_with_an_error_says_which() -> None:
    first, second = run_ranks(fail_and_leave_at_once, 2, catch=True)
    assert first.type_name == "ZeroDivisionError"
    assert second.type_name == "FeedError"
    assert "rank 0 failed: ZeroDivisionError" in second.message


def own_states() -> None:
    feed = Feed(DataLoader(Numbers(30), batch_size=6), source="rank0", timeout=5)
    if dist.get_rank() == 1:
        feed.load_state_dict({**feed.state_dict(), "epoch": 1})
    next(iter(feed))


def test_ranks_with_different_states_all_raise() -> None:
    for result in run_ranks(own_states, 2, catch=True):
        assert isinstance(result, Raised)
        assert "would go on in epoch 1 behind sample 0, rank 0 goes on in epoch 0" in result.message
        assert "Load the same state on all ranks" in result.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": -1}, "samples of the state is -1; allowed: whole numbers from 0"),
        ({"samples": 99}, "behind sample 99 of 30: it is damaged"),
        ({"epoch": "1"}, "epoch of the state is '1'"),
        ({"digest": "zz"}, "digest of the state is 'zz'; allowed: 32 hexadecimal digits"),
        ({"length": 31}, "a source with 31 samples, this one has 30"),
        ({"version": 9}, "version is 9; this narrowgauge knows 1"),
        ({"seed": 1 << 70}, "seed of the state"),
        ({"samples": None}, "samples of the state is None"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], words: str) -> None:
    with Feed(DataLoader(Numbers(30), batch_size=6)) as feed:
        with pytest.raises(ValueError, match=words):
            feed.load_state_dict({**feed.state_dict(), **change})
        with pytest.raises(ValueError, match="the state lacks 'epoch', "):
            feed.load_state_dict({"version": 1})
        with pytest.raises(ValueError, match="the state lacks 'version', "):
            feed.load_state_dict(None)  # type: ignore[arg-type]


class Counting(IterableDataset[int]):
    """A stream that knows where it is."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < self.count:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_cannot_go_on_says_so_and_how() -> None:
    with Feed(DataLoader(Counting(30), batch_size=6)) as feed:
        for batch in feed:
            assert batch.tolist() == list(range(6))
            break
        state = feed.state_dict()
    with Feed(DataLoader(Counting(30), batch_size=6)) as feed:
        with pytest.raises(ValueError, match=r"no state of its own.*StatefulDataLoader.*skip=True"):
            feed.load_state_dict(state)
        feed.load_state_dict(state, skip=True)
        assert torch.cat(list(feed)).tolist() == list(range(6, 30))
        assert feed.state_dict()["epoch"] == 1
    with Feed(DataLoader(Counting(3), batch_size=6)) as feed:
        feed.load_state_dict(state, skip=True)
        with pytest.raises(ValueError, match="ended after 3 samples, but 6 of it were delivered"):
            list(feed)


def stateful(kind: str, stop: int, state: Any) -> tuple[list[int], Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "stream":
        loader = StatefulDataLoader(Counting(30), batch_size=4)
    else:
        loader = StatefulDataLoader(Numbers(30), batch_size=4, shuffle=True)
    found: list[int] = []
    with Feed(loader, source="rank0", timeout=10) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for numbers in feed:
            found += numbers.tolist()
            if feed.batch is not None and feed.batch.number + 1 == stop:
                break
        return found, feed.state_dict()


@pytest.mark.parametrize("kind", ["stream", "map"])
def test_torchdatas_loader_goes_on_by_its_own_state(kind: str) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    first = run_ranks(stateful, 2, kind, 3, None)
    second = run_ranks(stateful, 3, kind, 99, first[0][1])
    assert sorted(n for found, _ in first + second for n in found) == list(range(30))
    assert sum(len(found) for found, _ in first) == 12


def test_a_generator_is_read_once_only() -> None:
    with Feed(torch.full((2,), n) for n in range(5)) as feed:
        assert len(list(feed)) == 5
        with pytest.raises(ValueError, match="a generator, which can be read only once"):
            list(feed)


def test_a_feed_works_in_one_process_and_as_long_as_its_loader() -> None:
    with Feed(DataLoader(Numbers(21), batch_size=8)) as feed:
        assert len(feed) == len(list(feed)) == 3
        assert feed.batch is not None
        assert (feed.batch.total, feed.batch.count, feed.batch.weight) == (5, 5, 1.0)
    with Feed(DataLoader(Numbers(21), batch_size=8), tail="drop") as feed:
        assert len(feed) == len(list(feed)) == 2
    found = []
    for part in Feed(DataLoader(Numbers(21), batch_size=8)):  # nobody else holds it
        found += part.tolist()
    assert found == list(range(21))
    with Feed([torch.zeros(1)] * 4) as feed:
        assert len(feed) == len(list(feed)) == 4
    with Feed(DataLoader(Numbers(0))) as feed:
        assert list(feed) == list(feed) == []
    with Feed(iter([torch.zeros(1)])) as feed, pytest.raises(TypeError, match="does not know how"):
        len(feed)


def test_on_device_sees_the_narrow_part_and_without_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)

    def normalise(batch: Any) -> Any:
        images, numbers, _ = batch
        assert images.dtype == torch.uint8
        return images.float().div(255) * weight, numbers

    with Feed(DataLoader(Images(20), batch_size=5), on_device=normalise) as feed:
        for images, numbers in feed:
            assert not images.requires_grad
            assert torch.equal(images[:, 0, 0, 0], numbers / 255)


def test_two_iterations_of_one_feed_are_refused_and_two_feeds_work() -> None:
    with Feed(DataLoader(Numbers(20), batch_size=5)) as feed:
        first = iter(feed)
        next(first)
        with pytest.raises(RuntimeError, match="iterated already; finish that, or close"):
            iter(feed)
        with pytest.raises(RuntimeError, match="is being iterated; load the state before"):
            feed.load_state_dict(feed.state_dict())
        first.close()  # type: ignore[attr-defined]
        assert len(list(feed)) == 4
        with Feed(DataLoader(Numbers(20), batch_size=5)) as other:
            assert len(list(zip(feed, other, strict=True))) == 4
    with pytest.raises(RuntimeError, match="this feed is closed; make a new one"):
        iter(feed)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"source": "rank1"}, ValueError, "source is 'rank1'; allowed: 'shard', 'rank0'"),
        ({"tail": "wrap"}, ValueError, "tail is 'wrap'; allowed: 'exact', 'drop', 'pad'"),
        ({"depth": 0}, ValueError, "depth is 0; allowed: whole numbers from 1"),
        ({"max_bytes": 1.5}, ValueError, "max_bytes is 1.5; allowed: whole numbers from 1"),
        ({"on_device": "cpu"}, TypeError, "on_device is 'cpu'; allowed: a function of a batch"),
        ({"timeout": 0}, ValueError, "timeout is 0; allowed: 0.05 seconds"),
        ({"timeout": timedelta(0)}, ValueError, "timeout is datetime.timedelta"),
        ({"seed": -1}, ValueError, "seed is -1; allowed"),
        ({"seed": 0.5}, TypeError, "seed is 0.5; allowed: a whole number, or None"),
        ({"ledger": {}}, TypeError, "ledger is {}; allowed: a Ledger"),
        ({"loader": Numbers(3)}, TypeError, "a Numbers, a dataset of single samples; wrap it"),
        ({"loader": Counting(3)}, TypeError, "a Counting; pass DataLoader"),
        ({"loader": None}, TypeError, "loader is a NoneType; allowed: a torch.utils.data.DataL"),
        ({"loader": 3}, TypeError, "loader is a int; allowed"),
        (
            {
                "loader": DataLoader(
                    Numbers(4), sampler=DistributedSampler(Numbers(4), num_replicas=2, rank=0)
                )
            },
            ValueError,
            "has a DistributedSampler, but the feed splits batches among the ranks itself",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    loader = arguments.pop("loader", DataLoader(Numbers(4)))
    with pytest.raises(error, match=words):
        Feed(loader, **arguments)


def slow_consumer(source: Source, max_bytes: int) -> tuple[int, int, int]:
    """High water, samples, and the most batches that were ahead."""
    images = DataLoader(Images(64), batch_size=8)  # 1536 bytes of images, 64 of numbers
    samples = 0
    with Feed(images, source=source, depth=8, max_bytes=max_bytes, timeout=10) as feed:
        for _, numbers, _ in feed:
            samples += len(numbers)
            time.sleep(0.03)
        return feed.stalls().high_water_bytes, samples, feed.ledger.as_dict()["inputs"]["steps"]


@pytest.mark.parametrize("source", ["rank0", "shard"])
def test_memory_stays_below_max_bytes_with_a_slow_consumer(source: Source) -> None:
    for limit in (3_200, 5_000, 100_000):
        for high_water, samples, steps in run_ranks(slow_consumer, 2, source, limit):
            assert high_water <= limit
            assert (samples, steps) == (32, 8)
    for result in run_ranks(slow_consumer, 2, source, 1_000, catch=True):
        assert isinstance(result, Raised)
        assert "max_bytes is 1,000; it must be " in result.message


def consume_slowly() -> int:
    """A step that takes longer than the timeout, and a rank that is busy elsewhere as long."""
    loader = DataLoader(Slow(12, 0.01), batch_size=2)
    count = 0
    with Feed(loader, source="rank0", timeout=0.6) as feed:
        for _ in feed:
            count += 1
            if count == 2:
                time.sleep(1.3)
            if count == 4 and dist.get_rank() == 0:
                time.sleep(1.3)
            if count == 5 and dist.get_rank() == 1:
                time.sleep(1.3)
    return count


def test_a_long_step_is_no_dead_rank() -> None:
    assert run_ranks(consume_slowly, 2) == [6, 6]


@pytest.mark.parametrize("source", ["rank0", "shard"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_break_on_one_rank_ends_the_loop_on_all(rank: int, source: Source) -> None:
    for number, (found, warned, ended_by, threads) in enumerate(
        run_ranks(stop_on, 3, rank, source)
    ):
        assert found == [5, 5, 5]
        assert ended_by == (rank,)
        assert threads == []
        assert all(len(messages) == (number != rank) for messages in warned)
        if number != rank:
            assert all(f"rank {rank} left the loop" in messages[0] for messages in warned)


def stop_on(rank: int, source: Source) -> Any:
    found, warned = [], []
    feed = Feed(DataLoader(Numbers(80), batch_size=4), source=source, timeout=10)
    for _ in range(3):
        count = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in feed:
                count += 1
                dist.all_reduce(torch.ones(1))  # nobody is left alone in it
                if dist.get_rank() == rank and count == 5:
                    break
        found.append(count)
        warned.append([str(each.message) for each in caught])
    ended_by = feed.ended_by
    feed.close()
    return found, warned, ended_by, feed_threads()


def test_a_feed_error_is_a_runtime_error() -> None:
    assert issubclass(FeedError, RuntimeError)


def random_runs(first: int, count: int) -> list[list[int]]:
    """Runs that are cut somewhere and go on in a new feed; what this rank counted in each."""
    found = []
    for number in range(first, first + count):
        draw = random.Random(number)
        world = dist.get_world_size()
        tail: Any = draw.choice(["exact", "drop", "pad"])
        batch = world * draw.randint(1, 4) if tail == "drop" else draw.randint(1, 12)
        samples, depth = draw.randint(1, 40), draw.randint(1, 4)
        stop, shuffle = draw.randint(1, 6), draw.random() < 0.5
        loader = DataLoader(Numbers(samples), batch_size=batch, shuffle=shuffle)
        counted: list[int] = []
        state = None
        for source in (draw.choice(["rank0", "shard"]), draw.choice(["rank0", "shard"])):
            with Feed(
                loader,
                source=source,  # type: ignore[arg-type]
                tail=tail,
                depth=depth,
                seed=number,
                timeout=20,
                max_bytes=draw.choice([2 * 8 * batch, 1000 * batch]),
            ) as feed:
                if state is not None:
                    if state["epoch"]:
                        break
                    feed.load_state_dict(state)
                for part in feed:
                    assert feed.batch is not None
                    counted += part[: feed.batch.count].tolist()
                    if state is None and feed.batch.number + 1 == stop:
                        break
                state = feed.state_dict()
        assert state is not None
        assert (state["epoch"], state["samples"]) == (1, 0)
        found.append(counted)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_sample_comes_once_in_random_runs_on_real_ranks(world: int) -> None:
    ranks = run_ranks(random_runs, world, 1000 * world, 30, timeout=120)
    for number, parts in enumerate(zip(*ranks, strict=True), 1000 * world):
        draw = random.Random(number)
        tail = draw.choice(["exact", "drop", "pad"])
        batch = world * draw.randint(1, 4) if tail == "drop" else draw.randint(1, 12)
        samples = draw.randint(1, 40)
        complete = samples // batch * batch if tail == "drop" else samples
        got = sorted(chain(*parts))
        assert len(got) == len(set(got)) == complete, number


def workers_stay(iterations: int) -> tuple[list[int], set[int]]:
    loader = DataLoader(
        Pids(24),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    counts, pids = [], set()
    with Feed(loader, source="rank0", timeout=20) as feed:
        for _ in range(iterations):
            count = 0
            for part in feed:
                pids |= set(part.tolist())
                count += 1
            counts.append(count)
    return counts, pids


class Pids(Numbers):
    def __getitem__(self, index: int) -> Any:
        return os.getpid()


def test_persistent_workers_stay_from_epoch_to_epoch() -> None:
    for counts, pids in run_ranks(workers_stay, 2, 3):
        assert counts == [6, 6, 6]
        assert len(pids) == 1


def test_the_ledger_and_the_report_hold_waiting_and_reading() -> None:
    with Feed(DataLoader(Slow(8, 0.02), batch_size=2)) as feed:
        for _ in feed:
            pass
        summary = feed.ledger.as_dict()["inputs"]
        assert summary["steps"] == 4
        assert 0.03 < summary["read_seconds_per_step"] < 0.5
        assert summary["wait_seconds_per_step"] > 0.02
        stalled = feed.stalls()
        assert stalled.slow_stage == "read"
        assert "give the DataLoader more num_workers" in stalled.sentence
        table = stalls({"rank 0": stalled.as_dict()})
        assert table.rows[0][0] == "rank 0"
        assert f"rank 0: {stalled.sentence}" in table.notes
        console = Console(width=200)
        with console.capture() as capture:
            console.print(stalled.table())
            console.print(feed.ledger.table())
        assert "high water MB" in capture.get()
        assert "wait ms" in capture.get()


def from_subgroup() -> Any:
    pair = dist.new_group([2, 0])  # its ranks 0 and 1
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="not a member of the given process group"):
            Feed(DataLoader(Numbers(12), batch_size=4), group=pair)
        return None
    loader = DataLoader(Numbers(12), batch_size=4) if dist.get_rank(pair) == 0 else None
    with torch.device("meta"), Feed(loader, source="rank0", group=pair, tail="drop") as feed:
        assert len(feed) == 3
        return torch.cat(list(feed)).tolist()


def test_a_feed_among_some_of_the_ranks() -> None:
    first, _, second = run_ranks(from_subgroup, 3)
    assert sorted(first + second) == list(range(12))


def test_the_same_seed_gives_the_same_order_as_torch_lets_one_say_it() -> None:
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        with Feed(DataLoader(Numbers(50), batch_size=7, shuffle=True)) as feed:
            return torch.cat(list(feed)).tolist()

    def by_generator(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Numbers(50), batch_size=7, shuffle=True, generator=generator)
        with Feed(loader) as feed:
            return torch.cat(list(feed)).tolist()

    assert order(1) == order(1) != order(2)
    assert by_generator(1) == by_generator(1) != by_generator(2)


def forget_feeds() -> list[str]:
    gc.disable()
    for source in ("rank0", "shard"):
        feed = Feed(DataLoader(Numbers(4000), batch_size=4), source=source, timeout=20)  # type: ignore[arg-type]
        for _ in range(2):
            next(iter(feed))
        del feed
    return feed_threads()


def test_a_feed_that_nobody_holds_ends_its_threads() -> None:
    assert run_ranks(forget_feeds, 2) == [[], []]


def custom_batches(source: Source, tail: Any) -> list[int]:
    lists = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14], [15]]
    with Feed(DataLoader(Numbers(16), batch_sampler=lists), source=source, tail=tail) as feed:
        return [len(part) for part in feed]


@pytest.mark.parametrize(("tail", "rows"), [("pad", [2] * 5), ("drop", [2] * 3)])
def test_batches_of_a_batch_sampler_are_full_like_its_first(tail: str, rows: list[int]) -> None:
    for source in ("rank0", "shard"):
        assert run_ranks(custom_batches, 2, source, tail) == [rows, rows]


RESIDENT = """
import time
import torch
from torch.utils.data import DataLoader
from narrowgauge import Feed
from tests.feed_data import Slow

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for samples, size in ((8, 8), (200, 250_000)):  # first whatever is loaded once
    before, most = resident(), 0
    loader = DataLoader(Slow(samples, 0.0, size), batch_size=4)  # 8 MB
    with Feed(loader, depth=50, max_bytes=50_000_000) as feed:
        for part in feed:
            del part
            time.sleep(0.5 if feed.batch.number % 20 == 10 else 0.01)
            most = max(most, resident())
print(most - before, feed.stalls().high_water_bytes)
"""


def test_the_process_grows_by_no_more_than_max_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # freed memory goes back at once
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    grown, high_water = map(int, done.stdout.split())
    assert 24e6 <= high_water <= 50e6
    assert grown < 60e6  # and what reading a sample takes
