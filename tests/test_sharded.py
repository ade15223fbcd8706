"""FSDP2: the losses of DDP, a quarter of the bytes, and clear refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import narrowgauge
from narrowgauge.gradients import Hybrid, Schedule, compress_sharded
from tests.ranks import Raised, run_ranks

compress = partial(narrowgauge.gradients.compress, adapt=False)


class Network(nn.Module):
    """Three layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(41, 131), nn.Linear(131, 57)])
        self.head = nn.Linear(57, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.head(x)
        return result


def sharded(**settings: Any) -> Network:
    model = Network()
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def data(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(16, 41, generator=generator)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def losses(model: nn.Module, steps: int = 12, accumulate: bool = False) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            (model(data(step + 100)) - 1).pow(2).mean().backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
        loss = (model(data(step)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def trained(kind: str, format: Any, settings: dict[str, Any]) -> tuple[list[float], Any]:
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(Network())
        compression = compress(model, format) if format else None
    else:
        model = sharded(**settings)
        compression = compress_sharded(model, format) if format else None  # type: ignore[assignment]
    return losses(model), compression and compression.ledger.steps


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("format", ["fp32", "int8@64", "e4m3@32", "e5m2"])
def test_losses_are_those_of_ddp_with_the_same_format(format: str, world_size: int) -> None:
    plain = run_ranks(trained, world_size, "fsdp", None, {})
    ours = run_ranks(trained, world_size, "fsdp", format, {})
    ddp = run_ranks(trained, world_size, "ddp", format, {})
    tolerance = {"fp32": 1e-5, "e5m2": 0.1}.get(format, 0.02)
    for (own, _), (theirs, _), (exact, _) in zip(ours, ddp, plain, strict=True):
        assert own == pytest.approx(theirs, rel=tolerance)
        assert own == pytest.approx(exact, rel=tolerance)


def test_gradients_take_a_quarter_of_the_bytes() -> None:
    for _, steps in run_ranks(trained, 2, "fsdp", "int8", {}):
        numel = sum(-(-p.shape[0] // 2) * p[0].numel() for p in Network().parameters())
        assert len(steps) == 12
        for step in steps:
            assert numel <= step["bytes_sent"] <= numel + 3 * 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_reduced(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    plain = run_ranks(trained, 2, "fsdp", None, {"mp_policy": policy})
    ours = run_ranks(trained, 2, "fsdp", "int8@64", {"mp_policy": policy})
    for (own, _), (exact, _) in zip(ours, plain, strict=True):
        assert own == pytest.approx(exact, rel=0.05)


def accumulated(compressed: bool) -> tuple[list[float], int]:
    model = sharded()
    steps = compress_sharded(model, "int8@64").ledger.steps if compressed else []
    return losses(model, accumulate=True), len(steps)


def test_gradients_may_be_accumulated() -> None:
    for (own, _), (exact, _) in zip(
        run_ranks(accumulated, 2, True), run_ranks(accumulated, 2, False), strict=True
    ):
        assert own == pytest.approx(exact, rel=0.02)


def replicated() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    plain, ours = sharded(mesh=mesh), sharded(mesh=mesh)
    compress_sharded(ours, "int8@64")
    return losses(plain), losses(ours)


def test_replicas_of_sharded_groups_train_as_well() -> None:
    for plain, ours in run_ranks(replicated, 4):
        assert ours == pytest.approx(plain, rel=0.02)


def compressed_between() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    plain = sharded(mesh=mesh)
    ours = sharded(mesh=mesh["inside"])
    group = mesh.get_group("between")
    for module in [*ours.layers, ours]:
        module.set_all_reduce_hook(  # type: ignore[operator]
            lambda shard: narrowgauge.all_reduce(shard, "int8@64", group=group)
        )
    return losses(plain), losses(ours)


def test_shards_can_be_compressed_between_replicas() -> None:
    for plain, ours in run_ranks(compressed_between, 4):
        assert ours == pytest.approx(plain, rel=0.02)


def scheduled() -> list[int]:
    model = sharded()
    compression = compress_sharded(model, Schedule({0: "fp32", 3: "int8"}))
    losses(model, steps=6)
    assert compression.formats[""].name == "int8"
    return [step["bytes_sent"] for step in compression.ledger.steps]


def test_schedules_change_the_format_of_shards() -> None:
    for sent in run_ranks(scheduled, 2):
        assert min(sent[:3]) > 3.5 * max(sent[3:])


def not_finite() -> list[bool]:
    model = sharded()
    compress_sharded(model, "e4m3")
    loss = (model(data(0)) - 1).pow(2).mean()
    (loss * (float("inf") if dist.get_rank() else 1)).backward()
    return [bool(p.grad.to_local().isfinite().all()) for p in model.parameters()]  # type: ignore[union-attr]


def test_shards_that_are_not_finite_on_one_rank_are_so_on_their_owners() -> None:
    for finite in run_ranks(not_finite, 2):
        assert not any(finite)


def mistaken() -> list[str]:
    texts = []
    model = sharded()
    for arguments in (
        {"format": {"head": "fp32", "layers.0.weight": "e5m2", "*": "e4m3"}},
        {"format": Hybrid()},
        {"format": "nvfp4", "scale": "shared"},
        {"format": "e5m2", "keep": {"heat": "fp32"}},
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            compress_sharded(model, **arguments)  # type: ignore[arg-type]
        texts.append(str(error.value))
    with pytest.raises(TypeError) as error:
        compress_sharded(Network())
    texts.append(str(error.value))
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError) as error:
        narrowgauge.all_reduce(distribute_tensor(torch.ones(4), mesh), "e5m2")
    texts.append(str(error.value))
    compress_sharded(model, {"head": "fp32", "*": "e4m3"})  # the group is still in order
    losses(model, steps=1)
    with pytest.raises(RuntimeError) as twice:
        compress_sharded(model)
    return [*texts, str(twice.value)]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    for texts in run_ranks(mistaken, 2):
        for text, part in zip(
            texts,
            [
                "'layers.0.weight' would travel in e5m2 and 'layers.0.bias' in e4m3, but FSDP2",
                "format is a Hybrid, which measures each parameter's gradient",
                "scale is 'shared', but nvfp4 brings a scale per block",
                "keep names 'heat', which matches no parameter; did you mean 'head'?",
                "model is a Network without a sharded module; call torch.distributed.fsdp.fully",
                "pass tensor.to_local(), the part that this rank has",
                "the gradients of 'the model' are compressed already; call compress_sharded once",
            ],
            strict=True,
        ):
            assert part in text


def disagree() -> None:
    compress_sharded(sharded(), ("e5m2", "e4m3")[dist.get_rank()])


def test_ranks_with_different_formats_all_raise() -> None:
    for result in run_ranks(disagree, 2, catch=True):
        assert isinstance(result, Raised)
        assert "format is e4m3 on rank 1, e5m2 on rank 0" in result.message


def sharded_together() -> list[str]:
    model = Network()
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(ValueError, match="in one buffer") as error:
        compress_sharded(model, "e4m3", keep={"layers.0": "fp32"})
    compression = compress_sharded(model, "e4m3", keep={"layers": "fp32"})
    losses(model, steps=2)
    return [str(error.value), *(f.name for f in compression.formats.values())]


def test_modules_that_were_sharded_together_share_a_format() -> None:
    for text, *formats in run_ranks(sharded_together, 2):
        assert "'layers.0.weight' would travel in fp32 and 'layers.1.weight' in e4m3" in text
        assert formats == ["e4m3", "fp32"] or formats == ["fp32", "e4m3"]
