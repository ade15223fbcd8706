"""What APS does to accuracy: the paper's experiments in small, on Fashion-MNIST, on one machine.

A small ResNet is trained as 8 and as 256 nodes would that *sum* their gradients in a narrow format
(``EmulatedNodes``), with and without APS. Each finished run is a line of ``runs.jsonl``: a study
that was interrupted goes on where it stopped, and ends with the tables and a figure.

    python examples/aps_accuracy.py --workers 2       # an hour or so on two cores
    python examples/aps_accuracy.py --data digits --steps 20 --seeds 1 --only nodes8   # a minute

Needs Fashion-MNIST (Debian: ``apt-get install dataset-fashion-mnist``) or ``--data FOLDER`` with
its IDX files, and for the runs with LARS ``pip install pytorch-optimizer``; it says so if missing.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, relu

from narrowgauge.demo.data import DataError, Images, load_images
from narrowgauge.demo.results import end_last_line, json_lines
from narrowgauge.demo.training import append_line
from narrowgauge.gradients import EmulatedNodes, emulate_all_reduce
from narrowgauge.ledger import round_off_sums

FORMATS = {"e5m2": "(5,2)", "e4m3": "(4,3)", "e3m0": "(3,0)"}
GROUP_SIZES = (4, 8, 16, 32, 64)
NODES = 256  # of the larger cluster

# APS (arXiv 1911.08907, v2), accuracy in %: float32, then per format with APS and without.
PAPER = {
    "DavidNet, CIFAR-10": (
        88.2, {"e5m2": (88.4, 88.3), "e4m3": (88.6, 10.0), "e3m0": (81.3, 10.0)},
    ),
    "ResNet-18, CIFAR-10, 8 nodes": (
        91.4, {"e5m2": (91.4, 90.1), "e4m3": (91.6, 90.4), "e3m0": (86.7, 10.0)},
    ),
    "ResNet-50, ImageNet, 256 nodes, last layer FP32": (
        76.02, {"e5m2": (75.98, 71.00), "e4m3": (75.93, 0.1)},
    ),
}  # fmt: skip
PAPER_LARS = (92.07, {"e5m2": (92.02, 91.74), "e4m3": (92.44, 92.04)})
PAPER_LAST_LAYER = {"e5m2": (75.08, 75.98), "e4m3": (75.46, 75.93)}
PAPER_ROUND_OFF = {4: 55.0, 8: 44.21, 16: 41.83, 32: 49.62, 64: 58.21, 256: 85.22}


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share; runs are comparable only if these are equal."""

    data: str = "fashion-mnist"
    steps: int = 120
    batch: int = 1024
    learning_rate: float = 0.3
    lars_rate: float = 10.0
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class Run:
    """One way to sum the gradients; float32 without ``format``."""

    nodes: int
    format: str | None = None
    aps: bool = True
    last_layer_wide: bool = False
    order: str = "published"  # or "ring", "hierarchical16"
    lars: bool = False

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        parts = [f"nodes{self.nodes}", self.format or "fp32"]
        parts += ["aps" if self.aps else "none"] if self.format else []
        parts += ["wide-last-layer"] if self.last_layer_wide else []
        parts += [] if self.order == "published" else [self.order]
        return "-".join(parts + (["lars"] if self.lars else []))


def all_runs() -> list[Run]:
    """The runs of the study, in the order of the tables."""
    runs = []
    for nodes in (8, 256):
        runs.append(Run(nodes))
        runs += [Run(nodes, format, aps) for format in FORMATS for aps in (True, False)]
    runs += [Run(256, format, last_layer_wide=True) for format in PAPER_LAST_LAYER]
    runs += [Run(256, "e5m2", order=order) for order in ("ring", "hierarchical16")]
    runs.append(Run(8, lars=True))
    runs += [Run(8, format, aps, lars=True) for format in PAPER_LARS[1] for aps in (True, False)]
    return runs


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The rectified sum of both ways."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Seven 3 × 3 convolutions in three blocks; 20 thousand parameters for ten classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (N, 10) for images of shape (N, 1, height, width)."""
        return self.fc(self.blocks(relu(self.norm(self.conv(x)))).mean((2, 3)))


def batches(samples: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of indices: one random permutation after another, remainders dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples // batch * batch].split(batch)


def standardised(data: str) -> Images:
    """The images with mean 0 and variance 1."""
    images = load_images(data)
    mean, deviation = images.train_images.mean(), images.train_images.std()
    return Images(
        images.name,
        (images.train_images - mean) / deviation,
        images.train_labels,
        (images.test_images - mean) / deviation,
        images.test_labels,
    )


def make_nodes(model: nn.Module, run: Run) -> EmulatedNodes:
    """The run's way to sum. Published: divided by the nodes first, then one after the other."""
    order = ("hierarchical", min(16, run.nodes)) if run.order == "hierarchical16" else "ring"
    published = run.order == "published"
    return EmulatedNodes(
        model,
        run.nodes,
        run.format or "fp32",
        order="sequential" if published else order,
        published=published,
        scale="shared" if run.aps and run.format else None,
        keep={"fc": "fp32"} if run.last_layer_wide else None,
    )


def make_optimizer(model: nn.Module, run: Run, settings: Settings) -> torch.optim.Optimizer:
    """SGD with momentum, or pytorch-optimizer's LARS with the same."""
    if not run.lars:
        return torch.optim.SGD(
            model.parameters(), settings.learning_rate, 0.9, weight_decay=settings.weight_decay
        )
    from pytorch_optimizer import LARS

    return LARS(
        model.parameters(), settings.lars_rate, weight_decay=settings.weight_decay, momentum=0.9
    )


def train(run: Run, settings: Settings, seed: int, images: Images) -> tuple[nn.Module, float]:
    """A trained model, and the seconds it took."""
    torch.manual_seed(seed)
    model = ResNet()
    nodes = make_nodes(model, run)
    optimizer = make_optimizer(model, run, settings)
    peak = settings.lars_rate if run.lars else settings.learning_rate
    batch = max(run.nodes, min(settings.batch, len(images.train_labels)) // run.nodes * run.nodes)
    start = time.perf_counter()
    indices = batches(len(images.train_labels), batch, seed)
    for step in range(settings.steps):
        done = step / settings.steps
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (done + 1 / settings.steps) / 0.15, (1 - done) / 0.6)
        for some in next(indices).view(run.nodes, -1):
            logits = model(images.train_images[some])
            cross_entropy(logits, images.train_labels[some]).backward()
            nodes.collect()
        optimizer.step()
        optimizer.zero_grad()
    return model, time.perf_counter() - start


def accuracy(model: nn.Module, images: Images) -> float:
    """Share of test images recognised, with the training images' statistics in batch norm."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain mean: a node's few images are too few
    with torch.no_grad():
        for some in images.train_images[:4096].split(512):
            model(some)
        model.eval()
        logits = torch.cat([model(some) for some in images.test_images.split(1000)])
    return float((logits.argmax(1) == images.test_labels).float().mean())


def round_off(settings: Settings, seed: int, images: Images) -> dict[str, float]:
    """The first convolution's round-off error in (5,2) with APS, by group size.

    The gradients are those of 256 nodes after half of a float32 training, of many batches, since
    this layer is small and its error a mean of ratios.
    """
    half = Settings(**{**vars(settings), "steps": max(1, settings.steps // 2)})
    model, _ = train(Run(8), half, seed, images)
    orders: dict[int, Any] = {k: ("hierarchical", k) for k in GROUP_SIZES}
    orders[NODES] = "ring"
    sums = {k: [0.0, 0] for k in orders}
    indices = batches(len(images.train_labels), min(len(images.train_labels), 1024), seed)
    for _ in range(min(32, settings.steps)):
        rows, some = [], next(indices)
        for part in some[: len(some) // NODES * NODES].view(NODES, -1):
            model.zero_grad()
            logits = model(images.train_images[part])
            cross_entropy(logits, images.train_labels[part]).backward()
            rows.append(model.get_parameter("conv.weight").grad.flatten().clone())
        stacked = torch.stack(rows)
        exact = stacked.double().mean(0).float()
        for k, order in orders.items():
            summed = emulate_all_reduce(stacked, "e5m2", order=order, scale="shared")
            total, count = round_off_sums(exact, summed)
            sums[k] = [sums[k][0] + total, sums[k][1] + count]
    return {str(k): total / count for k, (total, count) in sums.items()}


def work(run: Run | None, settings: Settings, seed: int) -> dict[str, Any]:
    """One run, or the measurement of round-off, as a line of results; in a worker process."""
    torch.set_num_threads(1)
    images = standardised(settings.data)
    entry: dict[str, Any] = {"settings": vars(settings), "seed": seed}
    if run is None:
        return {**entry, "key": "round-off", "errors": round_off(settings, seed, images)}
    model, seconds = train(run, settings, seed, images)
    return {**entry, "key": run.key, "accuracy": accuracy(model, images), "seconds": seconds}


# -- tables and figure -----------------------------------------------------------------------------


def is_complete(entry: Any) -> bool:
    """Whether a line of results holds all that tables and figure are made of."""
    if not isinstance(entry, dict) or type(entry.get("seed")) is not int:
        return False
    if entry.get("key") == "round-off":
        errors = entry.get("errors")
        groups = [str(k) for k in (*GROUP_SIZES, NODES)]
        return isinstance(errors, dict) and all(is_number(errors.get(k)) for k in groups)
    return isinstance(entry.get("key"), str) and is_number(entry.get("accuracy"))


def is_number(value: Any) -> bool:
    """Whether it can be drawn."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) < 1e300


class Results:
    """Finished runs of a file that were made with these settings; other lines are left out."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.by_key: dict[str, dict[int, dict[str, Any]]] = {}
        for entry in json_lines(path):
            if is_complete(entry) and entry.get("settings") == vars(settings):
                self.by_key.setdefault(entry["key"], {})[entry["seed"]] = entry

    def accuracies(self, run: Run) -> list[float]:
        """In %, one for each seed."""
        return [100 * each["accuracy"] for each in self.by_key.get(run.key, {}).values()]

    def cell(self, run: Run) -> str:
        """Mean ± standard deviation."""
        values = self.accuracies(run)
        if not values:
            return "–"
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}"

    def errors(self, group: int) -> list[float]:
        """Round-off errors in %, one for each seed."""
        runs = self.by_key.get("round-off", {}).values()
        return [100 * each["errors"][str(group)] for each in runs]


def tables(results: Results, name: str) -> list[Table]:
    """The paper's tables 4 and 6 to 9, with our numbers beside the paper's."""
    main = Table("", "FP32", *FORMATS.values(), title="Accuracy in %: APS / none")
    for title, (fp32, formats) in PAPER.items():
        pairs = ("{:g} / {:g}".format(*formats[f]) if f in formats else "" for f in FORMATS)
        main.add_row(f"paper: {title}", f"{fp32:g}", *pairs)
    for nodes in (8, 256):
        row = [
            f"{results.cell(Run(nodes, f))} / {results.cell(Run(nodes, f, aps=False))}"
            for f in FORMATS
        ]
        main.add_row(f"ours: {name}, {nodes} nodes", results.cell(Run(nodes)), *row)
    lars = Table("", "FP32", "(5,2)", "(4,3)", title="With LARS: APS / none")
    pairs = ("{:g} / {:g}".format(*pair) for pair in PAPER_LARS[1].values())
    lars.add_row("paper: ResNet-18, CIFAR-10, batch 8K", f"{PAPER_LARS[0]:g}", *pairs)
    row = [
        f"{results.cell(Run(8, f, lars=True))} / {results.cell(Run(8, f, aps=False, lars=True))}"
        for f in PAPER_LARS[1]
    ]
    lars.add_row(f"ours: {name}, 8 nodes", results.cell(Run(8, lars=True)), *row)
    last = Table("", "(5,2)", "(4,3)", title="APS, 256 nodes, last layer: low → FP32")
    last.add_row(
        "paper: ResNet-50, ImageNet", *("{:g} → {:g}".format(*p) for p in PAPER_LAST_LAYER.values())
    )
    row = [
        f"{results.cell(Run(256, f))} → {results.cell(Run(256, f, last_layer_wide=True))}"
        for f in PAPER_LAST_LAYER
    ]
    last.add_row(f"ours: {name}", *row)
    groups = [*(str(k) for k in GROUP_SIZES), "ring"]
    order = Table("", *groups, title="(5,2), APS, 256 nodes, by group size")
    order.add_row(
        "paper: first convolution of ResNet-50, round-off error",
        *(f"{error:g} %" for error in PAPER_ROUND_OFF.values()),
    )
    errors = [results.errors(k) for k in (*GROUP_SIZES, 256)]
    row = [f"{statistics.median(each):.1f} %" if each else "–" for each in errors]
    order.add_row(f"ours: first convolution, {name}, round-off error", *row)
    ring, hierarchical = (
        results.cell(Run(256, "e5m2", order=each)) for each in ("ring", "hierarchical16")
    )
    order.add_row("ours: accuracy", "", "", hierarchical, "", "", ring)
    return [main, lars, last, order]


def figure(results: Results, name: str, path: Path) -> bool:
    """Accuracy by format, one panel for each number of nodes; and round-off by group size.

    Panels without a result are left out; returns whether there was one to draw.
    """
    mpl.use("Agg")
    from matplotlib import pyplot

    runs = {n: [Run(n), *(Run(n, f, a) for f in FORMATS for a in (True, False))] for n in (8, 256)}
    shown = [n for n in runs if any(results.accuracies(run) for run in runs[n])]
    groups = (*GROUP_SIZES, NODES)
    ours = [results.errors(k) for k in groups]
    panels = len(shown) + bool(ours[0])
    if not panels:
        return False
    drawing, grid = pyplot.subplots(
        1, panels, figsize=(4 * panels, 3.6), layout="constrained", squeeze=False
    )
    axes = grid[0]
    for panel, nodes in zip(axes, shown, strict=False):
        reference = results.accuracies(Run(nodes))
        if reference:
            panel.axhline(statistics.fmean(reference), color="gray", linewidth=1, label="float32")
        for shift, aps, label in ((-0.1, True, "APS"), (0.1, False, "no scale")):
            values = [results.accuracies(Run(nodes, f, aps)) for f in FORMATS]
            places = [i + shift for i, each in enumerate(values) for _ in each]
            panel.plot(
                places, [x for each in values for x in each], "o" if aps else "x", label=label
            )
        panel.set_xticks(range(len(FORMATS)), FORMATS.values())
        panel.set_ylim(0, 100)
        panel.set_title(f"{name}, {nodes} nodes")
        panel.set_ylabel("test accuracy, %")
        panel.legend(loc="lower left")
    if ours[0]:
        panel, ticks = axes[-1], [*(str(k) for k in GROUP_SIZES), "ring"]
        panel.plot(ticks, [statistics.median(each) for each in ours], "o-", label=name)
        panel.plot(ticks, list(PAPER_ROUND_OFF.values()), "s--", color="gray", label="paper")
        panel.set(title="first convolution, (5,2), APS, 256 nodes", xlabel="ranks in a group")
        panel.set(ylabel="round-off error, %", ylim=(0, None))
        panel.legend()
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
    return True


def main(
    data: Annotated[str, typer.Option(help="fashion-mnist, digits, or a folder")] = "fashion-mnist",
    out: Annotated[Path, typer.Option(help="folder of results")] = Path("aps-accuracy"),
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps of each run")] = 120,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="runs at a time, one core each")] = 1,
    only: Annotated[str, typer.Option(help="only runs whose names match this expression")] = "",
) -> None:
    """Train what is not trained yet, print the tables, and draw the figure."""
    console = Console()
    settings = Settings(data, steps)
    try:
        name = load_images(data).name
    except DataError as error:
        raise SystemExit(str(error)) from None
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    if path.exists():
        end_last_line(path)
    done = Results(path, settings).by_key
    jobs: list[tuple[Run | None, int]] = [
        (run, seed)
        for seed in range(seeds)
        for run in (None, *all_runs())
        if re.search(only, run.key if run else "round-off")
        and seed not in done.get(run.key if run else "round-off", {})
    ]
    if any(run and run.lars for run, _ in jobs):
        try:
            import pytorch_optimizer  # noqa: F401
        except ImportError:
            raise SystemExit(
                "the runs with LARS need pytorch-optimizer (pip install pytorch-optimizer); leave "
                "them out with --only 'aps$|none$|fp32$'"
            ) from None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    context = multiprocessing.get_context("forkserver")
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        task = progress.add_task("training", total=len(jobs))
        futures = [pool.submit(work, run, settings, seed) for run, seed in jobs]
        try:
            for future in as_completed(futures):
                append_line(path, future.result())
                progress.advance(task)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise SystemExit("interrupted; the same command goes on from here") from None
    results = Results(path, settings)
    for table in tables(results, name):
        console.print(table)
    drawn = figure(results, name, out / "accuracy.png")
    console.print(f"written to {path}" + (f" and {out / 'accuracy.png'}" if drawn else ""))


if __name__ == "__main__":
    typer.run(main)
