"""What sending gradients in few bits does to accuracy: two trainings, eight ways, on real ranks.

A small ResNet on Fashion-MNIST and an LSTM that continues the source text of Python's standard
library are trained with DistributedDataParallel by 2 and by 4 processes over Gloo. Only the way
gradients are averaged differs: weights at the start and the order of the data depend on the seed
alone. Each finished run is a line of ``runs.jsonl``: a study that was interrupted goes on where it
stopped, and ends with a table (also as Markdown and JSON) and a figure.

    python examples/ddp_accuracy.py        # under an hour on two cores
    python examples/ddp_accuracy.py --data digits --steps 5 --seeds 1 --only '2ranks-(float32|e5m2)'

Needs Fashion-MNIST (Debian: ``apt-get install dataset-fashion-mnist``) or ``--data FOLDER`` with
its IDX files; it says so if missing.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.

import json
import math
import os
import platform
import re
import signal
import statistics
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from aps_accuracy import ResNet, accuracy, batches, standardised
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.demo.data import DataError, load_images
from narrowgauge.demo.results import end_last_line, json_lines
from narrowgauge.demo.training import append_line, ring_bytes
from narrowgauge.gradients import compress
from narrowgauge.report import Table, bytes_text, mean_and_deviation

RANKS = (2, 4)
METHODS = {
    "float32": "float32, plain DDP",
    "bf16": "bf16, hook",
    "powersgd4": "PowerSGD, rank 4",
    "e5m2": "e5m2",
    "e4m3": "e4m3",
    "int8@64": "int8@64",
    "e2m1fn@32": "e2m1fn@32",
    "e2m1fn@32-feedback": "e2m1fn@32, error feedback",
}
FEEDBACK = "-feedback"  # ends the names of methods that send in the next step what was rounded off
TIMEOUT = timedelta(seconds=60)
CHARACTERS = 64  # in a sample of text
# Parts of the standard library that are no programs: tables, tests, and what others installed.
NO_PROGRAMS = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
NO_PROGRAMS |= {"dist-packages"}


@dataclass(frozen=True)
class Settings:
    """What all runs of a task share; runs are comparable only if these are equal."""

    data: str
    steps: int
    batch: int  # samples per step, over all ranks
    learning_rate: float  # at its peak


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    ranks: int
    method: str
    seed: int

    @property
    def key(self) -> str:
        """Its name, but for the seed."""
        return f"{self.task}-{self.ranks}ranks-{self.method}"


# -- the two tasks ---------------------------------------------------------------------------------


class ImageTask:
    """Recognising images; the metric is the share of test images recognised, in %."""

    def __init__(self, settings: Settings) -> None:
        self.images = standardised(settings.data)
        self.samples = len(self.images.train_labels)

    def model(self) -> nn.Module:
        """An untrained network."""
        return ResNet()

    def optimizer(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """SGD with momentum."""
        rate = settings.learning_rate
        return torch.optim.SGD(model.parameters(), rate, 0.9, weight_decay=5e-4)

    def loss(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        """Mean loss of these training samples."""
        return cross_entropy(
            model(self.images.train_images[samples]), self.images.train_labels[samples]
        )

    def metric(self, model: nn.Module) -> float:
        """How good a trained model is."""
        return 100 * accuracy(model, self.images)


class Lstm(nn.Module):
    """Predicts each next character (of ASCII) of a text; 231 thousand parameters."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.fc = nn.Linear(width, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of shape (N, 128, length) for characters of shape (N, length)."""
        return self.fc(self.lstm(self.embedding(text))[0]).transpose(1, 2)


class TextTask:
    """Predicting characters; the metric is the loss on held-out files, in bits per character."""

    def __init__(self, settings: Settings) -> None:
        self.train, self.validation = read_texts(Path(sysconfig.get_paths()["stdlib"]))
        self.samples = len(self.train)

    def model(self) -> nn.Module:
        """An untrained network."""
        return Lstm()

    def optimizer(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(model.parameters(), settings.learning_rate)

    def loss(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        """Mean loss of these training samples."""
        text = self.train[samples].long()
        return cross_entropy(model(text[:, :-1]), text[:, 1:])

    def metric(self, model: nn.Module) -> float:
        """How good a trained model is."""
        some = self.validation[:: max(1, len(self.validation) // 1024)].long()  # of all files
        with torch.no_grad():
            loss = cross_entropy(model(some[:, :-1]), some[:, 1:])
        return float(loss) / math.log(2)


def read_texts(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Python files as samples of shape (N, CHARACTERS + 1); every tenth file is for validation."""
    files = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not NO_PROGRAMS & set(path.relative_to(folder).parts)
    ]
    parts = []
    for some in ([f for i, f in enumerate(files) if i % 10], files[::10]):
        text = "".join(path.read_text("utf-8", "replace") for path in some)
        codes = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
        size = CHARACTERS + 1
        parts.append(codes[: len(codes) // size * size].view(-1, size))
    return parts[0], parts[1]


TASKS = {"images": ImageTask, "text": TextTask}
METRICS = {"images": ("test accuracy", "%", 1), "text": ("validation loss", "bits/character", 3)}


# -- one run ---------------------------------------------------------------------------------------


def average_in_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook like torch's ``bf16_compress_hook``, which refuses tensors on the CPU."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    return work.get_future().then(lambda _: buffer.copy_(narrow))


def attach(method: str, model: DistributedDataParallel) -> Callable[[], float]:
    """Make a model average its gradients by a method.

    Returns:
        What to call after the training for the bytes that a rank sent per step: counted by the
        ledger, or computed for a ring all-reduce where torch's own collectives sent them.
    """
    elements = sum(parameter.numel() for parameter in model.parameters())
    ranks = dist.get_world_size()
    if method == "float32":
        return lambda: ring_bytes(elements, 32, ranks)
    if method == "bf16":
        model.register_comm_hook(None, average_in_bf16)
        return lambda: ring_bytes(elements, 16, ranks)
    if method == "powersgd4":
        # It starts in the third step (and feeds its errors back, as is its default): DDP arranges
        # its buckets anew after the first one.
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)

        def sent() -> float:
            _, before, after = state.compression_stats()
            return ring_bytes(elements, 32, ranks) * (after / before if before else 1.0)

        return sent
    # adapt=False: on a link as fast as this one, it would choose a wider format.
    if method.endswith(FEEDBACK):
        format = method.removesuffix(FEEDBACK)
        compression = compress(model, format, error_feedback=True, adapt=False, timeout=TIMEOUT)
    else:
        compression = compress(model, method, adapt=False, timeout=TIMEOUT)
    return lambda: compression.ledger.as_dict()["gradients"]["bytes_sent_per_step"]


def train(job: Job, task: ImageTask | TextTask, settings: Settings) -> dict[str, Any]:
    """One run, as a line of results; every rank calls it together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(job.seed)
    # One bucket for every method: over Gloo, PowerSGD does not survive two at a time. A size that
    # is given also holds for the first bucket, which is of 1 MB otherwise.
    model = DistributedDataParallel(task.model(), bucket_cap_mb=25)
    bytes_sent = attach(job.method, model)
    optimizer = task.optimizer(model, settings)
    indices = batches(task.samples, min(settings.batch, task.samples), job.seed)
    start = time.perf_counter()
    for step in range(settings.steps):
        done = step / settings.steps
        for group in optimizer.param_groups:
            warm_up, decay = (done + 1 / settings.steps) / 0.15, (1 - done) / 0.6
            group["lr"] = settings.learning_rate * min(1.0, warm_up, decay)
        task.loss(model, next(indices)[rank::ranks]).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    check_replicas(model)
    return {
        **asdict(job),
        "settings": asdict(settings),
        "metric": task.metric(model.module) if rank == 0 else None,
        "steps": settings.steps,
        "bytes_sent_per_step": bytes_sent(),
        "seconds": seconds,
    }


def check_replicas(model: nn.Module) -> None:
    """Raises if ranks hold different weights: then no training of one model was measured."""
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).nan_to_num()
    first = total.clone()
    dist.broadcast(first, 0)
    if not torch.equal(total, first):
        raise RuntimeError(f"rank {dist.get_rank()} ended with other weights than rank 0")


def work(
    rank: int, ranks: int, jobs: list[Job], every: dict[str, Settings], path: Path, store: str
) -> None:
    """What a rank does: all jobs, one after the other. Rank 0 appends their lines to ``path``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all; the parent tells the user
    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    try:
        dist.init_process_group("gloo", f"file://{store}", TIMEOUT, ranks, rank)
        tasks = {task: TASKS[task](every[task]) for task in {job.task for job in jobs}}
        for job in jobs:
            entry = train(job, tasks[job.task], every[job.task])
            if rank == 0:
                append_line(path, entry)
        dist.barrier()  # no rank leaves while another one still needs it
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once, without waiting for ranks that wait for this one
    # Nothing is left to tidy up, and one of many ranks once aborted while Python was shutting down
    # ("terminate called without an active exception", as when a thread is ended inside C++ code).
    os._exit(0)


def launch(jobs: list[Job], every: dict[str, Settings], path: Path, console: Console) -> None:
    """Train what is left on as many ranks as each job takes.

    Raises:
        SystemExit: a rank failed, and the others have been ended.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("training", total=len(jobs))
        before = len(json_lines(path))
        for ranks in RANKS:
            mine = [job for job in jobs if job.ranks == ranks]
            if not mine:
                continue
            with tempfile.TemporaryDirectory() as folder:
                arguments = (ranks, mine, every, path, f"{folder}/store")
                context = mp.spawn(work, arguments, ranks, join=False, daemon=True)
                try:
                    while not context.join(0.2):
                        progress.update(bar, completed=len(json_lines(path)) - before)
                except mp.ProcessExitedException as error:
                    raise SystemExit(
                        f"rank {error.error_index} of {ranks} failed ({error}), so the study "
                        "stopped; what it printed is above. The same command goes on from here"
                    ) from None
                except KeyboardInterrupt:
                    raise SystemExit("interrupted; the same command goes on from here") from None
            progress.update(bar, completed=len(json_lines(path)) - before)


# -- tables and figure -----------------------------------------------------------------------------


def finished(path: Path, every: dict[str, Settings]) -> dict[Job, dict[str, Any]]:
    """The runs of a file that were made with these settings; other lines are left out."""
    runs = {}
    for entry in json_lines(path):
        if not isinstance(entry, dict):
            continue
        names = [entry.get(name) for name in ("task", "ranks", "method", "seed")]
        numbers = [entry.get(name) for name in ("steps", "bytes_sent_per_step", "seconds")]
        if (
            names[0] in list(TASKS)  # what is no name may not be hashable either
            and names[1] in RANKS
            and names[2] in list(METHODS)
            and isinstance(names[3], int)
            and entry.get("settings") == asdict(every[names[0]])
            and all(is_number(value) for value in numbers)
            and "metric" in entry  # null if it was no number: the training diverged
            and (entry["metric"] is None or is_number(entry["metric"]))
        ):
            runs[Job(*names)] = entry
    return runs


def is_number(value: Any) -> bool:
    """Whether this is a number that JSON has."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


@dataclass(frozen=True)
class Summary:
    """What the seeds of one method say, beside those of float32.

    ``noise`` is the standard deviation of float32 over its seeds, ``difference`` the mean over the
    seeds that both have. ``verdict`` is ``"within"`` if |difference| ≤ noise, else ``"better"`` or
    ``"worse"``; or ``"diverged"``; or empty with less than two seeds.
    """

    task: str
    ranks: int
    method: str
    metrics: list[float | None]
    mean: float | None
    deviation: float | None
    difference: float | None
    noise: float | None
    verdict: str
    bytes_sent_per_step: float
    seconds: float


def summaries(runs: dict[Job, dict[str, Any]]) -> list[Summary]:
    """One for each task, number of ranks and method that has runs, in the order of the table."""
    result = []
    for task, ranks, method in [(t, r, m) for t in TASKS for r in RANKS for m in METHODS]:
        of_method, of_float32 = (
            {job.seed: runs[job] for job in sorted(runs, key=lambda job: job.seed)
             if (job.task, job.ranks, job.method) == (task, ranks, each)}
            for each in (method, "float32")
        )  # fmt: skip
        if not of_method:
            continue
        metrics = [entry["metric"] for entry in of_method.values()]
        diverged = None in metrics
        mean, deviation = (None, None) if diverged else mean_and_deviation(metrics)
        reference = {s: e["metric"] for s, e in of_float32.items() if e["metric"] is not None}
        noise = statistics.stdev(reference.values()) if len(reference) > 1 else None
        common = [of_method[s]["metric"] - reference[s] for s in of_method if s in reference
                  and of_method[s]["metric"] is not None]  # fmt: skip
        difference = statistics.fmean(common) if common and not diverged else None
        verdict = "diverged" if diverged else ""
        if method != "float32" and difference is not None and noise is not None:
            higher_is_better = METRICS[task][1] == "%"
            better = (difference > 0) == higher_is_better
            verdict = "within" if abs(difference) <= noise else "better" if better else "worse"
        sent = statistics.fmean(each["bytes_sent_per_step"] for each in of_method.values())
        seconds = statistics.median(each["seconds"] for each in of_method.values())
        result.append(
            Summary(task, ranks, method, metrics, mean, deviation, difference, noise, verdict,
                    sent, seconds)
        )  # fmt: skip
    return result


def table(rows: list[Summary], task: str, settings: Settings) -> Table:
    """The results of one task."""
    name, unit, digits = METRICS[task]
    cells = []
    for row in rows:
        spread = f" ± {row.deviation:.{digits}f}" if len(row.metrics) > 1 and row.mean else ""
        computed = "" if row.method not in ("float32", "bf16", "powersgd4") else " *"
        cells.append(
            [
                METHODS[row.method],
                str(row.ranks),
                "diverged" if row.mean is None else f"{row.mean:.{digits}f}{spread}",
                "–"
                if row.difference is None or row.method == "float32"
                else f"{row.difference:+.{digits}f}",
                row.verdict or "–",
                bytes_text(row.bytes_sent_per_step) + computed,
            ]
        )
    seeds = max((len(row.metrics) for row in rows), default=0)
    return Table(
        f"{task}: {name} by the way gradients are averaged",
        ["gradients", "ranks", f"{name}, {unit}", "− float32", "seed noise", "sent"],
        cells,
        [
            f"{settings.data}; {settings.steps} steps of {settings.batch} samples over all ranks; "
            f"mean ± standard deviation over {seeds} seed{'s' * (seeds != 1)}.",
            "Seed noise: within, if the mean difference from float32 on as many ranks is at most "
            "float32's standard deviation over the seeds; else better or worse.",
            "Sent: by each rank in a step, counted by the ledger; * computed for ring all-reduces.",
        ],
    )


def figure(rows: list[Summary], path: Path) -> None:
    """Runs as dots, a panel for each task and number of ranks; a band is float32's noise."""
    mpl.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(
        len(TASKS), len(RANKS), figsize=(10, 7), layout="constrained", sharex=True, squeeze=False
    )
    for task, panels in zip(TASKS, axes, strict=True):
        for ranks, panel in zip(RANKS, panels, strict=True):
            for row in rows:
                if (row.task, row.ranks) != (task, ranks):
                    continue
                place = list(METHODS).index(row.method)
                values = [value for value in row.metrics if value is not None]
                panel.plot([place] * len(values), values, "o", color="C0", alpha=0.7)
                if row.mean is not None:
                    panel.plot([place], [row.mean], "_", color="black", markersize=14)
                if row.method == "float32" and row.mean is not None and row.noise is not None:
                    low, high = row.mean - row.noise, row.mean + row.noise
                    panel.axhspan(low, high, color="gray", alpha=0.25, linewidth=0)
            panel.set_title(f"{task}, {ranks} ranks")
            panel.set_ylabel("{}, {}".format(*METRICS[task]))
            panel.set_xticks(range(len(METHODS)), METHODS.values(), rotation=40, ha="right")
            panel.set_xlim(-0.5, len(METHODS) - 0.5)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def main(
    data: Annotated[str, typer.Option(help="fashion-mnist, digits, or a folder")] = "fashion-mnist",
    out: Annotated[Path, typer.Option(help="folder of results")] = Path("ddp-accuracy"),
    steps: Annotated[int, typer.Option(min=0, help="of each run; 0: each task's own")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 3,
    only: Annotated[str, typer.Option(help="only runs whose names match this expression")] = "",
) -> None:
    """Train what is not trained yet, print the tables, and draw the figure."""
    console = Console()
    text = f"standard library of Python {platform.python_version()}"  # another one, another text
    every = {
        "images": Settings(data, steps or 550, 256, 0.2),
        "text": Settings(text, steps or 480, 32, 1e-2),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    end_last_line(path)
    done = finished(path, every)
    jobs = [
        job
        for ranks in RANKS
        for seed in range(seeds)
        for task in TASKS
        for method in METHODS
        for job in [Job(task, ranks, method, seed)]
        if re.search(only, job.key) and job not in done
    ]
    if any(job.task == "images" for job in jobs):
        try:
            load_images(data)  # fails here, readably, rather than in every rank
        except DataError as error:
            raise SystemExit(str(error)) from None
    launch(jobs, every, path, console)
    rows = summaries(finished(path, every))
    markdown = []
    for task, settings in every.items():
        its_table = table([row for row in rows if row.task == task], task, settings)
        console.print(its_table.rich())
        markdown.append(f"## {its_table.title}\n\n{its_table.markdown()}")
    (out / "tables.md").write_text("\n".join(markdown), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    figure(rows, out / "accuracy.png")
    console.print(f"written to {path}, tables.md, summary.json and accuracy.png beside it")


if __name__ == "__main__":
    typer.run(main)
