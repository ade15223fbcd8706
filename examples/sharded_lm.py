"""What sending parameters as narrow differences does to training: a language model, on real ranks.

A small Transformer learns to continue the source text of Python's standard library, character by
character, in two processes under DDP; its AdamW is a ``ShardedOptimizer`` that sends parameters in
float32 or as differences. Only that differs: weights at the start and data depend on the seed. As
training amplifies any difference, ``fp32-nudged`` is there to compare with: float32, its first
weight moved by 1e-6. Each run is a line of ``runs.jsonl``; what is there is not run again.

    python examples/sharded_lm.py                      # some minutes on two cores
    python examples/sharded_lm.py --steps 5 --seeds 1 --only int8
"""

import json
import os
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import ShardedOptimizer
from narrowgauge.demo.results import end_last_line, json_lines
from narrowgauge.demo.training import append_line

RANKS, CONTEXT, BATCH, WIDTH, LAYERS = 2, 64, 16, 96, 2
METHODS = ("fp32", "fp32-nudged", "int8", "int4", "bf16")


class Transformer(nn.Module):
    """Reads characters (bytes) and predicts the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character at every place, of shape ``(batch, places, 128)``."""
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        scores: torch.Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return scores


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Characters to train on and to validate with: every tenth file of the library is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [torch.tensor(list(f.read_bytes()), dtype=torch.int64).clamp(max=127) for f in files]
    return torch.cat([p for n, p in enumerate(parts) if n % 10]), torch.cat(parts[::10])


def loss_of(model: nn.Module, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the characters after these places."""
    windows = torch.stack([text[p : p + CONTEXT + 1] for p in places.tolist()])
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(method: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on this rank: the validation loss, and how far replicas were from masters."""
    training, validation = texts()
    torch.manual_seed(seed)
    model = Transformer()
    if method == "fp32-nudged":
        with torch.no_grad():
            model.head.weight[0, 0] += 1e-6
    model = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, method.split("-")[0], lr=2e-3, adapt=False
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    errors = []
    for _ in range(steps):
        places = torch.randint(len(training) - CONTEXT - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, training, places).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        errors.append(optimizer.largest_error())
    generator.manual_seed(7)
    with torch.no_grad():
        places = torch.randint(
            len(validation) - CONTEXT - 1, (min(40, steps), 64), generator=generator
        )
        losses = [float(loss_of(model.module, validation, each)) for each in places]
    half = max(1, steps // 2)
    assert optimizer.check_replicas() == {}
    return {
        "loss": statistics.mean(losses),
        "error_first_half": max(errors[:half]),
        "error_second_half": max(errors[half:], default=0.0),
        "last_error": errors[-1],
        "bytes_sent": optimizer.ledger.as_dict()["parameters"]["bytes_sent_per_step"],
    }


def work(rank: int, jobs: list[tuple[str, int]], steps: int, path: Path, store: str) -> None:
    """A rank: all jobs in turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=RANKS
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), disable=rank > 0) as progress:
        task = progress.add_task("runs", total=len(jobs))
        for method, seed in jobs:
            progress.update(task, description=f"{method}, seed {seed}")
            found = train(method, seed, steps)
            if rank == 0:
                append_line(path, {"method": method, "seed": seed, "steps": steps, **found})
            progress.advance(task)
    dist.barrier()
    os._exit(0)


def runs_in(path: Path, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished runs of that many steps, by method and seed."""
    found = {}
    for line in json_lines(path):
        if isinstance(line, dict) and line.get("steps") == steps:
            found[line["method"], line["seed"]] = line
    return found


def table(runs: dict[tuple[str, int], dict[str, Any]], steps: int) -> Table:
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
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    end_last_line(path)
    wanted = [(method, seed) for seed in range(seeds) for method in only.split(",")]
    unknown = [method for method, _ in wanted if method not in METHODS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; known: {', '.join(METHODS)}")
    done = runs_in(path, steps)
    jobs = [job for job in wanted if job not in done]
    if jobs:
        with tempfile.TemporaryDirectory() as store:
            mp.spawn(work, (jobs, steps, path, store), RANKS)
    runs = runs_in(path, steps)
    Console(width=120).print(table(runs, steps))
    (out / "results.json").write_text(json.dumps(list(runs.values()), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
