"""What sending parameters as narrow differences does to training: a language model, on real ranks.

The Transformer of ``language_model.py`` learns in two processes under DDP; its AdamW is a
``ShardedOptimizer`` that sends parameters in float32 or as differences. Only that differs. As
training amplifies any difference, ``fp32-nudged`` is there to compare with: float32, its first
weight moved by 1e-6.

    python examples/sharded_lm.py                      # some minutes on two cores
    python examples/sharded_lm.py --steps 5 --seeds 1 --only int8
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from language_model import RANKS, Job, Transformer, finish, learn
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import ShardedOptimizer

METHODS = ("fp32", "fp32-nudged", "int8", "int4", "bf16")


def train(method: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on this rank: the validation loss, and how far replicas were from masters."""
    torch.manual_seed(seed)
    model = Transformer()
    if method == "fp32-nudged":
        with torch.no_grad():
            model.head.weight[0, 0] += 1e-6
    replicated = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(
        replicated.parameters(), torch.optim.AdamW, method.split("-")[0], lr=2e-3, adapt=False
    )
    errors: list[float] = []
    loss = learn(
        replicated, optimizer, seed, steps, lambda _: errors.append(optimizer.largest_error())
    )
    half = max(1, steps // 2)
    assert optimizer.check_replicas() == {}
    return {
        "loss": loss,
        "error_first_half": max(errors[:half]),
        "error_second_half": max(errors[half:], default=0.0),
        "last_error": errors[-1],
        "bytes_sent": optimizer.ledger.as_dict()["parameters"]["bytes_sent_per_step"],
    }


def table(runs: dict[Job, dict[str, Any]], steps: int) -> Table:
    """Validation losses, and their distance from float32's of the same seed."""
    result = Table(title=f"Transformer on Python's library, {RANKS} ranks, {steps} steps")
    result.add_column("parameters")
    for name in (
        "loss, by seed",
        "mean",
        "− float32",
        "worst seed",
        "error, 1st half",
        "2nd half",
        "bytes",
    ):
        result.add_column(name, justify="right")
    for method in METHODS:
        mine = {seed: run for (name, seed), run in runs.items() if name == method}
        if not mine:
            continue
        off = [r["loss"] - runs["fp32", s]["loss"] for s, r in mine.items() if ("fp32", s) in runs]
        result.add_row(
            method,
            " ".join(f"{mine[seed]['loss']:.4f}" for seed in sorted(mine)),
            f"{statistics.mean(run['loss'] for run in mine.values()):.4f}",
            f"{statistics.mean(off):+.4f}" if off else "–",
            f"{max(off, key=abs):+.4f}" if off else "–",
            f"{max(run['error_first_half'] for run in mine.values()):.1e}",
            f"{max(run['error_second_half'] for run in mine.values()):.1e}",
            f"{next(iter(mine.values()))['bytes_sent']:,.0f}",
        )
    return result


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("sharded-lm"),
    steps: Annotated[int, typer.Option(min=1)] = 500,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = ",".join(METHODS),
) -> None:
    """Run what is not yet in ``runs.jsonl`` and show all of it."""
    wanted = only.split(",")
    unknown = [method for method in wanted if method not in METHODS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; known: {', '.join(METHODS)}")
    jobs = [(method, seed) for seed in range(seeds) for method in wanted]
    runs = finish(out, ("method", "seed"), jobs, steps, train)
    Console(width=120).print(table(runs, steps))


if __name__ == "__main__":
    typer.run(main)
