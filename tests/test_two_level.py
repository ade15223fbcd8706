"""Shards, gathers and reductions on two levels: right numbers, few bytes, the same bits."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge
from narrowgauge.collectives.layout import cut, shard_borders
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduce import all_reduce
from narrowgauge.collectives.transport import CollectiveError
from narrowgauge.collectives.two_level import TwoLevelReducer, inside_groups
from narrowgauge.formats import format_of
from tests.ranks import Raised, run_ranks

SIZES = [70_001, 3, 4096, 17]


def numbers(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(SIZES), generator=generator)


def one_of_each_kind(format: str) -> dict[str, torch.Tensor]:
    reducer = Reducer(message_bytes=5000)
    parsed = [format_of(format)] * len(SIZES)
    results = {}
    for kind in ("reduce-scatter", "all-gather", "float32", None):
        flat = numbers(dist.get_rank())
        reducer.start(flat, SIZES, parsed, kind=kind).wait()  # type: ignore[arg-type]
        results[str(kind)] = flat
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("format", ["fp32", "e4m3", "int8@64"])
def test_a_reduce_scatter_leaves_each_rank_its_shard_of_the_mean(
    world_size: int, format: str
) -> None:
    results = run_ranks(one_of_each_kind, world_size, format)
    exact = torch.stack([numbers(rank) for rank in range(world_size)]).mean(0)
    borders = shard_borders(sum(SIZES), world_size)
    tolerance = 1e-6 if format == "fp32" else 0.04 * float(exact.abs().max())
    for rank, result in enumerate(results):
        mine = slice(borders[rank], borders[rank + 1])
        torch.testing.assert_close(
            result["reduce-scatter"][mine], exact[mine], atol=tolerance, rtol=0.05
        )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("format", ["fp32", "e4m3", "int8@64"])
def test_an_all_gather_gives_everybody_the_same_bits_of_every_shard(
    world_size: int, format: str
) -> None:
    results = run_ranks(one_of_each_kind, world_size, format)
    borders = shard_borders(sum(SIZES), world_size)
    shards = [numbers(rank)[borders[rank] : borders[rank + 1]] for rank in range(world_size)]
    for result in results:
        assert result["all-gather"].equal(results[0]["all-gather"])
        exact = torch.cat(shards)
        if format == "fp32":
            assert result["all-gather"].equal(exact)
        else:
            torch.testing.assert_close(result["all-gather"], exact, atol=0.03, rtol=0.07)


@pytest.mark.parametrize("world_size", [2, 3])
def test_float32_kind_is_the_mean_with_the_same_bits_everywhere(world_size: int) -> None:
    results = run_ranks(one_of_each_kind, world_size, "e4m3")
    exact = torch.stack([numbers(rank) for rank in range(world_size)]).mean(0)
    for result in results:
        assert result["float32"].equal(results[0]["float32"])
        torch.testing.assert_close(result["float32"], exact)


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-gather"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("message_bytes", [16, 1000, 1 << 20])
@pytest.mark.parametrize("format", ["e5m2", "int4@64"])
def test_pieces_of_shards_cover_every_element_once(
    kind: Any, world_size: int, message_bytes: int, format: str
) -> None:
    layout = cut(SIZES, [format_of(format)] * len(SIZES), world_size, message_bytes, kind)
    borders = shard_borders(sum(SIZES), world_size)
    covered = torch.zeros(sum(SIZES), dtype=torch.int32)
    for chunk in layout.chunks:
        for rank, piece in enumerate(chunk):
            for segment in piece.segments:
                assert borders[rank] <= segment.begin < segment.end <= borders[rank + 1]
                covered[segment.begin : segment.end] += 1
    assert (covered == 1).all()


def on_two_levels(inside: Any, format: str, op: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    flat = numbers(dist.get_rank())
    if inside == "mesh":
        inside = init_device_mesh("cpu", (2, 2))
    elif inside == "host":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    tensors = list(flat.split(SIZES))
    pending = all_reduce(tensors, format, op=op, inside=inside, async_op=True)
    assert pending is not None
    pending.wait()
    return flat, pending.levels  # type: ignore[attr-defined]


@pytest.mark.parametrize("inside", [1, 2, 4, "host", "mesh"])
def test_two_levels_give_the_mean_and_the_same_bits_everywhere(inside: Any) -> None:
    results = run_ranks(on_two_levels, 4, inside, "e4m3", "mean")
    exact = torch.stack([numbers(rank) for rank in range(4)]).mean(0)
    for flat, levels in results:
        assert flat.equal(results[0][0])
        torch.testing.assert_close(flat, exact, atol=0.15, rtol=0.07)
        if inside == 4:
            torch.testing.assert_close(flat, exact)
            assert levels["between"]["bytes_sent"] == 0


def test_the_sum_on_two_levels_is_the_sum() -> None:
    exact = torch.stack([numbers(rank) for rank in range(4)]).sum(0)
    for flat, _ in run_ranks(on_two_levels, 4, 2, "bf16", "sum"):
        torch.testing.assert_close(flat, exact, atol=0.03, rtol=0.02)


def test_only_codes_travel_between_groups() -> None:
    for _, levels in run_ranks(on_two_levels, 4, 2, "e4m3", "mean"):
        shard = sum(SIZES) / 2
        assert levels["between"]["steps"] == 1
        assert shard <= levels["between"]["bytes_sent"] <= shard + 40
        assert levels["inside"]["steps"] == 2
        assert 2 * 4 * shard - 8 <= levels["inside"]["bytes_sent"] <= 2 * 4 * shard + 40


def many_parts() -> torch.Tensor:
    reducer = TwoLevelReducer(inside_groups(2, None), format_of("fp32"), message_bytes=200_000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    flats = [torch.randn(3_000_000, generator=generator) for _ in range(3)]
    under_way = [reducer.start(f, [f.numel()], [format_of("bf16")]) for f in flats]
    for reduction in under_way:
        reduction.wait()
    return torch.stack([flat[::1000] for flat in flats])


def test_several_reductions_of_many_parts_can_be_under_way() -> None:
    results = run_ranks(many_parts, 4)
    exact = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        exact.append(
            torch.stack([torch.randn(3_000_000, generator=generator)[::1000] for _ in range(3)])
        )
    for result in results:
        assert result.equal(results[0])
        torch.testing.assert_close(result, torch.stack(exact).mean(0), atol=0.02, rtol=0.02)


def one_is_not_finite() -> torch.Tensor:
    flat = torch.ones(1000)
    if dist.get_rank() == 3:
        flat[7] = float("inf")
    narrowgauge.all_reduce([flat[:500], flat[500:]], "e4m3", inside=2)
    return flat


def test_what_is_not_finite_is_so_everywhere_on_two_levels() -> None:
    for flat in run_ranks(one_is_not_finite, 4):
        assert not flat[:500].isfinite().all()
        assert flat[500:].equal(torch.ones(500))


def with_bad_groups() -> list[str]:
    texts = []
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    for inside in (3, "host", 0.5, True, "rack", init_device_mesh("cpu", (4,))):
        try:
            narrowgauge.all_reduce(torch.ones(3), "e5m2", inside=inside)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError) as error:
            texts.append(str(error))
    try:
        narrowgauge.all_reduce(torch.ones(3), "e5m2", inside=2, inside_format="e4m3")
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_groups_that_cannot_be_are_refused_by_name() -> None:
    for texts in run_ranks(with_bad_groups, 4):
        for text, part in zip(
            texts,
            [
                "inside is 3, but groups of that many cannot be made of 4 ranks; allowed: [1,",
                "inside is 'host', but LOCAL_WORLD_SIZE is ''",
                "inside is 0.5; allowed: a number of ranks, 'host', a DeviceMesh",
                "inside is True; allowed",
                "inside is 'rack'; allowed",
                "inside is a DeviceMesh of 1 dimensions; allowed: two",
                "inside_format is 'e4m3'; allowed: 'fp32', 'bf16'",
            ],
            strict=True,
        ):
            assert part in text


def refuse_alone(later: bool, inside: int | None) -> None:
    if later:
        narrowgauge.all_reduce(torch.ones(3), "e5m2", inside=inside)
    narrowgauge.all_reduce(torch.ones(3), "e5m2" if dist.get_rank() else "nosuch", inside=inside)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("world_size", "inside"), [(2, None), (3, None), (4, 2)])
def test_arguments_that_one_rank_refuses_are_an_error_on_all(
    later: bool, world_size: int, inside: int | None
) -> None:
    first, *others = run_ranks(refuse_alone, world_size, later, inside, catch=True)
    assert isinstance(first, Raised)
    assert first.type_name == "ValueError"
    for other in others:
        assert isinstance(other, Raised)
        assert other.type_name == "CollectiveError"
        # It may be gone before its refusal has arrived.
        assert "refused" in other.message or "first: a rank failed there" in other.message
        assert other.seconds < 10


def refuse_and_stay() -> str:
    """Rank 0 refuses, and is there until the others have raised."""
    store = dist.distributed_c10d._get_default_store()
    narrowgauge.all_reduce(torch.ones(3), "e5m2", inside=2)
    try:
        narrowgauge.all_reduce(torch.ones(3), "e5m2" if dist.get_rank() else "nosuch", inside=2)
    except (ValueError, CollectiveError) as error:
        store.set(f"raised{dist.get_rank()}", "")
        store.wait([f"raised{rank}" for rank in range(4)], timedelta(seconds=20))
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_refusal_in_one_group_reaches_the_ranks_of_all_groups() -> None:
    _, *others = run_ranks(refuse_and_stay, 4)
    for text in others:
        assert "refused the arguments of the compressed all-reduce" in text


def refuse_together(inside: int | None) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    for _ in range(3):
        with pytest.raises(ValueError, match="nosuch"):
            narrowgauge.all_reduce(tensor, "nosuch", inside=inside)
    narrowgauge.all_reduce(tensor, "e5m2", inside=inside)
    with pytest.raises(TypeError):
        narrowgauge.all_reduce(torch.ones(2).int(), "e5m2", inside=inside)
    narrowgauge.all_reduce(tensor, "e5m2", inside=inside)
    return tensor.item()


@pytest.mark.parametrize(("world_size", "inside"), [(2, None), (4, 2)])
def test_arguments_that_all_ranks_refuse_leave_the_group_in_order(
    world_size: int, inside: int | None
) -> None:
    assert run_ranks(refuse_together, world_size, inside) == [(world_size - 1) / 2] * world_size


def negative_view() -> torch.Tensor:
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    view = complex_numbers.conj().imag
    assert view.is_neg()
    narrowgauge.all_reduce(view, "e5m2")
    return view.clone()


def test_negative_views_are_reduced_in_place() -> None:
    for result in run_ranks(negative_view, 2):
        assert result.tolist() == [-2.0, 4.0]
