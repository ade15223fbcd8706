"""ShardedOptimizer with every optimizer of torch, odd layouts, and ranks that do not agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

import narrowgauge as ng
from tests.ranks import Raised, run_ranks
from tests.test_sharded_optimizer import all_equal, data, network, set_gradients
from tests.training_script import STEPS, resume_sharded

ROOT = Path(__file__).parents[1]
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


def with_ddp(gradient_format: str | None) -> list[float]:
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
    return losses


def test_a_mean_of_means_is_the_mean_under_ddp_too() -> None:
    """Reducing what DDP has averaged already costs bytes, and changes nothing but its rounding."""
    plain = run_ranks(with_ddp, 2, None)
    for format, tolerance in (("fp32", 1e-5), ("e5m2", 2e-2)):
        for losses, expected in zip(run_ranks(with_ddp, 2, format), plain, strict=True):
            assert losses == pytest.approx(expected, abs=tolerance)


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


def uninterrupted(folder: str) -> list[float]:
    warnings.simplefilter("ignore")
    resume_sharded(Path(folder), STEPS)
    losses: list[float] = json.loads((Path(folder) / f"losses-{dist.get_rank()}.json").read_text())
    return losses


def test_torchrun_restarts_feed_and_sharded_parameters_to_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run_ranks(uninterrupted, 2, str(whole))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m"),
            *("tests.training_script", "sharded", str(killed), "7"),
        ],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (killed / "killed").exists()
    assert [json.loads((killed / f"losses-{r}.json").read_text()) for r in range(2)] == expected
    assert all(len(losses) == STEPS for losses in expected)
