"""Updated parameters from their owners to all ranks: ours against torch's ZeroRedundancyOptimizer.

    python benchmarks/parameters.py                       2 ranks at 1 Gbit and on the loopback
    python benchmarks/parameters.py --ranks 2 4 --rates 1gbit 100mbit loopback

Run it as root with iproute2 for limited links (``make bench``); otherwise only the loopback is
measured. A step is AdamW on each rank's share and whatever brings the result to all, after a
computation that sleeps (as when an accelerator computes) or keeps the processor busy, which is not
counted. Methods take turns, step by step, within one run; the slowest rank counts. Bytes come from
the interface's own counter, and are asserted.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import links
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from narrowgauge import ShardedOptimizer

WIDTH, LAYERS = 384, 12
FORMATS = {"fp32": 32, "bf16": 16, "e4m3": 8, "int8": 8, "int4": 4}


def model() -> nn.Module:
    """The matrices of a Transformer of 21 M parameters."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*layers)


class PlainGather:
    """What one writes by hand: a flat float32 master shard, one all-gather, in a dtype."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        numel = sum(p.numel() for p in parameters)
        share = -(-numel // ranks)
        self.flat = torch.zeros(share * ranks)
        self.gradient = torch.zeros(share * ranks)
        begin = 0
        for p in parameters:
            place = slice(begin, begin + p.numel())
            self.flat[place] = p.detach().flatten()
            p.data = self.flat[place].view(p.shape)
            self.gradient[place] = p.grad.flatten()
            begin += p.numel()
        own = slice(rank * share, (rank + 1) * share)
        self.master = nn.Parameter(self.flat[own].clone())
        self.master.grad = self.gradient[own]
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-3)
        self.coded = None if dtype == torch.float32 else torch.zeros(share * ranks, dtype=dtype)

    @torch.no_grad()
    def step(self) -> None:
        """AdamW, and the all-gather."""
        self.optimizer.step()
        if self.coded is None:
            dist.all_gather_into_tensor(self.flat, self.master.detach())
        else:
            dist.all_gather_into_tensor(self.coded, self.master.detach().to(self.coded.dtype))
            self.flat.copy_(self.coded)


def optimizer_of(name: str) -> Any:
    """A method with a model and gradients of its own."""
    torch.manual_seed(1 + dist.get_rank())
    parameters = list(model().parameters())
    generator = torch.Generator().manual_seed(2)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-2
    if name.startswith("ZeroRedundancy"):
        return ZeroRedundancyOptimizer(
            parameters,
            torch.optim.AdamW,
            lr=1e-3,
            parameters_as_bucket_view="bucket" in name,
        )
    if name.startswith("plain"):
        kind = torch.bfloat16 if "bf16" in name else torch.float32
        return PlainGather(parameters, kind)
    format = name.split()[-1]
    adapt = "adapt" in name
    return ShardedOptimizer(
        parameters, torch.optim.AdamW, format.removesuffix(","), lr=1e-3, adapt=adapt
    )


METHODS = [
    "ZeroRedundancyOptimizer",
    "ZeroRedundancyOptimizer, bucket view",
    "plain all-gather fp32",
    "plain all-gather bf16",
    *(f"ShardedOptimizer {format}" for format in FORMATS),
    "ShardedOptimizer, adapt, int8",
]


def measure(names: list[str], steps: int, kind: str, seconds: float) -> None:
    """One rank: all methods take turns; hand in medians of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    optimizers = {name: optimizer_of(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    for step in range(steps + 1):
        for name, optimizer in optimizers.items():
            links.compute(kind, seconds)
            elapsed, count = links.timed(optimizer.step)
            if step:  # the first one makes the state and the buffers
                times[name].append(elapsed)
                sent[name].append(count)
    errors = {
        name: optimizer.largest_error()
        for name, optimizer in optimizers.items()
        if isinstance(optimizer, ShardedOptimizer)
    }
    ledgers = {
        name: optimizer.ledger.as_dict()["parameters"]
        for name, optimizer in optimizers.items()
        if isinstance(optimizer, ShardedOptimizer)
    }
    links.hand_in(
        {
            "methods": {
                name: {
                    "step": statistics.median(times[name]),
                    "fastest": min(times[name]),
                    "bytes_sent": statistics.median(sent[name]),
                    "error": errors.get(name),
                    "ledger": ledgers.get(name),
                }
                for name in names
            }
        }
    )


def check(methods: dict[str, Any], ranks: int, limited: bool) -> None:
    """What must hold of every run: the bytes that the format says, and 3 % for TCP's headers."""
    numel = sum(p.numel() for p in model().parameters())
    for name, result in methods.items():
        if not limited or not name.startswith("ShardedOptimizer ") or "adapt" in name:
            continue
        bits = FORMATS[name.split()[-1]] + (8 / 256 if "fp32" not in name else 0)
        wanted = (ranks - 1) * numel / ranks * bits / 8
        share = result["bytes_sent"] / wanted
        assert 1 <= share < 1.06, f"{name}: {share:.3f} of the bytes"


def promises(methods: dict[str, Any], rate: str) -> dict[str, bool]:
    """What is asked at 1 Gbit and on the loopback, with 2 ranks."""
    step = {name: result["step"] for name, result in methods.items()}
    if rate == "loopback":
        plain = min(step["plain all-gather fp32"], step["ShardedOptimizer fp32"])
        return {
            "int8 at most 10 % slower than fp32": step["ShardedOptimizer int8"] <= 1.1 * plain,
            "adapted at most 10 % slower than fp32": step["ShardedOptimizer, adapt, int8"]
            <= 1.1 * plain,
        }
    zero = step["ZeroRedundancyOptimizer"]
    return {
        "int8 at most 0.4 × ZeroRedundancyOptimizer": step["ShardedOptimizer int8"] <= 0.4 * zero,
        "int4 at most 0.3 × ZeroRedundancyOptimizer": step["ShardedOptimizer int4"] <= 0.3 * zero,
    }


def table(title: str, methods: dict[str, Any]) -> Table:
    """All methods on one link."""
    found = Table(box=box.SIMPLE, title=title, title_justify="left")
    found.add_column("method", no_wrap=True)
    for heading in ("step ms", "fastest", "× Zero", "MB sent", "codec ms", "error"):
        found.add_column(heading, justify="right")
    reference = methods["ZeroRedundancyOptimizer"]["step"]
    for name, result in methods.items():
        ledger = result["ledger"]
        found.add_row(
            name,
            f"{result['step'] * 1e3:.1f}",
            f"{result['fastest'] * 1e3:.1f}",
            f"{result['step'] / reference:.2f}",
            f"{result['bytes_sent'] / 1e6:.2f}",
            "–" if ledger is None else f"{ledger['codec_seconds_per_step'] * 1e3:.1f}",
            "–" if result["error"] is None else f"{result['error']:.1e}",
        )
    return found


def main() -> None:
    """Measure what the machine allows; print tables and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", nargs="+", default=["2"])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "loopback"])
    parser.add_argument(
        "--compute", nargs="+", default=["sleeping", "busy"], choices=["sleeping", "busy"]
    )
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of computation")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--output", type=Path, default=links.HERE / "results" / "parameters.json")
    options = parser.parse_args()
    if options.worker:
        seconds = options.milliseconds / 1e3
        measure(options.methods, options.steps, options.compute[0], seconds)
        return
    console = links.wide_console()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "threads_per_rank": 1,
        "processors": os.cpu_count(),
        "links": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    held = True
    for rate in links.possible(options.rates, console):
        for ranks in options.ranks:
            for kind in options.compute:
                where = f"{rate}, {ranks} ranks, {kind}"
                arguments = ["--compute", kind, "--milliseconds", str(options.milliseconds)]
                arguments += ["--steps", str(options.steps), "--methods", *options.methods]
                with console.status(where):
                    result = links.run_ranks(__file__, ranks, rate, *arguments)
                methods = result["methods"]
                check(methods, int(ranks), rate != "loopback")
                if rate in ("1gbit", "loopback") and ranks == "2" and options.methods == METHODS:
                    result["promises"] = promises(methods, rate)
                    held &= all(result["promises"].values())
                report["links"][where] = result
                options.output.write_text(json.dumps(report, indent=2) + "\n")
                console.print(table(f"{where}: 21 M parameters, AdamW", methods))
                links.say_kept(result.get("promises", {}), console)
    console.print(
        "Median of the slowest rank, 1 thread per rank, methods in turns. MB sent: per rank and "
        "step, by the interface's counter. codec: of both threads, beside one another. error: of "
        "replicas, as a share of the largest master."
    )
    console.print(f"Written to {options.output}")
    sys.exit(not held)


if __name__ == "__main__":
    main()
