"""Parts of a feed that need no ranks: who gets which sample, nested batches, resuming, memory."""

from __future__ import annotations

import collections
import dataclasses
import re
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from narrowgauge.inputs.budget import Budget
from narrowgauge.inputs.slots import Slots
from narrowgauge.inputs.source import IndexedSource, Position, empty_digest
from narrowgauge.inputs.split import Tail, shares
from narrowgauge.inputs.stalls import Stalls, Step
from narrowgauge.inputs.structure import BatchError, bytes_of, cut, fill, leaves_of, samples_in
from tests.feed_data import Numbers


def delivered(
    loader: DataLoader[Any], world: int, tail: Tail, start: Position, stop: int | None, seed: int
) -> tuple[list[list[int]], Position]:
    """Samples that each rank counts, and the position after ``stop`` batches."""
    source = IndexedSource(loader, seed, None)
    found: list[list[int]] = [[] for _ in range(world)]
    position, number = start, 0
    for read in source.read(start):
        split = shares(read.total, world, tail, read.position.full)
        if split is None:
            continue
        if number == stop:
            break
        number += 1
        for rank, share in enumerate(split):
            skeleton, tensors = cut(read.batch, read.total, share)
            rows = fill(skeleton, tensors)
            assert len(rows) == share.rows
            found[rank] += rows[: share.count].tolist()
        if tail != "exact":
            assert len({share.rows for share in split}) == 1
        assert max(s.count for s in split) - min(s.count for s in split) <= 1
        position = read.position
    return found, position


@settings(max_examples=10_000)
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 12),
    world=st.integers(1, 5),
    world_after=st.integers(1, 5),
    tail=st.sampled_from(["exact", "drop", "pad"]),
    stop=st.integers(0, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_once_however_the_run_is_cut(
    samples: int,
    batch: int,
    world: int,
    world_after: int,
    tail: Tail,
    stop: int,
    shuffle: bool,
    seed: int,
    epoch: int,
) -> None:
    if tail == "drop":
        batch = world * world_after * (1 + batch // 4)
    loader = DataLoader(Numbers(samples), batch_size=batch, shuffle=shuffle)
    start = Position(epoch, 0, empty_digest())
    before, position = delivered(loader, world, tail, start, stop, seed)
    after, end = delivered(loader, world_after, tail, position, None, seed)
    whole, whole_end = delivered(loader, 1, tail, start, None, seed)
    got = sorted(chain(*before, *after))
    complete = samples // batch * batch if tail == "drop" else samples
    assert len(got) == len(set(got)) == complete
    assert got == sorted(whole[0])
    assert end.samples == whole_end.samples
    assert end.digest == whole_end.digest


def test_shares_are_neighbours_in_rank_order() -> None:
    split = shares(7, 3, "exact", 9)
    assert split is not None
    assert [share.indices for share in split] == [[0, 1, 2], [3, 4], [5, 6]]
    padded = shares(4, 3, "pad", 9)
    assert padded is not None
    assert [(share.indices, share.count) for share in padded] == [
        ([0, 1, 2], 2),
        ([2, 3, 0], 1),
        ([3, 0, 1], 1),
    ]
    assert shares(7, 3, "drop", 9) is None
    few = shares(1, 3, "exact", 9)
    assert few is not None
    assert [share.count for share in few] == [1, 0, 0]


def test_dropping_what_never_divides_is_refused() -> None:
    with pytest.raises(ValueError, match="8 samples does not divide evenly among 3 ranks"):
        shares(8, 3, "drop", 8)


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[str]


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    extra: dict[str, Any]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def received(skeleton: Any, tensors: list[torch.Tensor], rows: int) -> Any:
    """As it comes out of another rank's memory."""
    there = []
    for leaf, tensor in zip(leaves_of(skeleton), tensors, strict=True):
        memory = torch.zeros(leaf.byte_count(rows), dtype=torch.uint8)
        memory.copy_(bytes_of(tensor))
        there.append(leaf.tensor(memory, rows))
    return fill(skeleton, there)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", ["exact", "pad"])
def test_tensors_of_any_dtype_keep_their_bits(dtype: torch.dtype, tail: Tail) -> None:
    raw = torch.randint(0, 256, (5, 3, dtype.itemsize), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    whole = torch.stack([bytes_of(row.contiguous()).clone() for row in raw])
    batch = whole.reshape(5, -1)
    tensor = torch.empty(0, dtype=dtype).set_(batch.untyped_storage(), 0, (5, 3), (3, 1))
    for share in shares(5, 2, tail, 8) or []:
        skeleton, tensors = cut((tensor,), 5, share)
        (part,) = received(skeleton, tensors, share.rows)
        assert part.dtype == dtype
        assert part.shape == (share.rows, 3)
        assert bytes_of(part).tolist() == batch[share.indices].flatten().tolist()


def test_nested_batches_keep_their_kinds() -> None:
    batch = {
        "pair": Pair(torch.arange(6).view(3, 2), ["a", "b", "c"]),
        "record": Record(
            torch.rand(3, 2, 2), {"scale": torch.tensor(0.5), "name": "train", "n": 7}
        ),
        "ordered": collections.OrderedDict(x=torch.zeros(3, 0, 4)),
        "default": collections.defaultdict(list, y=torch.ones(3)),
        "boxes": [torch.rand(2, 4), torch.rand(0, 4), torch.rand(7, 4)],
        "targets": ({"id": 1}, {"id": 2}, {"id": 3}),
        "nothing": None,
    }
    second = (shares(3, 2, "exact", 3) or [])[1]
    skeleton, tensors = cut(batch, 3, second)
    part = received(skeleton, tensors, second.rows)
    assert isinstance(part["pair"], Pair)
    assert part["pair"].left.tolist() == [[4, 5]]
    assert part["pair"].right == ["c"]
    assert isinstance(part["record"], Record)
    assert torch.equal(part["record"].image, batch["record"].image[2:])  # type: ignore[attr-defined]
    assert part["record"].extra == {"scale": torch.tensor(0.5), "name": "train", "n": 7}
    assert part["record"].extra["scale"].shape == ()
    assert type(part["ordered"]) is collections.OrderedDict
    assert part["ordered"]["x"].shape == (1, 0, 4)
    assert part["default"].default_factory is list
    assert len(part["boxes"]) == 1
    assert torch.equal(part["boxes"][0], batch["boxes"][2])  # type: ignore[index]
    assert part["targets"] == ({"id": 3},)
    assert part["nothing"] is None
    assert batch["pair"].right == ["a", "b", "c"]  # type: ignore[attr-defined]


def test_channels_last_stays() -> None:
    images = torch.rand(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    for share in shares(4, 2, "exact", 4) or []:
        (part,) = received(*cut((images,), 4, share), share.rows)
        assert torch.equal(part, images[share.start : share.start + share.count])
        assert part.is_contiguous(memory_format=torch.channels_last)


def test_strided_and_conjugated_tensors_arrive_as_what_they_show() -> None:
    for tensor in (
        torch.arange(24).view(4, 6)[:, ::2],
        torch.arange(24).view(6, 4).T,
        torch.rand(4, 3, dtype=torch.complex64).conj(),
        torch.arange(3).expand(4, 3),
    ):
        for share in shares(4, 2, "exact", 4) or []:
            (part,) = received(*cut((tensor,), 4, share), share.rows)
            assert torch.equal(part, tensor[share.start : share.start + share.count])


def test_the_structure_does_not_depend_on_the_number_of_samples() -> None:
    skeletons = []
    for total in (8, 5):
        batch = {"x": torch.zeros(total, 3), "y": torch.zeros(total)}
        skeletons += [cut(batch, total, share)[0] for share in shares(total, 3, "exact", 8) or []]
    assert all(skeleton == skeletons[0] for skeleton in skeletons)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4, 2), torch.zeros(5)), r"batch\[1\] has shape \(5,\).* 4 samples"),
        (
            {"x": torch.zeros(4), "m": torch.zeros(4, 4).to_sparse()},
            r"batch\['m'\] is a tensor \(tor",
        ),
        (
            (torch.zeros(4), torch.zeros(4).numpy()),
            r"batch\[1\] is a numpy array; make it a tensor",
        ),
        (
            (torch.zeros(4), torch.zeros(4, device="meta")),
            r"batch\[1\] is on meta; leave it on the",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        cut(batch, 4, (shares(4, 2, "exact", 4) or [])[0])


def test_a_batch_without_samples_is_named() -> None:
    with pytest.raises(BatchError, match="gave a float, which has no tensor with a dimension"):
        samples_in(0.5)


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    slots = Slots(pinned=False)

    def use(keep: bool) -> tuple[int, torch.Tensor | None]:
        slot = slots.take(2)
        (memory,) = slot.memory([64], pinned=False)
        view = memory[:8]
        place = view.data_ptr()
        slot.busy = False
        return place, view if keep else None

    first, kept = use(keep=True)
    others = {use(keep=False)[0] for _ in range(4)}
    assert first not in others
    assert len(others) == 1
    kept_array = kept.numpy() if kept is not None else None
    del kept
    assert first not in {use(keep=False)[0] for _ in range(3)}
    del kept_array
    assert use(keep=False)[0] in {first, *others}


def test_memory_in_use_by_the_feed_is_not_given_again() -> None:
    slots = Slots(pinned=False)
    taken = [slots.take(2) for _ in range(3)]
    assert len({id(slot) for slot in taken}) == 3


def test_the_room_shrinks_to_what_max_bytes_allows() -> None:
    budget = Budget(depth=4, max_bytes=1000)
    assert budget.room == 1
    budget.hold(100)
    assert budget.room == 4
    budget.hold(300)
    assert budget.room == 2
    budget.release(100)
    assert (budget.held, budget.high_water) == (300, 400)
    with pytest.raises(
        ValueError, match=r"a batch takes 600 bytes.*max_bytes is 1,000; it must be 1,2"
    ):
        budget.hold(600)


@pytest.mark.parametrize(
    ("step", "stage", "words"),
    [
        (
            Step(0.2, 0.1, 0.0, 0.2, 0.01, 0.0),
            "read",
            "50% of the time.*slow stage is read, 200 ms",
        ),
        (Step(0.2, 0.05, 0.0, 0.01, 0.2, 0.0), "wire", "25% of the time.*wire.*narrower dtype"),
        (Step(0.2, 0.05, 0.0, 0.01, 0.02, 0.2), "copy", "copy.*make on_device cheaper"),
        (
            Step(0.2, 0.0, 0.1, 0.01, 0.02, 0.0),
            "ranks",
            "50% of the time was spent waiting for other",
        ),
        (Step(0.2, 0.0, 0.1, 0.01, 0.19, 0.0), "wire", "wire.*narrower dtype"),
        (Step(0.2, 0.001, 0.0, 0.1, 0.1, 0.0), "", "The inputs keep up: 0.5%"),
    ],
)
def test_the_report_names_the_slow_stage_and_what_to_change(
    step: Step, stage: str, words: str
) -> None:
    stalls = Stalls()
    for _ in range(10):
        stalls.add(step)
    report = stalls.report(123)
    assert report.slow_stage == stage
    assert re.search(words, report.sentence), report.sentence
    assert report.high_water_bytes == 123
    assert report.wait_p50 == report.wait_p99 == step.data_wait


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(10))


def test_an_epoch_has_the_same_order_whatever_was_drawn_meanwhile() -> None:
    loader = DataLoader(Numbers(30), batch_size=7, shuffle=True)
    first = [read.batch.tolist() for read in IndexedSource(loader, 5, None).read(Position(2))]
    torch.rand(3)
    state = torch.get_rng_state()
    again = [read.batch.tolist() for read in IndexedSource(loader, 5, None).read(Position(2))]
    assert torch.equal(state, torch.get_rng_state())  # reading draws nothing from the user's
    other = [read.batch.tolist() for read in IndexedSource(loader, 5, None).read(Position(3))]
    assert first == again != other
    assert sorted(chain(*other)) == list(range(30))
