"""The same policy of gradients under DDP and under FSDP2: a language model, on real ranks.

The Transformer of ``sharded_lm.py`` learns to continue the source text of Python's standard library
in two processes, once replicated by DDP and once sharded by ``fully_shard``, with gradients in the
same format. Weights at the start and data are equal. Each run is a line of ``runs.jsonl``; what is
there is not run again.

    python examples/fsdp_lm.py                         # some minutes on two cores
    python examples/fsdp_lm.py --steps 5 --only int8@64
"""

import json
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sharded_lm import BATCH, CONTEXT, RANKS, Transformer, loss_of, texts
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.demo.results import end_last_line, json_lines
from narrowgauge.demo.training import append_line
from narrowgauge.gradients import compress, compress_sharded

FORMATS = ("fp32", "int8@64", "e4m3@32", "e5m2")
PLACES = ("ddp", "fsdp")


def distributed(place: str, format: str) -> tuple[torch.nn.Module, Any]:
    """The model and what compresses its gradients."""
    model = Transformer()
    if place == "ddp":
        replicated = DistributedDataParallel(model)
        return replicated, compress(replicated, format, adapt=False)
    for layer in model.layers.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, compress_sharded(model, format)


def train(place: str, format: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on this rank: the losses of training, averaged over ranks, and of validation."""
    training, validation = texts()
    torch.manual_seed(seed)
    model, compression = distributed(place, format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = torch.empty(steps)
    for step in range(steps):
        places = torch.randint(len(training) - CONTEXT - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, training, places)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    generator.manual_seed(7)
    with torch.no_grad():
        places = torch.randint(
            len(validation) - CONTEXT - 1, (min(40, steps), 64), generator=generator
        )
        found = [float(loss_of(model, validation, each)) for each in places]
    entries = compression.ledger.steps
    return {
        "losses": [round(float(loss) / RANKS, 6) for loss in losses],
        "loss": statistics.mean(found),
        "bytes_sent": entries[-1]["bytes_sent"],
    }


def work(rank: int, jobs: list[tuple[str, str, int]], steps: int, path: Path, store: str) -> None:
    """A rank: all jobs in turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Torch warns of changing the head's output in place, which nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=RANKS
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), disable=rank > 0) as progress:
        task = progress.add_task("runs", total=len(jobs))
        for place, format, seed in jobs:
            progress.update(task, description=f"{place}, {format}, seed {seed}")
            found = train(place, format, seed, steps)
            if rank == 0:
                job = {"place": place, "format": format, "seed": seed, "steps": steps}
                append_line(path, job | found)
            progress.advance(task)
    dist.barrier()
    os._exit(0)


def runs_in(path: Path, steps: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Finished runs of that many steps, by place, format and seed."""
    return {
        (line["place"], line["format"], line["seed"]): line
        for line in json_lines(path)
        if isinstance(line, dict) and line.get("steps") == steps
    }


def table(runs: dict[tuple[str, str, int], dict[str, Any]], steps: int) -> Table:
    """Validation losses under DDP and FSDP2, and the bytes of FSDP2's reduce-scatter."""
    result = Table(title=f"Transformer on Python's library, {RANKS} ranks, {steps} steps")
    result.add_column("gradients")
    for name in ("DDP, by seed", "FSDP2, by seed", "worst difference", "bytes", "× float32"):
        result.add_column(name, justify="right")
    for format in FORMATS:
        seeds = sorted(seed for place, f, seed in runs if f == format and place == "fsdp")
        pairs = [
            [runs[place, format, s] for place in PLACES]
            for s in seeds
            if ("ddp", format, s) in runs
        ]
        if not pairs:
            continue
        wide = runs.get(("fsdp", "fp32", seeds[0]))
        sent = pairs[0][1]["bytes_sent"]
        result.add_row(
            format,
            " ".join(f"{ddp['loss']:.4f}" for ddp, _ in pairs),
            " ".join(f"{fsdp['loss']:.4f}" for _, fsdp in pairs),
            f"{max((b['loss'] - a['loss'] for a, b in pairs), key=abs):+.4f}",
            f"{sent:,}",
            f"{sent / wide['bytes_sent']:.3f}" if wide else "–",
        )
    return result


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("fsdp-lm"),
    steps: Annotated[int, typer.Option(min=1)] = 500,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str, typer.Option(help="Formats, separated by commas.")] = ",".join(FORMATS),
) -> None:
    """Run what is not yet in ``runs.jsonl`` and show all of it."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    end_last_line(path)
    unknown = [format for format in only.split(",") if format not in FORMATS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; known: {', '.join(FORMATS)}")
    done = runs_in(path, steps)
    wanted = [
        (place, format, seed)
        for seed in range(seeds)
        for format in only.split(",")
        for place in PLACES
    ]
    jobs = [job for job in wanted if job not in done]
    if jobs:
        with tempfile.TemporaryDirectory() as store:
            mp.spawn(work, (jobs, steps, path, store), RANKS)
    runs = runs_in(path, steps)
    Console(width=120).print(table(runs, steps))
    (out / "results.json").write_text(json.dumps(list(runs.values()), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
