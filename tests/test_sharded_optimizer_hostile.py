"""ShardedOptimizer with every optimizer of torch, odd layouts, and ranks that do not agree."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import narrowgauge as ng
from tests.ranks import Raised, run_ranks
from tests.test_sharded_optimizer import all_equal, data, network, set_gradients

Sharded = partial(ng.ShardedOptimizer, adapt=False)

NEED_WHOLE_PARAMETERS = {"Adafactor", "Muon"}
REFUSED = {"LBFGS", "SparseAdam"}


def optimizers_of_torch() -> list[str]:
    kinds = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]


def every_class(whole: bool) -> dict[str, str]:
    found = {}
    for name in optimizers_of_torch():
        kind = getattr(torch.optim, name)
        weights = [torch.randn(6, 10), torch.randn(10, 3)]
        ours = [nn.Parameter(w.clone()) for w in weights]
        theirs = [nn.Parameter(w.clone()) for w in weights]
        try:
            sharded = Sharded(ours, kind, "fp32", whole_parameters=whole, lr=0.01)
        except ValueError as error:
            found[name] = str(error)
            continue
        for p, q in zip(ours, theirs, strict=True):
            q.data.copy_(p)  # rank 0's
        plain = kind(theirs, lr=0.01)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
            sharded.step()
            plain.step()
        same = all(torch.allclose(p, q, 1e-6, 1e-7) for p, q in zip(ours, theirs, strict=True))
        found[name] = "" if same else "other numbers than torch"
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_every_optimizer_class_of_torch_works_or_is_refused(whole: bool) -> None:
    first, second = run_ranks(every_class, 2, whole)
    assert first == second
    refused = REFUSED if whole else REFUSED | NEED_WHOLE_PARAMETERS
    assert {"AdamW", "SGD", "LBFGS"} <= set(first)
    for name, error in first.items():
        wanted = f"{name} cannot be sharded" if name in refused else ""
        assert error.startswith(wanted), (name, error)
        assert bool(error) == bool(wanted), (name, error)


def odd_layouts() -> list[float]:
    torch.manual_seed(0)
    values = [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.randn(6, 4).t(),
        torch.randn(8, 8)[:, ::2],
        torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(3).expand(2, 3),
        torch.randn(5).bfloat16(),
    ]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    ours[5] = nn.Parameter(values[5])
    sharded = Sharded(ours, torch.optim.AdamW, "int8", lr=0.01)
    plain = torch.optim.AdamW(theirs, lr=0.01)
    for step in range(4):
        for p, q in zip(ours, theirs, strict=True):
            gradient = torch.randn(p.shape).to(p.dtype)
            if p.ndim == 4 and step % 2:
                gradient = gradient.contiguous(memory_format=torch.channels_last)
            p.grad, q.grad = gradient, gradient.clone()
        sharded.step()
        plain.step()
        sharded.zero_grad(set_to_none=bool(step % 2))
        assert all_equal(nn.ParameterList(ours))
    assert ours[4].is_contiguous(memory_format=torch.channels_last)
    return [
        float((p.float() - q.float()).abs().max())
        for p, q in zip(ours, theirs, strict=True)
        if p.numel()
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_lie_as_they_lay(world_size: int) -> None:
    for errors in run_ranks(odd_layouts, world_size):
        assert max(errors[:-1]) < (1e-3 if world_size > 1 else 1e-6)
        assert errors[-1] < 2e-2


def with_ddp() -> list[list[float]]:
    """Losses with DDP alone, and where the optimizer reduces gradients again."""
    found = []
    for gradient_format in (None, "fp32", "e5m2"):
        model = DistributedDataParallel(network(seed=dist.get_rank()))
        optimizer = Sharded(
            model.parameters(), torch.optim.AdamW, lr=1e-2, gradient_format=gradient_format
        )
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            loss = (model(data(step, dist.get_rank())) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all_equal(model)
        found.append(losses)
    return found


def test_a_mean_of_means_is_the_mean_under_ddp_too() -> None:
    """Reducing what DDP has averaged already costs bytes, and changes nothing but its rounding."""
    for plain, again, narrow in run_ranks(with_ddp, 2):
        assert again == pytest.approx(plain, abs=1e-5)
        assert narrow == pytest.approx(plain, abs=2e-2)


def disagree(case: str) -> None:
    model, rank = network(), dist.get_rank()
    optimizer = Sharded(
        model.named_parameters(), torch.optim.SGD, lr=0.1, timeout=timedelta(seconds=5)
    )
    set_gradients(model, 0)
    optimizer.step()
    if case == "lr":
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    if case == "group":
        kind = torch.float64 if rank else torch.float32
        optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(9, dtype=kind)))]})
    if case == "twice":
        again = model[0].weight if rank else nn.Parameter(torch.ones(9))
        optimizer.add_param_group({"params": [("extra", again)]})
    set_gradients(model, 1)
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("lr", "rank 1 has other settings in its param groups", "rank 0 has other settings in its"),
        ("group", "rank 1 adds other parameters", "'extra' is torch.float64; allowed"),
        ("twice", "rank 1 adds other parameters", "some parameters appear in more than one"),
    ],
)
def test_ranks_that_go_apart_all_raise_why(case: str, first: str, second: str) -> None:
    for raised, text in zip(run_ranks(disagree, 2, case, catch=True), (first, second), strict=True):
        assert isinstance(raised, Raised)
        assert text in raised.message
        assert raised.seconds < 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"adapt": "no"}, "adapt is 'no'; allowed: True or False"),
        ({"whole_parameters": 1}, "whole_parameters is 1; allowed: True or False"),
        ({"link": 3}, "link is 3; allowed: a Link, or None"),
        ({"ledger": {}}, "ledger is {}; allowed: a Ledger, or None"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ng.ShardedOptimizer(network().parameters(), torch.optim.SGD, lr=0.1, **arguments)


STEPS, SAVED, KILLED = 10, 5, 7


def trained(folder: str, killed: bool) -> list[float]:
    """Losses of a training with a feed, sharded parameters, and gradients that these reduce."""
    import torch.distributed.checkpoint as checkpoint

    warnings.simplefilter("ignore")
    rank, path = dist.get_rank(), Path(folder) / "checkpoint"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 100), nn.ReLU(), nn.Linear(100, 4))
    optimizer = Sharded(
        model.named_parameters(),
        torch.optim.AdamW,
        gradient_format="e5m2",
        lr=1e-2,
        timeout=timedelta(seconds=5),
    )
    samples = TensorDataset(torch.randn(16 * STEPS, 32))
    loader = DataLoader(samples, batch_size=16, shuffle=True) if rank == 0 else None
    feed = ng.Feed(loader, source="rank0", seed=3, timeout=5)
    losses: list[float] = []
    if path.exists():
        state = {"optimizer": optimizer.state_dict()}
        checkpoint.load(state, checkpoint_id=path)
        optimizer.load_state_dict(state["optimizer"])
        other = torch.load(path / "other.pt")
        feed.load_state_dict(other["feed"])
        losses = other["losses"][rank]
    for number, (batch,) in enumerate(feed, start=len(losses)):
        if killed and number == KILLED and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(batch) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number + 1 == SAVED:
            checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
            everybodys: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everybodys, losses)
            if rank == 0:
                torch.save({"feed": feed.state_dict(), "losses": everybodys}, path / "other.pt")
    return losses


def test_ranks_that_were_killed_train_on_to_the_same_losses(tmp_path: Path) -> None:
    """As torchrun restarts them: all ranks anew, from the checkpoint."""
    expected = run_ranks(trained, 2, str(tmp_path / "whole"), False)
    raised, dead = run_ranks(trained, 2, str(tmp_path / "killed"), True, catch=True)
    assert dead is None
    assert isinstance(raised, Raised)
    assert raised.type_name == "CollectiveError"
    assert "rank 1" in raised.message
    assert run_ranks(trained, 2, str(tmp_path / "killed"), False) == expected
    assert [len(losses) for losses in expected] == [STEPS, STEPS]
