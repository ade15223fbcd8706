"""Sources that misbehave in odd ways: no rank waits, nothing is lost in silence, all say why."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

import narrowgauge as ng
from narrowgauge.inputs import BatchError
from narrowgauge.inputs.split import shares
from narrowgauge.inputs.structure import Habits, cut
from tests.feed_data import Numbers
from tests.ranks import Raised, run_ranks


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even its text")


class Raises(Numbers):
    def __init__(self, count: int, error: BaseException) -> None:
        super().__init__(count)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 10:
            raise self.error
        return index


class Lengthless(Numbers):
    def __len__(self) -> int:
        raise RuntimeError("the database is closed")


class Opaque:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = torch.tensor(numbers)


def stop(batch: Any) -> Any:
    raise StopIteration


def no_batch(numbers: list[int]) -> None:
    return None


def loader(case: str) -> Any:
    if case == "stop":
        return DataLoader(Raises(20, StopIteration()), batch_size=4)
    if case == "unreadable":
        return DataLoader(Raises(20, Unreadable()), batch_size=4)
    if case == "surrogate":
        return DataLoader(Raises(20, OSError("no file \udc80.png")), batch_size=4)
    if case == "length":
        return DataLoader(Lengthless(20), batch_size=4)
    if case == "opaque":
        return DataLoader(Numbers(20), batch_size=4, collate_fn=Opaque)
    if case == "nothing":
        return DataLoader(Numbers(20), batch_size=4, collate_fn=no_batch)
    return DataLoader(Numbers(20), batch_size=4)


def read_all(case: str, source: Any) -> list[int]:
    own = loader(case) if source == "shard" or dist.get_rank() == 0 else None
    on_device = stop if case == "on_device" else None
    feed = ng.Feed(own, source=source, on_device=on_device, timeout=20)
    return [number for batch in feed for number in batch.tolist()]


def what_is_raised(cases: list[str]) -> list[str]:
    found = []
    for case in cases:
        try:
            read_all(case, "rank0")
            found.append("no error")
        except Unreadable:
            found.append("unreadable")
        except Exception as error:
            found.append(str(error).encode(errors="replace").decode())
    return found


ODD = [
    ("stop", "although there are more", "although there are more"),
    ("on_device", "on_device raised StopIteration", "on_device raised StopIteration"),
    ("unreadable", "unreadable", "failed: Unreadable: (its text cannot be read)"),
    ("surrogate", "no file", "failed: OSError: no file \\udc80.png"),
    ("length", "the database is closed", "rank 0 refused its arguments: the database is closed"),
    ("opaque", "Opaque in which nothing counts samples", "nothing counts samples"),
    ("nothing", "NoneType in which nothing counts samples", "nothing counts samples"),
]


def test_odd_errors_of_a_source_reach_every_rank() -> None:
    first, second = run_ranks(what_is_raised, 2, [case for case, _, _ in ODD])
    for (case, own, others), here, there in zip(ODD, first, second, strict=True):
        assert own in here, case
        assert others in there, case


def test_a_stop_of_the_dataset_is_no_end_of_the_epoch_where_all_ranks_read() -> None:
    for raised in run_ranks(read_all, 2, "stop", "shard", catch=True):
        assert isinstance(raised, Raised)
        assert "StopIteration" in raised.message


def sampled(kind: str) -> tuple[list[int], list[int]]:
    torch.manual_seed(dist.get_rank())  # ranks draw differently, as in a real program
    sampler = SubsetRandomSampler(range(16))
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0] * 16, 16)
    feed = ng.Feed(DataLoader(Numbers(16), batch_size=4, sampler=sampler), timeout=20)
    it = iter(feed)
    first = next(it).tolist()
    state = feed.state_dict()
    rest = [number for batch in it for number in batch.tolist()]
    feed.load_state_dict(state)
    again = [number for batch in feed for number in batch.tolist()]
    assert rest == again
    return first, rest


@pytest.mark.parametrize("kind", ["subset", "weighted"])
def test_random_samplers_of_torch_draw_the_same_on_all_ranks_and_go_on(kind: str) -> None:
    results = run_ranks(sampled, 2, kind)
    numbers = [number for first, rest in results for number in (*first, *rest)]
    assert len(numbers) == 16
    if kind == "subset":
        assert sorted(numbers) == list(range(16))


def test_a_last_batch_of_two_is_cut_as_those_before() -> None:
    """Two lists of two names could be two samples; the batches before say they are not."""
    habits = Habits()

    def parts(batch: Any, total: int) -> list[Any]:
        found = shares(total, 2, "exact", 4)
        assert found is not None
        return [cut(batch, total, share, habits)[0] for share in found]

    columns = [("a", "b", "c", "d"), ("e", "f", "g", "h")]
    assert parts(columns, 4) == [[("a", "b"), ("e", "f")], [("c", "d"), ("g", "h")]]
    assert parts([("a", "b"), ("e", "f")], 2) == [[("a",), ("e",)], [("b",), ("f",)]]
    habits = Habits()
    samples = [("a", "e"), ("b", "f"), ("c", "g"), ("d", "h")]
    assert parts(samples, 4) == [samples[:2], samples[2:]]
    assert parts(samples[:2], 2) == [samples[:1], samples[1:2]]
    habits = Habits()
    with pytest.raises(BatchError, match="batch has 2 elements of 2 elements each"):
        parts(samples[:2], 2)


def test_images_of_three_channels_are_cut_by_samples_also_in_a_batch_of_three() -> None:
    habits = Habits()
    images = [torch.full((3, 2, 2), number) for number in range(4)]
    for total in (4, 3):
        found = shares(total, 2, "exact", 4)
        assert found is not None
        got = [cut(images[:total], total, share, habits)[1] for share in found]
        assert [int(t[0, 0, 0]) for part in got for t in part] == list(range(total))


def forked(source: Any) -> tuple[list[int], list[int]]:
    feed = ng.Feed(DataLoader(Numbers(24), batch_size=4), source=source, timeout=10)
    got, codes = [], []
    iterator = iter(feed)
    for batch in iterator:
        got += batch.tolist()
        if not codes:
            child = os.fork()
            if not child:
                code = 1
                try:
                    next(iterator)
                except RuntimeError as error:
                    code = 0 if "before this process was forked" in str(error) else 2
                iterator.close()
                feed.close()
                os._exit(code)
            codes.append(os.waitpid(child, 0)[1])
    return got, codes


@pytest.mark.parametrize("source", ["shard", "rank0"])
def test_a_forked_copy_of_a_feed_does_not_speak_for_its_parent(source: str) -> None:
    results = run_ranks(forked, 2, source)
    assert sorted(number for got, _ in results for number in got) == list(range(24))
    assert [codes for _, codes in results] == [[0], [0]]


def keeps_its_error() -> int:
    feed = ng.Feed(DataLoader(Numbers(24), batch_size=4), timeout=10)
    kept, count = [], 0
    try:
        with feed:
            for _ in feed:
                count += 1
                if dist.get_rank() == 1 and count == 2:
                    raise KeyError("in the loop")
    except KeyError as error:
        kept.append(error)  # and with it the frame, and with that the iteration
    dist.barrier()
    return count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_error_of_the_loop_that_is_kept_ends_it_on_all_ranks_inside_of_with() -> None:
    assert run_ranks(keeps_its_error, 2, timeout=25) == [2, 2]


@pytest.mark.parametrize(
    "timeout",
    [float("nan"), float("inf"), 1e-9, 0.01, 0, -1.0, 1e12, "60", timedelta(0), None, True],
)
def test_timeouts_that_cannot_be_kept_are_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*allowed: 0.05 seconds to 365 days"):
        ng.Feed([torch.arange(4)], timeout=timeout)


def huge_depth() -> int:
    feed = ng.Feed([torch.arange(4)] * 3, depth=1 << 80, max_bytes=1 << 90, timeout=10)
    return sum(len(batch) for batch in feed)


def test_a_huge_depth_is_no_error() -> None:
    assert run_ranks(huge_depth, 2) == [6, 6]
