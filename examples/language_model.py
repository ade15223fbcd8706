"""What the studies of a language model share: the model, its text, its training and its runs.

A small Transformer learns to continue the source text of Python's standard library, character by
character, in two processes. Weights at the start and data depend on the seed only. Each run is a
line of ``runs.jsonl`` in the study's folder; what is there is not run again.
"""

import json
import os
import statistics
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy

from narrowgauge.demo.results import end_last_line, json_lines
from narrowgauge.demo.training import append_line

RANKS, CONTEXT, BATCH, WIDTH, LAYERS = 2, 64, 16, 96, 2

Job: TypeAlias = tuple[str | int, ...]
"""What tells the runs of a study apart; the last of it is the seed."""
Train: TypeAlias = Callable[..., dict[str, Any]]
"""Makes one run on this rank, given what tells it apart and the number of steps."""


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


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    steps: int,
    after_step: Callable[[torch.Tensor], None],
) -> float:
    """Train on this rank, telling each step's loss; the loss of validation, the same on all ranks.

    The optimizer's learning rate is the highest of a cycle.
    """
    training, validation = texts()
    highest = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=steps)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        places = torch.randint(len(training) - CONTEXT - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, training, places)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        after_step(loss.detach())
    generator.manual_seed(7)
    count = min(40, steps)
    with torch.no_grad():
        places = torch.randint(len(validation) - CONTEXT - 1, (count, 64), generator=generator)
        return statistics.mean(float(loss_of(model, validation, each)) for each in places)


def _work(
    rank: int, train: Train, names: Sequence[str], jobs: list[Job], steps: int, path: Path, at: str
) -> None:
    """A rank: all jobs in turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Torch warns of changing the head's output in place, which nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dist.init_process_group("gloo", init_method=f"file://{at}/store", rank=rank, world_size=RANKS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), disable=rank > 0) as progress:
        task = progress.add_task("runs", total=len(jobs))
        for job in jobs:
            *kind, seed = job
            progress.update(task, description=f"{', '.join(map(str, kind))}, seed {seed}")
            found = train(*job, steps)
            if rank == 0:
                append_line(path, dict(zip(names, job, strict=True)) | {"steps": steps} | found)
            progress.advance(task)
    dist.barrier()
    os._exit(0)


def finish(
    folder: Path, names: Sequence[str], jobs: Sequence[Job], steps: int, train: Train
) -> dict[Job, dict[str, Any]]:
    """Make the runs that are not in the folder yet; all runs of that many steps that are there.

    Args:
        folder: of the study.
        names: what each part of a job is called in ``runs.jsonl``.
        jobs: what is wanted.
        steps: of each run.
        train: makes a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    end_last_line(path)

    def runs() -> dict[Job, dict[str, Any]]:
        lines = [line for line in json_lines(path) if isinstance(line, dict)]
        return {tuple(x[name] for name in names): x for x in lines if x.get("steps") == steps}

    done = runs()
    missing = [job for job in jobs if job not in done]
    if missing:
        with tempfile.TemporaryDirectory() as store:
            mp.spawn(_work, (train, names, missing, steps, path, store), RANKS)
    found = runs()
    (folder / "results.json").write_text(json.dumps(list(found.values()), indent=2) + "\n")
    return found
