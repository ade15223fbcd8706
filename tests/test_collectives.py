"""The compressed all-reduce: right numbers, the same bits everywhere, and never a hang."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import narrowgauge
from narrowgauge.codec import packed_size
from narrowgauge.collectives.layout import cut
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.formats import BlockFormat, FloatFormat, format_of
from narrowgauge.scaling import scale_exponent
from tests.ranks import Raised, run_ranks

SHAPES = [(3, 5), (1,), (70_001,), (), (17, 64), (4096,)]


def gradients(rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Gradients of one rank: every tensor has a magnitude of its own."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        torch.randn(shape, generator=generator) * 10.0 ** (-3 * number)
        for number, shape in enumerate(shapes)
    ]


def digest(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [tensor.reshape(-1).view(torch.int32).tolist() for tensor in tensors]


def reduced(format: str, scale: Any, op: Any, message_bytes: int | None) -> list[torch.Tensor]:
    tensors = gradients(dist.get_rank())
    if message_bytes is None:
        narrowgauge.all_reduce(tensors, format, scale=scale, op=op)
        return tensors
    parsed = format_of(format)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    reducer = Reducer(message_bytes=message_bytes)
    reducer.start(flat, sizes, [parsed] * len(sizes), scale=scale, op=op).wait()
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]


def every_format() -> dict[tuple[str, str], list[torch.Tensor]]:
    return {
        (format, str(scale)): reduced(format, scale, "mean", None)
        for format in ("e5m2", "e4m3fn", "e3m0", "e2m1fn", "e3m2fn", "int8", "int4", "bf16", "fp32")
        for scale in ("local", "shared", None)
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_every_rank_ends_with_the_same_bits_near_the_mean(world_size: int) -> None:
    results = run_ranks(every_format, world_size)
    exact = [
        torch.stack(parts).double().mean(0)
        for parts in zip(*(gradients(rank) for rank in range(world_size)), strict=True)
    ]
    for key in results[0]:
        assert all(digest(result[key]) == digest(results[0][key]) for result in results), key
        format, scale = key
        if scale == "None" and format not in ("bf16", "fp32"):
            continue  # unscaled numbers underflow: that they do is what scaling is for
        for number, (result, mean) in enumerate(zip(results[0][key], exact, strict=True)):
            terms = [float(gradients(rank)[number].norm()) for rank in range(world_size)]
            error = float((result.double() - mean).norm()) / (sum(terms) / world_size)
            assert error < (1e-6 if format == "fp32" else 0.7), (key, error)


def test_two_ranks_sum_exactly_what_was_encoded() -> None:
    results = run_ranks(reduced, 2, "e4m3", "local", "mean", None)
    for number, tensor in enumerate(results[0]):
        decoded = []
        for rank in range(2):
            own = gradients(rank)[number]
            scale = 2.0 ** scale_exponent(own.abs().max().item(), format_of("e4m3"))
            decoded.append(narrowgauge.quantize(own * scale, "e4m3") / scale)
        assert torch.equal(tensor, (decoded[0] + decoded[1]) / 2)


def test_four_ranks_encode_the_mean_of_what_was_encoded() -> None:
    """Two-shot, against the same steps written out: cut, scale, round, mean, round."""
    results = run_ranks(reduced, 4, "e5m2", "local", "mean", 10_000)
    format = format_of("e5m2")
    assert isinstance(format, FloatFormat)
    flats = [torch.cat([t.reshape(-1) for t in gradients(rank)]) for rank in range(4)]
    sizes = [math.prod(shape) for shape in SHAPES]
    layout = cut(sizes, [format] * len(sizes), 4, 10_000)
    assert len(layout.chunks) > 1
    expected = torch.full_like(flats[0], math.nan)
    for chunk in layout.chunks:
        for piece in chunk:
            for segment in piece.segments:
                window = slice(segment.begin, segment.end)
                exponents, total = [], torch.zeros(segment.end - segment.begin)
                for flat in flats:
                    exponents.append(scale_exponent(flat[window].abs().max().item(), format))
                    scale = 2.0 ** exponents[-1]
                    total += narrowgauge.quantize(flat[window] * scale, format) / scale
                scale = 2.0 ** min(exponents)
                expected[window] = narrowgauge.quantize(total / 4 * scale, format) / scale
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in results[0]]), expected)


def published(values: torch.Tensor, exponent: int) -> torch.Tensor:
    return narrowgauge.quantize(values * 2.0**exponent, "e5m2")


def test_shared_scale_is_aps_as_published() -> None:
    """ceil(log2(max |g| N)) agreed by maximum, cast, sum, cast, divide by N and the scale."""
    results = run_ranks(reduced, 3, "e5m2", "shared", "mean", None)
    for number, tensor in enumerate(results[0]):
        parts = [gradients(rank)[number] for rank in range(3)]
        largest = max(math.ceil(math.log2(part.abs().max().item() * 3)) for part in parts)
        exponent = 15 - largest
        total = sum(published(part, exponent) for part in parts)
        assert isinstance(total, torch.Tensor)
        exact = narrowgauge.quantize(total, "e5m2") / 2.0**exponent
        assert torch.allclose(tensor, exact / 3, rtol=1e-6, atol=0)


def sums() -> list[torch.Tensor]:
    tensors = [torch.full((5,), float(dist.get_rank() + 1)), torch.ones(1000)]
    narrowgauge.all_reduce(tensors, "e4m3", op="sum")
    return tensors


@pytest.mark.parametrize("world_size", [2, 3])
def test_sum_is_the_sum(world_size: int) -> None:
    for first, second in run_ranks(sums, world_size):
        assert torch.equal(first, torch.full((5,), sum(range(1, world_size + 1)) * 1.0))
        assert torch.equal(second, torch.full((1000,), float(world_size)))


def with_special_values() -> list[list[torch.Tensor]]:
    rank = dist.get_rank()
    results = []
    for special in (math.nan, math.inf, -math.inf):
        for format in ("e5m2", "e4m3fn", "e2m1fn", "int8", "bf16", "fp32"):
            for scale in ("local", "shared", None):
                tensors = [torch.ones(999), torch.ones(50), torch.zeros(7)]
                if rank == 1:
                    tensors[1][13] = special
                narrowgauge.all_reduce(tensors, format, scale=scale)  # type: ignore[arg-type]
                results.append(tensors)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_non_finite_on_one_rank_is_non_finite_on_all_and_nowhere_else(world_size: int) -> None:
    for result in run_ranks(with_special_values, world_size):
        for good, bad, zero in result:
            assert torch.equal(good, torch.ones(999))
            assert not bad[13].isfinite()
            assert torch.equal(zero, torch.zeros(7))


def overflowing() -> list[torch.Tensor]:
    sign = (-1.0) ** dist.get_rank()
    tensors = [torch.full((9,), sign * 1e6), torch.ones(9)]
    narrowgauge.all_reduce(tensors, "e3m0", scale=None)
    return tensors


@pytest.mark.parametrize("world_size", [2, 3])
def test_opposite_overflows_without_scale_end_non_finite_everywhere(world_size: int) -> None:
    for bad, good in run_ranks(overflowing, world_size):
        assert not bad.isfinite().any()
        assert torch.equal(good, torch.ones(9))


def zeros_on_one_rank() -> list[torch.Tensor]:
    rank = dist.get_rank()
    tensors = [torch.full((100,), 1e-6 if rank == 0 else 0.0), torch.zeros(33)]
    narrowgauge.all_reduce(tensors, "e4m3")
    return tensors


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_of_zeros_does_not_flush_the_others(world_size: int) -> None:
    for small, zero in run_ranks(zeros_on_one_rank, world_size):
        assert torch.allclose(small, torch.full((100,), 1e-6 / world_size), rtol=0.07)
        assert torch.equal(zero, torch.zeros(33))


def kinds_of_tensors() -> list[Any]:
    rank = dist.get_rank()
    transposed = torch.full((6, 4), float(rank)).t()
    storage = torch.full((10, 10), -1.0)
    strided = storage[::2, ::3]
    strided.fill_(rank)
    tensors = [
        torch.full((3,), float(rank), dtype=torch.bfloat16),
        torch.full((3,), float(rank), dtype=torch.float16),
        torch.full((3,), float(rank), dtype=torch.float64),
        torch.tensor(float(rank)),
        torch.empty(0),
        transposed,
        strided,
        torch.full((2,), float(rank), requires_grad=True),
    ]
    narrowgauge.all_reduce(tensors, "e5m2")
    narrowgauge.all_reduce([], "e5m2")
    narrowgauge.all_reduce(torch.empty(0), "e5m2")
    alone = torch.full((4,), float(rank), dtype=torch.float64)
    narrowgauge.all_reduce(alone, "e5m2")
    return [[t.detach() for t in tensors], storage, alone]


def test_any_floating_tensor_is_reduced_in_place() -> None:
    for tensors, storage, alone in run_ranks(kinds_of_tensors, 2):
        for tensor in [*tensors, alone]:
            assert torch.equal(tensor, torch.full_like(tensor, 0.5))
        untouched = torch.ones(10, 10, dtype=torch.bool)
        untouched[::2, ::3] = False
        assert (storage[untouched] == -1).all()


def several_at_once() -> list[torch.Tensor]:
    tensors = [torch.full((size,), float(dist.get_rank())) for size in (5000, 17, 5000, 300_000)]
    works = [narrowgauge.all_reduce(tensor, "e4m3", async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
    return tensors


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_reductions_can_be_under_way(world_size: int) -> None:
    mean = sum(range(world_size)) / world_size
    for tensors in run_ranks(several_at_once, world_size):
        for tensor in tensors:
            assert torch.equal(tensor, torch.full_like(tensor, mean))


def bytes_sent(format: str, numel: int) -> int:
    work = narrowgauge.all_reduce(torch.randn(numel), format, async_op=True)
    assert work is not None
    work.wait()
    return work.bytes_sent


@pytest.mark.parametrize(
    ("format", "bits"), [("e5m2", 8), ("e2m1fn", 4), ("e3m2fn", 6), ("bf16", 16)]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_are_the_fewest_possible(format: str, bits: int, world_size: int) -> None:
    numel = 1_000_000
    wanted = 2 * (world_size - 1) / world_size * numel * bits / 8
    for sent in run_ranks(bytes_sent, world_size, format, numel):
        assert wanted <= sent < wanted * 1.001


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def bytes_on_the_interface(format: str, numel: int, rounds: int) -> float:
    tensor = torch.randn(numel)
    narrowgauge.all_reduce(tensor, format)
    sent = []
    for _ in range(rounds):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()  # nobody sends before everybody has read the counter
        narrowgauge.all_reduce(tensor, format)
        dist.barrier()
        sent.append(loopback_bytes() - before)
    return min(sent) / dist.get_world_size()  # other tests send on it, too


@pytest.mark.skipif(not Path("/sys/class/net/lo").exists(), reason="needs Linux's byte counters")
def test_the_interface_carries_a_quarter_of_float32() -> None:
    numel = 6_500_000
    for world_size in (2, 3):  # in one test: beside each other they would count each other's
        float32 = 2 * (world_size - 1) / world_size * numel * 4
        for sent in run_ranks(bytes_on_the_interface, world_size, "e5m2", numel, 40):
            assert sent == pytest.approx(float32 / 4, rel=0.02)


def in_subgroup() -> float:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    tensor = torch.tensor([float(rank)])
    narrowgauge.all_reduce(tensor, "e5m2", group=groups[rank % 2])
    return tensor.item()


def test_a_process_group_reduces_among_its_own_ranks() -> None:
    assert run_ranks(in_subgroup, 4) == [1.0, 2.0, 1.0, 2.0]


def forgotten() -> tuple[int, int]:
    before = threading.active_count()
    reducer = Reducer()
    format = format_of("e5m2")
    assert isinstance(format, FloatFormat)
    reducer.start(torch.ones(1000), [1000], [format]).wait()
    during = threading.active_count()
    del reducer
    for _ in range(100):
        gc.collect()
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    return during - before, threading.active_count() - before


def test_threads_end_with_their_reducer() -> None:
    assert run_ranks(forgotten, 2) == [(3, 0), (3, 0)]


# -- block formats -----------------------------------------------------------------------------

BLOCKS = ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1", "nvfp4", "int4@64", "int8@7", "e4m3fn@32"]


def in_blocks(message_bytes: int | None) -> dict[str, list[torch.Tensor]]:
    return {
        f"{name} {op}": reduced(name, "local", op, message_bytes)
        for name in BLOCKS
        for op in ("mean", "sum")
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("message_bytes", [None, 10_000])
def test_blocks_are_what_one_process_would_make_of_them(
    world_size: int, message_bytes: int | None
) -> None:
    """Each part that travels: round, sum in float32 in rank order, and in two steps round again."""
    results = run_ranks(in_blocks, world_size, message_bytes)
    flats = [torch.cat([t.reshape(-1) for t in gradients(rank)]) for rank in range(world_size)]
    sizes = [math.prod(shape) for shape in SHAPES]
    for name in BLOCKS:
        layout = cut(sizes, [format_of(name)] * len(sizes), world_size, message_bytes or 1 << 20)
        mean = torch.full_like(flats[0], math.nan)
        for segment in (s for chunk in layout.chunks for piece in chunk for s in piece.segments):
            window = slice(segment.begin, segment.end)
            parts = [narrowgauge.quantize(flat[window], name) for flat in flats]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            # As the collective divides: by a power of two first.
            shift = 2.0 ** (world_size - 1).bit_length()
            mean[window] = total / shift * torch.tensor(shift / world_size)
            if world_size > 2:
                mean[window] = narrowgauge.quantize(mean[window], name)
        for op, expected in (("mean", mean), ("sum", mean * world_size)):
            for result in results:
                got = torch.cat([tensor.reshape(-1) for tensor in result[f"{name} {op}"]])
                assert torch.equal(got, expected), (name, op)


def blocks_sent(numel: int) -> list[int]:
    sent = [bytes_sent(name, numel) for name in BLOCKS]
    assert all(sent)
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_blocks_are_those_of_their_packed_size(world_size: int) -> None:
    numel = 448 * world_size * 10
    for sent in run_ranks(blocks_sent, world_size, numel):
        for name, count in zip(BLOCKS, sent, strict=True):
            layout = cut([numel], [format_of(name)], world_size, 1 << 20)
            pieces = [piece for chunk in layout.chunks for piece in chunk]
            own = len(pieces) * 4 if name == "nvfp4" else 0
            whole = packed_size(numel, name) + own - (4 if own else 0) + len(pieces)
            assert sum(piece.size for piece in pieces) == whole
            share = 1 if world_size == 2 else 2 * (world_size - 1) / world_size
            assert count == pytest.approx(whole * share, rel=0.02)


def blocks_with_special_values() -> list[list[torch.Tensor]]:
    results = []
    for special in (math.nan, math.inf, -math.inf):
        for name in BLOCKS:
            tensors = [torch.ones(999), torch.ones(300), torch.zeros(7), torch.full((64,), 3e38)]
            if dist.get_rank() == 1:
                tensors[1][130] = special
            narrowgauge.all_reduce(tensors, name)
            results.append(tensors)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_block_that_is_not_finite_on_one_rank_is_nan_on_all(world_size: int) -> None:
    results = run_ranks(blocks_with_special_values, world_size)
    for number, (good, bad, zero, huge) in enumerate(results[0]):
        format = format_of(BLOCKS[number % len(BLOCKS)])
        assert isinstance(format, BlockFormat)
        assert torch.equal(good, torch.ones(999))
        assert torch.equal(zero, torch.zeros(7))
        assert torch.allclose(huge, torch.full((64,), 3e38), rtol=0.3)
        block = 130 // format.block_size
        marked = torch.zeros(300, dtype=torch.bool)
        marked[block * format.block_size : (block + 1) * format.block_size] = True
        assert torch.equal(bad.isnan(), marked)
        assert torch.equal(bad[~marked], torch.ones(300)[~marked])
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


# -- what goes wrong ---------------------------------------------------------------------------


def disagree(what: str) -> None:
    rank = dist.get_rank()
    size = 10 + rank if what == "sizes" else 10
    format = ("e5m2", "e4m3")[rank] if what == "formats" else "e5m2"
    scale = ("local", "shared")[rank] if what == "scale" else "local"
    narrowgauge.all_reduce(torch.ones(size), format, scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["sizes", "formats", "scale"])
def test_ranks_that_disagree_all_raise(what: str) -> None:
    for result in run_ranks(disagree, 2, what, catch=True):
        assert isinstance(result, Raised)
        assert result.type_name == "CollectiveError"
        assert "all ranks must pass the same" in result.message


def disagree_later(what: str) -> None:
    for format in ("e5m2", "e4m3"):
        for size in (8, 3000):
            for scale in ("local", "shared", None):
                narrowgauge.all_reduce(torch.ones(size), format, scale=scale)  # type: ignore[arg-type]
    differs = dist.get_rank() == 1
    size = 3000 if what == "sizes" and differs else 0 if what == "empty" and differs else 8
    format = "e4m3" if what == "formats" and differs else "e5m2"
    scale = None if what == "scale" and differs else "shared" if what == "shared" else "local"
    scale = "local" if what == "shared" and differs else scale
    op = "sum" if what == "op" and differs else "mean"
    narrowgauge.all_reduce(torch.ones(size), format, scale=scale, op=op)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["sizes", "empty", "formats", "scale", "shared", "op"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_in_a_later_call_all_raise_too(what: str, world_size: int) -> None:
    for rank, result in enumerate(run_ranks(disagree_later, world_size, what, catch=True)):
        assert isinstance(result, Raised), rank
        assert result.type_name == "CollectiveError"
        assert "all ranks must pass the same" in result.message
        assert result.seconds < 10


def after_partial_groups() -> list[float]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    results = []
    for group, members in zip([*pairs, None], ([0, 1], [1, 2], [0, 1, 2]), strict=True):
        if rank in members:
            tensor = torch.tensor([float(rank)])
            narrowgauge.all_reduce(tensor, "e5m2", group=group)
            results.append(tensor.item())
    return results


def test_groups_may_overlap_and_need_not_hold_every_rank() -> None:
    assert run_ranks(after_partial_groups, 3) == [[0.5, 1.0], [0.5, 1.5, 1.0], [1.5, 1.0]]


def in_other_modes() -> list[Any]:
    with torch.inference_mode():
        pair = [torch.full((4,), float(dist.get_rank())) for _ in range(2)]
        narrowgauge.all_reduce(pair, "e5m2")
    with torch.device("meta"):
        alone = torch.full((4,), float(dist.get_rank()), device="cpu")
        narrowgauge.all_reduce([alone, alone[:0]], "e5m2", scale="shared")
    with pytest.raises(ValueError, match="is expanded") as expanded:
        narrowgauge.all_reduce(torch.tensor([3.0]).expand(4), "e5m2")
    with pytest.raises(ValueError, match="share memory"):
        narrowgauge.all_reduce(torch.ones(9).as_strided((3, 3), (2, 1)), "e5m2")
    crossed = torch.ones(7).as_strided((2, 2), (2, 3))  # no two elements in one place
    narrowgauge.all_reduce(crossed, "e5m2")
    message = str(expanded.value)
    after = torch.ones(3)
    narrowgauge.all_reduce(after, "e5m2")  # the group is still good
    return [*(t.tolist() for t in pair), alone.tolist(), message, after.tolist()]


def test_modes_of_the_caller_and_refused_tensors_leave_the_group_in_order() -> None:
    for first, second, alone, message, after in run_ranks(in_other_modes, 2):
        assert first == second == alone == [0.5] * 4
        assert "a tensor of shape (4,) and strides (0,) is expanded" in message
        assert after == [1.0] * 3


def huge() -> list[torch.Tensor]:
    tensors = [torch.full((4,), 2.0**126 * 1.5) for _ in range(3)]
    for tensor, format in zip(tensors, ("e5m2", "e4m3fn", "int8"), strict=True):
        narrowgauge.all_reduce(tensor, format, scale="shared")
    return tensors


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_scales_reach_up_to_the_largest_float32(world_size: int) -> None:
    for tensors in run_ranks(huge, world_size):
        for tensor in tensors:
            assert torch.allclose(tensor, torch.full((4,), 2.0**126 * 1.5), rtol=0.13)


def create_after_a_failure() -> None:
    dist.barrier()  # both are connected for torch's own group
    if dist.get_rank() == 1:
        time.sleep(0.5)  # and the other one has seen that
        raise ValueError("this rank never arrives")
    Reducer(timeout=timedelta(seconds=2))


def test_a_rank_that_never_attaches_is_a_readable_error_on_the_others() -> None:
    waiting, _ = run_ranks(create_after_a_failure, 2, catch=True)
    assert isinstance(waiting, Raised)
    assert waiting.type_name == "CollectiveError"
    assert "rank 0 connecting to rank 1" in waiting.message


def initialised_again() -> list[float]:
    results = []
    for number in range(2):
        tensor = torch.tensor([float(dist.get_rank())])
        narrowgauge.all_reduce(tensor, "e5m2")
        results.append(tensor.item())
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        again = dist.PrefixStore(f"again-{number}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
    return results


def test_process_groups_may_be_destroyed_and_made_again() -> None:
    assert run_ranks(initialised_again, 2) == [[0.5, 0.5]] * 2


def die_between_reductions(world_size: int) -> None:
    reducer = Reducer(timeout=timedelta(seconds=20), message_bytes=1000)
    format = format_of("e5m2")
    assert isinstance(format, FloatFormat)
    reducer.start(torch.ones(100_000), [100_000], [format]).wait()
    if dist.get_rank() == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        reducer.start(torch.ones(100_000), [100_000], [format]).wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_named_by_the_others(world_size: int) -> None:
    *survivors, dead = run_ranks(die_between_reductions, world_size, world_size, catch=True)
    assert dead is None
    for result in survivors:
        assert isinstance(result, Raised)
        assert result.type_name == "CollectiveError"
        assert "Look at the output of rank" in result.message or "earlier" in result.message
        assert result.seconds < 20


def sleep_too_long() -> None:
    reducer = Reducer(timeout=timedelta(seconds=2))
    format = format_of("e5m2")
    assert isinstance(format, FloatFormat)
    reducer.start(torch.ones(1000), [1000], [format]).wait()
    if dist.get_rank() == 1:
        time.sleep(8)
        return
    reducer.start(torch.ones(1000), [1000], [format]).wait()


def test_a_silent_rank_ends_in_a_timeout_that_names_it() -> None:
    waiting, _ = run_ranks(sleep_too_long, 2, catch=True)
    assert isinstance(waiting, Raised)
    assert "rank 0 waiting for codes of rank 1: no answer within 2 s" in waiting.message
    assert waiting.seconds < 7


def after_a_failure() -> list[str]:
    reducer = Reducer(timeout=timedelta(seconds=1))
    format = format_of("e5m2")
    assert isinstance(format, FloatFormat)
    reducer.start(torch.ones(1000), [1000], [format]).wait()
    if dist.get_rank() == 1:
        time.sleep(3)
        return []
    messages = []
    for _ in range(2):
        try:
            reducer.start(torch.ones(1000), [1000], [format]).wait()
        except narrowgauge.collectives.CollectiveError as error:
            messages.append(str(error))
    return messages


def test_after_a_failure_every_further_call_says_so() -> None:
    (first, second), _ = run_ranks(after_a_failure, 2, catch=True)
    assert "no answer within 1 s" in first
    assert "an earlier compressed all-reduce on this group failed; restart the ranks" in second


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((torch.ones(2), "e4m3fm"), {}, ValueError, "did you mean 'e4m3fn'?"),
        ((torch.ones(2), "tf32"), {}, ValueError, "format 'tf32' cannot travel between ranks"),
        ((torch.ones(2), "e8m0"), {}, ValueError, "format 'e8m0' cannot travel between ranks"),
        (
            (torch.ones(2), "nvfp4"),
            {"scale": "shared"},
            ValueError,
            "scale is 'shared', but nvfp4 brings a scale per block, each rank's own; leave scale=",
        ),
        (
            (torch.ones(2), "int4@64"),
            {"scale": None},
            ValueError,
            "or use its elements' format int4",
        ),
        ((torch.ones(2), "e5m2"), {"op": "max"}, ValueError, "op is 'max'; allowed: 'mean', 'sum'"),
        ((torch.ones(2), "e5m2"), {"scale": "big"}, ValueError, "scale is 'big'; allowed: 'local'"),
        ((torch.ones(2).int(), "e5m2"), {}, TypeError, "a tensor is torch.int32 on cpu"),
        ((torch.ones(2, device="meta"), "e5m2"), {}, TypeError, "torch.float32 on meta"),
        ((torch.ones(2), "e5m2"), {}, RuntimeError, "torch.distributed is not initialised"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        narrowgauge.all_reduce(*arguments, **keywords)
    assert text in str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("message_bytes", [1, 100, 5000, 1 << 20])
def test_layout_covers_every_element_once(world_size: int, message_bytes: int) -> None:
    names = ["e5m2", "fp32", "e2m1fn", "e3m2fn", "bf16", "e5m2", "mxfp6_e3m2", "nvfp4", "int4@7"]
    formats = [format_of(name) for name in names]
    sizes = [1000, 0, 333, 1, 5000, 70, 2000, 1001, 3]
    layout = cut(sizes, formats, world_size, message_bytes)
    covered = [s for chunk in layout.chunks for piece in chunk for s in piece.segments]
    assert [s.begin for s in covered] == [0, *(s.end for s in covered[:-1])]
    assert covered[-1].end == sum(sizes)
    for chunk in layout.chunks:
        assert len(chunk) == (1 if world_size <= 2 else world_size)
        for piece in chunk:
            ends = [segment.offset + segment.size for segment in piece.segments]
            assert [segment.offset for segment in piece.segments] == [
                len(piece.segments),
                *ends[:-1],
            ][: len(piece.segments)]
            assert piece.size == (ends[-1] if ends else 0)
            for segment in piece.segments:
                assert segment.size == packed_size(segment.end - segment.begin, segment.format)
                begin = segment.begin - sum(sizes[: segment.tensor])
                if isinstance(segment.format, BlockFormat):
                    assert begin % segment.format.block_size == 0


def reduce_many_shapes() -> int:
    """How many greetings a rank has room for after 40 shapes in turn, each in its own plan."""
    reducer = Reducer()
    for numel in range(40):
        for format, kind in (("e5m2", None), ("fp32", "float32")):
            flat = torch.full((numel,), float(dist.get_rank()))
            reducer.start(flat, [numel], [format_of(format)], kind=kind).wait()
            assert flat.tolist() == [1.0] * numel
    pointers = {
        greeting.data_ptr()
        for messages in [m for plan in reducer._plans.values() for m in plan.free]
        for greeting in messages.greetings.values()
    }
    return len(pointers)


def test_new_shapes_keep_no_room_for_greetings_of_their_own() -> None:
    assert run_ranks(reduce_many_shapes, 3) == [2, 2, 2]


def policies() -> list[int]:
    """Scheduling policies of the threads by which Gloo receives, the user's own first."""
    narrowgauge.all_reduce(torch.ones(3), "e5m2")
    tasks = sorted(int(task.name) for task in Path("/proc/self/task").iterdir())
    return [
        os.sched_getscheduler(task)
        for task in tasks
        if Path(f"/proc/self/task/{task}/comm").read_text().strip() == "gloo_tcp_loop"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_only_our_own_threads_of_gloo_let_others_go_first() -> None:
    for first, *others in run_ranks(policies, 2):
        assert first == os.SCHED_OTHER
        assert len(others) == 2
        assert set(others) == {os.SCHED_BATCH}


def told_that_policies_cannot_be_set() -> list[str]:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.sched_setscheduler = refuse
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        narrowgauge.all_reduce(torch.ones(3), "e5m2")
    return [str(warning.message) for warning in told]


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_a_policy_that_cannot_be_set_is_told_of() -> None:
    for told in run_ranks(told_that_policies_cannot_be_set, 2):
        assert any("Allow sched_setscheduler in the container" in text for text in told), told
