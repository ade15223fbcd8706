"""What the fault tests start as a program: a training that is cut off, or killed and resumed.

python -m tests.training_script partition            # under benchmarks/network.sh
torchrun -m tests.training_script resume FOLDER KILL_AT
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.collectives import CollectiveError
from narrowgauge.gradients import compress

STEPS = 12
EVERY = 3


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 4))
    return DistributedDataParallel(network, bucket_cap_mb=0.1)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss = (network(torch.randn(8, 32, generator=generator)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def partition() -> None:
    """Lose the link of the last rank in the middle of the training; tell what each rank raises."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    network = model()
    compress(network, "e4m3", adapt=False, timeout=timedelta(seconds=4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    result = {"rank": rank, "error": "", "seconds": 0.0}
    begin = time.monotonic()
    try:
        for number in range(1000):
            if number == 3:
                begin = time.monotonic()
                if rank == last:
                    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            step(network, optimizer, number)
    except CollectiveError as error:
        result["error"] = str(error)
        result["seconds"] = time.monotonic() - begin
    # One write, so that lines of several ranks do not mix.
    os.write(1, (json.dumps(result) + "\n").encode())
    time.sleep(3)  # the store of rank 0 must outlive the others
    os._exit(0)


def resume(folder: Path, kill_at: int) -> None:
    """Train with checkpoints; rank 1 dies once before step ``kill_at``; write the losses."""
    rank = dist.get_rank()
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    compression = compress(network, "int4@32", error_feedback=True, adapt=False)
    path = folder / "checkpoint.pt"
    losses: list[float] = []
    if path.exists():
        state = torch.load(path)
        network.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        compression.load_state_dict(state["compression"])
        losses = state["losses"][rank]
    for number in range(len(losses), STEPS):
        if number == kill_at and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(step(network, optimizer, number))
        if (number + 1) % EVERY == 0:
            compression.consolidate_state_dict()
            everybodys: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everybodys, losses)
            if rank == 0:
                state = {
                    "model": network.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "compression": compression.state_dict(),
                    "losses": everybodys,
                }
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").replace(path)
            dist.barrier()  # nobody goes on before the checkpoint is there
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world_size = next(dist.rendezvous("env://"))
    # Or else torch, restarted, may find the addresses of dead ranks in torchrun's store.
    store = dist.PrefixStore(f"life{restarts}", store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    if sys.argv[1] == "partition":
        partition()
    else:
        resume(Path(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
