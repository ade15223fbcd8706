"""The same policy of gradients under DDP and under FSDP2: a language model, on real ranks.

The Transformer of ``language_model.py`` learns in two processes, once replicated by DDP and once
sharded by ``fully_shard``, with gradients in the same format.

    python examples/fsdp_lm.py                         # some minutes on two cores
    python examples/fsdp_lm.py --steps 5 --only int8@64
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from language_model import RANKS, Job, Transformer, finish, learn
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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
    torch.manual_seed(seed)
    model, compression = distributed(place, format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own: list[torch.Tensor] = []
    validation = learn(model, optimizer, seed, steps, own.append)
    losses = torch.stack(own)
    dist.all_reduce(losses)
    return {
        "losses": [round(float(loss) / RANKS, 6) for loss in losses],
        "loss": validation,
        "bytes_sent": compression.ledger.steps[-1]["bytes_sent"],
    }


def table(runs: dict[Job, dict[str, Any]], steps: int) -> Table:
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
    wanted = only.split(",")
    unknown = [format for format in wanted if format not in FORMATS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is unknown; known: {', '.join(FORMATS)}")
    jobs = [(place, format, seed) for seed in range(seeds) for format in wanted for place in PLACES]
    runs = finish(out, ("place", "format", "seed"), jobs, steps, train)
    Console(width=120).print(table(runs, steps))


if __name__ == "__main__":
    typer.run(main)
