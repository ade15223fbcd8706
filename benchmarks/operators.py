"""Plans that a search found, against float32, torch.autocast and everything in bf16.

    python benchmarks/operators.py                                  all networks, all parts
    python benchmarks/operators.py --networks mlp --parts search time --modes eager

Parts, each in a process of its own: ``search`` finds the plan while a network trains; ``time`` lets
all methods take turns, step by step; ``memory`` has a process for each method; ``loss`` trains each
method from several seeds and evaluates in float32. ``found`` is what the search decided; it may be
"keep float32" or "keep autocast". Results are added to those in the output file, so that parts can
be measured one after the other; the tables show what is there.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from links import HERE, say_kept, wide_console
from networks import NETWORKS, loss
from rich import box
from rich.table import Table
from torch import Tensor, nn

from narrowgauge.operators import OperatorPlan, record_operators
from narrowgauge.operators.search import OperatorSearch
from narrowgauge.operators.search.timing import compare, rotated
from narrowgauge.report import bytes_text

METHODS = ["fp32", "autocast", "all-bf16", "found"]
PARTS = ["search", "time", "memory", "loss"]
RESULTS = HERE / "results"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Training:
    """A network of the benchmark, its data, and a way to make a step."""

    def __init__(self, case: str, method: str, seed: int = 0, compiled: bool = False) -> None:
        name, self.layout = case.split(", ")[:2]
        torch.manual_seed(seed)
        self.network = NETWORKS[name]
        self.model = self.network.make().to(memory_format=LAYOUTS[self.layout])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.called: nn.Module = self.model
        if compiled:
            self.called = torch.compile(self.model)
        self.method, plan = method, None
        if method == "all-bf16":
            batch = self.batch(torch.Generator().manual_seed(0))
            x, y = batch  # recorded as it is, not compiled
            recording = record_operators(self.model, lambda: loss(self.model(x), y))
            plan = OperatorPlan.uniform(recording, "bf16")
        elif method == "found":
            plan = OperatorPlan.load(folder(case) / "plan.json")
            if plan.about["decision"] in ("fp32", "autocast"):  # as the search says: keep that
                self.method, plan = plan.about["decision"], None
        self.plan = plan

    def batch(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The next one."""
        x, y = self.network.data(generator or self.generator)
        return (x.contiguous(memory_format=LAYOUTS[self.layout]) if x.dim() == 4 else x), y

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Of the model as it is."""
        return loss(self.called(batch[0]), batch[1])

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """In which the forward pass and the loss are computed."""
        if self.plan is not None:
            return self.plan.applied(self.called)
        if self.method == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward, backward, optimizer."""
        with self.context():
            value = self.loss(batch)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batches: int = 8) -> float:
        """The mean loss on other batches, in float32."""
        generator = torch.Generator().manual_seed(999)
        self.model.eval()
        with torch.no_grad():
            values = [
                loss(self.model(x), y).item()
                for x, y in (self.batch(generator) for _ in range(batches))
            ]
        self.model.train()
        return statistics.fmean(values)


def folder(case: str) -> Path:
    """Of its search."""
    return RESULTS / "operators" / case.replace(", ", "-").replace(" ", "-")


# --- parts, each in a process of its own ---------------------------------------------------------


def search(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Search while the network trains; what it decided, and what it cost."""
    training = Training(case, "fp32")
    shutil.rmtree(folder(case), ignore_errors=True)
    folder(case).mkdir(parents=True)
    weight = 1.0 if case.endswith("memory") else 0.0
    search = OperatorSearch(
        training.model,
        training.optimizer,
        ["bf16"],
        memory_weight=weight,
        workdir=folder(case),
    )
    begin, made = time.perf_counter(), 0
    while not search.finished and search.epoch < options.epochs:
        for _ in range(options.epoch_steps):
            batch = training.batch()
            with search.step(batch):
                value = training.loss(batch)
                value.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
            made += 1
            if search.finished:
                break
        else:
            search.end_epoch(training.evaluate)
    about = search.plan.about
    formats = list(search.plan.formats.values())
    # The cost in steps of the training, as an epoch may not be over when the plan is found.
    spent = time.perf_counter() - begin
    step_seconds = (spent - about["cost"]["seconds"]) / made
    kept = ("decision", "reason", "contenders", "not_tried", "checks", "cost", "saved_bytes")
    return {
        **{key: about[key] for key in kept if key in about},
        "seconds_in_all": spent,
        "steps_made": made,
        "cost_steps": about["cost"]["seconds"] / step_seconds,
        "epoch_steps": options.epoch_steps,
        "operators": len(formats),
        "formats": {name: formats.count(name) for name in sorted(set(formats))},
    }


def time_steps(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """All methods take turns; medians, and ratios within rounds."""
    compiled = options.mode == "compiled"
    trainings = {name: Training(case, name, compiled=compiled) for name in options.methods}
    batch = next(iter(trainings.values())).batch()
    for training in trainings.values():
        for _ in range(3 if compiled else 1):
            training.step(batch)
    times: dict[str, list[float]] = {name: [] for name in trainings}
    end = time.perf_counter() + options.seconds
    for round in range(options.rounds):
        for name in rotated(list(trainings), round):
            begin = time.perf_counter()
            trainings[name].step(batch)
            times[name].append(time.perf_counter() - begin)
        if time.perf_counter() > end and round >= 3:
            break
    found: dict[str, Any] = {}
    for name, taken in times.items():
        found[name] = {"seconds": statistics.median(taken), "rounds": len(taken), "as": {}}
        for other in times:
            paired = compare(taken, times[other])
            found[name]["as"][other] = {"ratio": paired.ratio, "noise": paired.noise}
    return found


def memory(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of this process, by how much its peak grows in the first steps; and what autograd keeps."""
    training = Training(case, options.methods[0], compiled=options.mode == "compiled")
    batch = training.batch()
    own = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    if options.mode == "eager":
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), training.context():
            value = training.loss(batch)
        del value
    training.step(batch)
    Path("/proc/self/clear_refs").write_text("5")  # from here on, a new peak
    begin = status("VmRSS")
    for _ in range(2):
        training.step(batch)
    return {"peak_bytes": status("VmHWM") - begin, "saved_bytes": sum(kept.values()) or None}


def status(key: str) -> int:
    """Bytes, as the kernel counts them."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def final_loss(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train from each seed, evaluate in float32."""
    losses = []
    for seed in range(options.seeds):
        training = Training(case, options.methods[0], seed)
        for _ in range(options.steps):
            training.step(training.batch())
        losses.append(training.evaluate())
    return {"losses": losses, "steps": options.steps}


WORK: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "search": search,
    "time": time_steps,
    "memory": memory,
    "loss": final_loss,
}


def worker(part: str, case: str, *arguments: str) -> dict[str, Any]:
    """Do a part in a process of its own."""
    # Large pieces go back to the system at once, so that the peak is that of what is in use.
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **(small if part == "memory" else {})}
    command = [sys.executable, __file__, "--worker", part, "--case", case, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=7200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{part} of {case} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


# --- all of it -----------------------------------------------------------------------------------


def cases(names: list[str], layouts: list[str]) -> Iterator[str]:
    """``"network, layout"``, and with ``", memory"`` where a search weighs memory too."""
    for name in names:
        for layout in layouts if NETWORKS[name].pictures else ["contiguous"]:
            yield f"{name}, {layout}"
        if name.startswith("lm"):
            yield f"{name}, contiguous, memory"


def measure(case: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """The parts of one case, into its results."""
    if "search" in options.parts:
        arguments = ["--epoch-steps", str(options.epoch_steps), "--epochs", str(options.epochs)]
        results["search"] = worker("search", case, *arguments)
    rounds = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    for mode in options.modes:
        if "time" in options.parts:
            arguments = [*rounds, "--mode", mode, "--methods", *options.methods]
            results[f"time, {mode}"] = worker("time", case, *arguments)
        if "memory" in options.parts:
            for name in options.methods:
                arguments = ["--mode", mode, "--methods", name]
                results.setdefault(f"memory, {mode}", {})[name] = worker("memory", case, *arguments)
    if "loss" in options.parts:
        same = results["search"]["decision"]  # then found is the same, bit for bit
        for name in options.methods:
            arguments = ["--methods", name, "--steps", str(options.steps)]
            arguments += ["--seeds", str(options.seeds)]
            losses = results.setdefault("loss", {})
            known = name == "found" and losses.get(same)
            losses[name] = known or worker("loss", case, *arguments)


def promises(results: dict[str, Any]) -> dict[str, bool]:
    """What is asked of plans, where it was measured."""
    found: dict[str, bool] = {}
    for case, parts in results.items():
        times, name = parts.get("time, eager"), case.split(",")[0]
        if times is None or set(METHODS) - set(times):
            continue
        best = min((times[m]["seconds"], m) for m in METHODS[:3])[1]
        row = times["found"]["as"]
        allowed = 1.02 * (1 + row[best]["noise"])
        found[f"{case}: found at most 2 % slower than the best, {best}, or within the noise"] = (
            1 / row[best]["ratio"] <= allowed
        )
        if case == "mobilenet, channels_last":
            found[f"{case}: found at least 1.8 × autocast"] = row["autocast"]["ratio"] >= 1.8
            found[f"{case}: found at least 1.25 × fp32"] = row["fp32"]["ratio"] >= 1.25
        if name.startswith("lm") and not case.endswith("memory"):
            found[f"{case}: found at least 1.12 × autocast"] = row["autocast"]["ratio"] >= 1.12
        if "search" in parts and "cost" in parts["search"]:
            epochs = parts["search"]["cost_steps"] / parts["search"]["epoch_steps"]
            text = f"the search at most two epochs of {parts['search']['epoch_steps']} steps"
            found[f"{case}: {text} beyond the training"] = epochs <= 2
    return found


def searches(results: dict[str, Any]) -> Table:
    """What the searches decided and cost."""
    table = Table(box=box.SIMPLE, title="Searches", title_justify="left")
    table.add_column("network", no_wrap=True)
    table.add_column("decision")
    for heading in ("operators", "in bf16", "cost s", "in steps", "one by one"):
        table.add_column(heading, justify="right")
    for case, parts in results.items():
        if "search" not in parts:
            continue
        row, cost = parts["search"], parts["search"].get("cost", {})
        table.add_row(
            case,
            row["decision"],
            str(row["operators"]),
            str(row["formats"].get("bf16", 0)),
            f"{cost.get('seconds', 0):.1f}",
            f"{row['cost_steps']:.0f}",
            f"{cost.get('one_by_one_epochs', 0)} epochs of {row['epoch_steps']} steps",
        )
    return table


def steps(results: dict[str, Any], mode: str) -> Table:
    """Step times, memory and losses of all methods."""
    table = Table(box=box.SIMPLE, title=f"Training steps, {mode}", title_justify="left")
    table.add_column("network", no_wrap=True)
    table.add_column("method", no_wrap=True)
    headings = ("step ms", "rounds", "× fp32", "× autocast", "± noise", "peak", "saved", "loss")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for case, parts in results.items():
        times, peaks = parts.get(f"time, {mode}", {}), parts.get(f"memory, {mode}", {})
        for name in METHODS:
            if name not in times and name not in peaks:
                continue
            row, peak = times.get(name), peaks.get(name)
            losses = parts.get("loss", {}).get(name) if mode == "eager" else None
            ratios = [
                f"{row['as'][other]['ratio']:.2f}" if row and other in row["as"] else "–"
                for other in ("fp32", "autocast")
            ]
            noise = row["as"].get("fp32", {}).get("noise") if row else None
            table.add_row(
                case if name == METHODS[0] else "",
                name,
                f"{row['seconds'] * 1e3:.1f}" if row else "–",
                str(row["rounds"]) if row else "–",
                *ratios,
                f"{noise:.1%}" if noise else "–",
                bytes_text(peak["peak_bytes"]) if peak else "–",
                bytes_text(peak["saved_bytes"]) if peak and peak["saved_bytes"] else "–",
                " ".join(f"{value:.4f}" for value in losses["losses"]) if losses else "–",
            )
    return table


def main() -> None:
    """Measure what is asked for; print tables and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="eager", help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rounds", type=int, default=20, help="of steps that are timed")
    parser.add_argument("--seconds", type=float, default=60.0, help="after 4 rounds no more than")
    parser.add_argument("--epoch-steps", type=int, default=400, help="of a search's training")
    parser.add_argument("--epochs", type=int, default=8, help="of a search's training, at most")
    parser.add_argument("--steps", type=int, default=100, help="of a training for its loss")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "operators.json")
    options = parser.parse_args()
    if options.worker:
        print("RESULT " + json.dumps(WORK[options.worker](options.case, options)), flush=True)
        return
    console = wide_console()
    console.width = max(140, console.width)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"networks": {}}
    if options.output.exists():
        report = json.loads(options.output.read_text())
    report["torch"], report["threads"] = torch.__version__, torch.get_num_threads()
    report["cpu"] = torch.backends.cpu.get_cpu_capability()
    for case in cases(options.networks, options.layouts):
        results = report["networks"].setdefault(case, {})
        with console.status(case):
            measure(case, options, results)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(searches(report["networks"]))
    for mode in options.modes:
        console.print(steps(report["networks"], mode))
    kept = promises(report["networks"])
    say_kept(kept, console)
    console.print(
        f"torch {report['torch']}, {report['cpu']}, {report['threads']} threads. Methods take "
        "turns; medians; ratios within rounds, above 1 is faster; noise: two standard errors. "
        "Peak: by how much a process of its own grows in a step; saved: what autograd keeps. Loss: "
        "in float32, a number for each seed."
    )
    console.print(f"Written to {options.output}")
    sys.exit(not all(kept.values()))


if __name__ == "__main__":
    main()
