"""Ranks that die, are slow, are cut off or disagree: readable errors in time, and a way back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import narrowgauge.collectives.transport
from narrowgauge.collectives.link import Link
from narrowgauge.gradients import Schedule, compress, compress_sharded
from tests.ranks import Raised, run_ranks
from tests.training_script import STEPS, model, step

ROOT = Path(__file__).parent.parent
CAN_LIMIT = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
SLOW = Link(1e-4, 1e6, 1e9, 1e-4, 1e6)


@pytest.mark.skipif(not CAN_LIMIT, reason="network namespaces need root and iproute2 (ip and tc)")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_cut_off_is_named_with_bucket_and_phase(world_size: int) -> None:
    done = subprocess.run(
        [
            *("bash", str(ROOT / "benchmarks" / "network.sh"), str(world_size), "1gbit"),
            *(sys.executable, "-m", "tests.training_script", "partition"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == world_size, done.stderr[-2000:]
    for line in lines:
        assert line["seconds"] < 20
        if line["rank"] == world_size - 1:
            assert f"rank {world_size - 1} in bucket" in line["error"]
    first = next(line["error"] for line in lines if line["rank"] == 0)
    assert f"rank 0 in bucket 0 waiting for codes of rank {world_size - 1}:" in first
    assert "no answer within 4 s" in first


def dawdle(format: str) -> None:
    network = model()
    compress(network, format, adapt=False, timeout=timedelta(seconds=2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    step(network, optimizer, 0)
    step(network, optimizer, 1)
    if dist.get_rank() == 1:
        time.sleep(7)
        return
    step(network, optimizer, 2)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("format", ["e4m3", "fp32"])
def test_a_slow_rank_is_named_with_bucket_phase_and_timeout(format: str, world_size: int) -> None:
    waiting, *others = run_ranks(dawdle, world_size, format, catch=True)
    assert isinstance(waiting, Raised)
    assert waiting.type_name == "CollectiveError"
    phase = "summing float32 with rank" if format == "fp32" else "waiting for codes of rank 1"
    assert f"rank 0 in bucket 0 {phase}" in waiting.message
    assert "no answer within 2 s" in waiting.message
    assert waiting.seconds < 7
    for other in others[1:]:
        assert isinstance(other, Raised)


def die_while_reducing(kind: str) -> None:
    if kind == "sharded":
        torch.manual_seed(0)
        network: nn.Module = nn.Sequential(nn.Linear(32, 300), nn.Linear(300, 4))
        fully_shard(network)
        compress_sharded(network, "int8@64", timeout=timedelta(seconds=15))
    else:
        network = model()
        compress(network, "e4m3", inside=2, timeout=timedelta(seconds=15))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for number in range(20):
        if number == 3 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(network, optimizer, number)


@pytest.mark.parametrize(("kind", "world_size"), [("sharded", 2), ("two levels", 4)])
def test_a_killed_rank_is_an_error_on_all_others(kind: str, world_size: int) -> None:
    *others, dead = run_ranks(die_while_reducing, world_size, kind, catch=True)
    assert dead is None
    for other in others:
        assert isinstance(other, Raised)
        assert other.seconds < 40


def attach_otherwise(argument: str) -> None:
    network = model()
    mine = dist.get_rank() == 1
    settings: dict[str, Any] = {
        "format": "e4m3",
        "adapt": False,
        "timeout": timedelta(seconds=30),
    }
    if argument == "version":
        narrowgauge.collectives.transport.VERSION += int(mine)
    elif argument == "absent":
        settings["timeout"] = timedelta(seconds=2)
        if mine:
            network(torch.ones(2, 32)).sum().backward()
            time.sleep(4)
            return
    elif mine:
        settings[argument] = {
            "format": Schedule({0: "e4m3", 9: "fp32"}),
            "scale": "shared",
            "message_bytes": 1 << 16,
            "keep": {"0.bias": "fp32"},
            "error_feedback": True,
            "adapt": True,
            "inside": 1,
            "inside_format": "bf16",
            "check_every": 5,
        }[argument]
    compress(network, **settings)


@pytest.mark.parametrize(
    "argument",
    [
        *("format", "scale", "message_bytes", "keep", "error_feedback", "adapt"),
        *("inside", "inside_format", "check_every", "version"),
    ],
)
def test_ranks_that_attach_otherwise_all_raise(argument: str) -> None:
    for rank, result in enumerate(run_ranks(attach_otherwise, 2, argument, catch=True)):
        assert isinstance(result, Raised)
        assert result.type_name == "CollectiveError"
        assert result.seconds < 25
        if argument == "version":
            assert f"rank {1 - rank} speaks version" in result.message
        else:
            assert f"{argument} is " in result.message
            assert "on rank 1, " in result.message
            assert "on rank 0" in result.message
            assert "All ranks must use the same settings" in result.message


def test_a_rank_that_attaches_alone_is_not_left_waiting() -> None:
    first = run_ranks(attach_otherwise, 2, "absent", catch=True)[0]
    assert isinstance(first, Raised)
    assert first.type_name == "CollectiveError"
    assert first.seconds < 25


def train_and_compare(world_size: int) -> None:
    for options in (
        {"format": "e4m3", "scale": "shared"},
        {"format": Schedule({0: "fp32", 2: "int4@32"}), "error_feedback": True},
        {"format": {"0": "bf16", "*": "nvfp4"}},
        {"format": "e2m1fn", "adapt": True, "link": SLOW},
        {"format": "e5m2", "inside": world_size // 2 if world_size == 4 else 1},
    ):
        network = model()
        compress(network, **{"adapt": False, **options}, check_every=1)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(network.parameters())
        for number in range(4):
            step(network, optimizer, number)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_have_the_same_bits_after_every_step(world_size: int) -> None:
    run_ranks(train_and_compare, world_size, world_size)  # check_every raises otherwise


def torchrun(folder: Path, kill_at: int) -> list[list[float]]:
    folder.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m"),
            *("tests.training_script", "resume", str(folder), str(kill_at)),
        ],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]


def test_torchrun_restarts_a_training_to_the_same_losses(tmp_path: Path) -> None:
    uninterrupted = torchrun(tmp_path / "whole", kill_at=STEPS)
    killed = torchrun(tmp_path / "killed", kill_at=7)
    assert (tmp_path / "killed" / "killed").exists()
    assert killed == uninterrupted
