"""The search under DistributedDataParallel: one plan, one writer, and nobody waits for the dead."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import OperatorSearch, gradients
from tests.ranks import Raised, run_ranks
from tests.test_operator_search import BY_MEMORY


class Replicas:
    """A replica in DDP, and each rank's own part of the data."""

    def __init__(self, folder: str, **options: Any) -> None:
        torch.manual_seed(dist.get_rank())  # DDP makes them alike
        inner = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        self.model = DistributedDataParallel(inner)
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(10 + dist.get_rank())
        self.x = torch.randn(96, 16, generator=generator)
        self.y = self.x[:, :10].argmax(1)
        self.search = OperatorSearch(
            self.model,
            self.optimizer,
            ["bf16"],
            workdir=Path(folder) / "search",
            memory_weight=BY_MEMORY,
            seed_band=9.0,
            gradient_formats=["e3m0", "e5m2", "bf16"],
            wire_bound=0.12,
            **options,
        )

    def step(self, place: int) -> None:
        with self.search.step():
            begin = 16 * (place % 6)
            loss = F.cross_entropy(self.model(self.x[begin : begin + 16]), self.y[begin:][:16])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def epoch(self) -> None:
        for place in range(8):
            self.step(place)
        self.search.end_epoch(lambda: float(dist.get_rank()))


def searched(folder: str) -> dict[str, Any]:
    replica = Replicas(folder)
    while not replica.search.finished:
        replica.epoch()
    plan, search = replica.search.plan, replica.search
    weights = torch.cat([p.detach().flatten() for p in replica.model.parameters()])
    # Gradients in the formats that were found, by the policy as it is.
    compression = gradients.compress(replica.model, search.gradient_policy, adapt=False)
    replica.step(0)
    return {
        "plan": plan,
        "weights": weights,
        "policy": search.gradient_policy,
        "written": sorted(os.listdir(Path(folder) / "search")),
        "on wire": {name: f.name for name, f in compression.formats.items()},
        "evaluation": [e["evaluation"] for e in search._workdir.journal.of("epoch")],
    }


def test_all_ranks_hold_the_same_plan_and_rank_0_writes(tmp_path: Path) -> None:
    one, two = run_ranks(searched, 2, str(tmp_path))
    assert one["plan"] == two["plan"]
    assert "bf16" in one["plan"].formats.values()
    assert torch.equal(one["weights"], two["weights"])
    assert one["evaluation"] == two["evaluation"]
    assert set(one["evaluation"]) == {0.5}
    assert one["written"] == ["journal.jsonl", "plan.json", "snapshot.pt"]
    assert one["policy"] == two["policy"]
    assert set(one["policy"]) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert one["on wire"] == one["policy"]  # what was found is what travels


def only_rank_0_has_a_disk(folder: str) -> Any:
    if dist.get_rank() == 1:
        folder = "/proc/no/such/folder"
    replica = Replicas(folder)
    while not replica.search.finished:
        replica.epoch()
    again = Replicas(folder)
    return again.search.plan, again.search.epoch


def test_ranks_need_no_disk_in_common(tmp_path: Path) -> None:
    one, two = run_ranks(only_rank_0_has_a_disk, 2, str(tmp_path))
    assert one == two
    assert one[1] >= 2


def one_fails(folder: str, where: str) -> None:
    try:
        fail(folder, where)
    finally:
        time.sleep(0.5)  # until the others have heard of it


def fail(folder: str, where: str) -> None:
    rank = dist.get_rank()
    if where == "workdir" and rank == 0:
        Path(folder, "search").write_text("a file where the folder should be")
    replica = Replicas(folder)
    if where == "snapshot" and rank == 0:
        Path(folder, "search", "snapshot.tmp").mkdir()  # where the file should be
    if where == "evaluate":
        for place in range(12):
            replica.step(place)
        replica.search.end_epoch(lambda: 1 / (1 - rank))
    elif where == "backward":
        with replica.search.step():
            loss = replica.model(replica.x).sum()
            if rank == 0:
                loss.backward()
            else:  # DDP's own exchange, but no loss.backward() for the search to see
                torch.autograd.backward(loss)
    else:
        replica.epoch()


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        ("workdir", ["which is a file", "rank 0 raised: workdir is"]),
        ("snapshot", ["Is a directory", "rank 0 raised: "]),
        ("evaluate", ["rank 1 raised: division by zero", "division by zero"]),
        ("backward", ["rank 1 raised: the step ended without", "the step ended without"]),
    ],
)
def test_what_one_rank_raises_all_raise(tmp_path: Path, where: str, texts: list[str]) -> None:
    found = run_ranks(one_fails, 2, str(tmp_path), where, catch=True)
    for raised, text in zip(found, texts, strict=True):
        assert isinstance(raised, Raised)
        assert text in raised.message
        assert raised.seconds < 20
