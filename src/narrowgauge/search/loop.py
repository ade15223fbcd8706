"""The training loop of ``narrowgauge search``: trains until the plan is found."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from narrowgauge.formats import FormatLike
from narrowgauge.operators import OperatorPlan
from narrowgauge.operators.search import OperatorSearch
from narrowgauge.search.script import Training


class SearchStoppedError(Exception):
    """The search ended without a plan; the message says how it goes on.

    Attributes:
        interrupted: by Ctrl-C; otherwise the epochs are over.
    """

    def __init__(self, message: str, interrupted: bool) -> None:
        super().__init__(message)
        self.interrupted = interrupted


def run(
    training: Training,
    *,
    workdir: str | Path,
    formats: Sequence[FormatLike] = ("bf16",),
    memory_weight: float = 0.0,
    epochs: int = 12,
    console: Console | None = None,
) -> OperatorPlan:
    """Train until the plan is found, to the end of that epoch.

    Args:
        training: model, loss, batches and optimizer.
        workdir: where the search keeps what it found, and goes on from: ``journal.jsonl``,
            ``plan.json``, and ``snapshot.pt`` with model and optimizer at the last epoch's end.
        formats: candidates, see :class:`~narrowgauge.operators.search.OperatorSearch`.
        memory_weight: see there.
        epochs: to train at most, those before an interruption among them.
        console: where to show progress; by default standard output.

    Returns:
        The plan.

    Raises:
        SearchStoppedError: the epochs are over and the search is not, or Ctrl-C.
        ScriptError: loss or batches are not what they should be.
        ValueError: as :class:`~narrowgauge.operators.search.OperatorSearch`.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; at least 1 is needed")
    console = console or Console()
    model, optimizer = training.model, training.optimizer
    device = next((p.device.type for p in model.parameters()), "cpu")
    scaler = torch.amp.GradScaler(device) if "fp16" in map(str, formats) else None
    search = OperatorSearch(
        model,
        optimizer,
        formats,
        memory_weight=memory_weight,
        workdir=workdir,
        stateful=[] if scaler is None else [scaler],
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[found]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not first_rank()) as progress:
            while not search.finished and search.epoch < epochs:
                size = _length(training.batches)
                task = progress.add_task("", total=size, found="")
                model.train()
                for batch in training.epoch():
                    with search.step(batch):
                        loss = training.loss_of(batch)
                        if scaler is None:
                            loss.backward()
                            optimizer.step()
                        else:
                            scaler.scale(loss).backward()
                            scaler.step(optimizer)
                            scaler.update()
                        optimizer.zero_grad()
                    progress.update(
                        task,
                        advance=1,
                        description=f"epoch {search.epoch + 1}",
                        found=search.progress,
                    )
                value = search.end_epoch(training.evaluation)
                progress.update(task, found=f"evaluation {value:.4g}")
    except KeyboardInterrupt:
        raise SearchStoppedError(
            f"stopped in epoch {search.epoch + 1}; what was found is kept, and the same command "
            f"goes on from {str(workdir)!r}",
            interrupted=True,
        ) from None
    if not search.finished:
        raise SearchStoppedError(
            f"no plan is found after {search.epoch} epochs; the same command with more --epochs "
            f"goes on from {str(workdir)!r}",
            interrupted=False,
        )
    return search.plan


def first_rank() -> bool:
    """Whether this process is the one that speaks, under torchrun or alone."""
    return os.environ.get("RANK", "0") == "0"


def _length(batches: object) -> int | None:
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(batches)  # type: ignore[arg-type]
    return None
