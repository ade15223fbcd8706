"""Training steps on slow links: ours against DDP's float32, its bf16 hook, and PowerSGD.

    python benchmarks/ddp.py                        2 ranks, every link, both networks
    python benchmarks/ddp.py --ranks 2 4            4 ranks as well
    python benchmarks/ddp.py --bucket 'ours e5m2=8' --bucket float32=4
                                                    other bucket_cap_mb than the methods' defaults

Run it as root with iproute2 for limited links (``make bench``); otherwise only the loopback is
measured. Every method trains a model of its own, all from the same weights; their steps are taken
in turn within one run, and the slowest rank counts. Bytes come from the interface's own counter.

How much communication is hidden behind the backward pass is measured with two steps more: one
whose hook lets nothing travel (same buckets, same copies), and the communication of a step alone,
with no backward pass to hide behind.
"""

# No `from __future__ import annotations`: DDP inspects hooks' annotations as objects.

import argparse
import dataclasses
import json
import os
import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import links
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import kernels
from narrowgauge.gradients import compress

BATCH = 64
WARM_UP = 4  # DDP makes its final buckets after the first step, PowerSGD begins in the third
BUCKETS: dict[str, float | None] = {  # bucket_cap_mb; None: as torch has it, 25 and the first 1
    "no communication": None,
    "float32": None,
    "bf16": None,
    # With several under way it fails on Gloo: a bucket's second all-reduce starts when its first
    # ends, which is not in one order on all ranks.
    "PowerSGD 4": 1000.0,
    "ours e5m2": 2.0,
    "ours, adapting": 2.0,
    "ours int4@64": 4.0,
}
OURS: dict[str, dict[str, Any]] = {
    "ours e5m2": {"format": "e5m2", "adapt": False},
    "ours, adapting": {},
    "ours int4@64": {"format": "int4@64", "error_feedback": True, "adapt": False},
}
HIDDEN = (
    "hidden = (comm - exposed) / can hide, within 0 to 1\n"
    "  comm = the step's buckets reduced alone, with no backward pass\n"
    "  exposed = ms - ms of a step whose hook lets nothing travel (same buckets and copies)\n"
    "  cpu = processor time of the step on one rank beyond that of the step where nothing travels\n"
    "  can hide = comm - the longer of: what is left of it after backward, if buckets travelled\n"
    "  one after the other, each when that step had it ready, for its share of comm by its bytes;\n"
    "  and cpu, as far as ranks have no second processor: that work delays the backward pass\n"
    "  With one bucket nothing can be hidden: it is complete when the backward pass ends. Where\n"
    "  comm is far longer than what can hide, hidden is a small difference of long times: noise."
)


def network(name: str) -> nn.Module:
    """A multi-layer perceptron of 9.9 million parameters, or a CNN of 2.2 million."""
    torch.manual_seed(0)
    if name == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 512, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
        )
    widths = [784, *[1280] * 6, 512, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def left_after_backward(ready: list[float], sizes: list[int], comm: float) -> float:
    """Seconds of communication after the backward pass, if everything else of it were hidden.

    Args:
        ready: per bucket, seconds before the end of backward at which its hook was called.
        sizes: elements per bucket.
        comm: seconds that all of them take alone.
    """
    time_is = -ready[0]
    for before_end, size in zip(ready, sizes, strict=True):
        time_is = max(time_is, -before_end) + comm * size / sum(sizes)
    return max(0.0, time_is)


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook by another name: by its own DDP refuses it without a GPU."""
    return bf16_compress_hook(None, bucket)


@dataclasses.dataclass
class KeptBucket:
    """What a hook was given, to be reduced again outside of a backward pass."""

    numbers: torch.Tensor
    of: list[torch.Tensor]
    number: int
    last: bool

    def buffer(self) -> torch.Tensor:
        """As ``GradBucket`` has it."""
        return self.numbers

    def parameters(self) -> list[torch.Tensor]:
        """As ``GradBucket`` has it."""
        return self.of

    def index(self) -> int:
        """As ``GradBucket`` has it."""
        return self.number

    def is_last(self) -> bool:
        """As ``GradBucket`` has it."""
        return self.last


class Training:
    """A model of its own, and how its gradients travel."""

    def __init__(self, method: str, net: str, bucket_mb: float | None) -> None:
        # Weights are equal by their seed: broadcasting them takes long on slow links.
        # Views for everybody: otherwise DDP copies all gradients twice more in every step.
        self.model = DistributedDataParallel(
            network(net), bucket_cap_mb=bucket_mb, init_sync=False, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(BATCH, 1, 28, 28, generator=generator)
        self.labels = torch.randint(10, (BATCH,), generator=generator)
        self.communicates = method != "no communication"
        self.compression = None
        self.processor_seconds = 0.0
        self.hooks: list[float] = []
        self.ready: list[float] = []
        self.buckets: dict[int, KeptBucket] = {}
        if method == "bf16":
            self.model.register_comm_hook(None, bf16)
        elif method == "PowerSGD 4":
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook)
        elif method.startswith("nothing travels"):
            self.model.register_comm_hook(None, self._nothing_travels)
        elif method in OURS:
            self.compression = compress(self.model, **OURS[method], register=False)
            self.model.register_comm_hook(None, self._keep_and_compress)

    def step(self) -> None:
        """One training step; ``ready`` is then how long before backward's end each hook came."""
        busy = time.process_time()
        self.optimizer.zero_grad()
        with nullcontext() if self.communicates else self.model.no_sync():
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
            loss.backward()
        end = time.perf_counter()
        self.ready = [end - hook for hook in self.hooks]
        self.optimizer.step()
        self.processor_seconds = time.process_time() - busy

    def communicate(self) -> None:
        """What one step of ours sends, alone."""
        assert self.compression is not None
        for bucket in self.buckets.values():  # the last one waits for all
            self.compression.hook(None, bucket)

    def _nothing_travels(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self.hooks.clear()
        self.hooks.append(time.perf_counter())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _keep_and_compress(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        kept = self.buckets.get(bucket.index())
        if kept is None or kept.numbers.numel() != bucket.buffer().numel():
            if bucket.index() == 0:
                self.buckets.clear()  # DDP has made its final buckets
            self.buckets[bucket.index()] = KeptBucket(
                bucket.buffer().clone(), bucket.parameters(), bucket.index(), bucket.is_last()
            )
        return self.compression.hook(state, bucket)


def measure(net: str, rounds: int, buckets: dict[str, float | None]) -> None:
    """One rank: train with every method in turn and hand in the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # One for every size of bucket that ours have, to tell what of their time is not hidden.
    silent = {buckets[method]: f"nothing travels, {buckets[method]:g} MB" for method in OURS}
    everything = buckets | {name: bucket_mb for bucket_mb, name in silent.items()}
    trainings = {name: Training(name, net, bucket_mb) for name, bucket_mb in everything.items()}
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in trainings}
    alone: dict[str, list[float]] = {name: [] for name in OURS}
    busy: dict[str, list[float]] = {name: [] for name in trainings}
    ready: dict[str, list[list[float]]] = {name: [] for name in silent.values()}
    entries: dict[str, list[Any]] = {name: [] for name in OURS}
    for turn in range(WARM_UP + rounds):
        for name, training in trainings.items():
            timed = links.timed(training.step)
            if name in OURS:
                entry = training.compression.ledger.entries[-1]
                seconds_alone, _ = links.timed(training.communicate)
            if turn < WARM_UP:
                continue
            steps[name].append(timed)
            busy[name].append(training.processor_seconds)
            if name in OURS:
                entries[name].append(entry)
                alone[name].append(seconds_alone)
            elif name in ready:
                ready[name].append(training.ready)
    results: dict[str, dict[str, Any]] = {}
    for name in trainings:
        times = [seconds for seconds, _ in steps[name]]
        results[name] = {
            "milliseconds": statistics.median(times) * 1e3,
            "fastest_milliseconds": min(times) * 1e3,
            "processor_milliseconds": statistics.median(busy[name]) * 1e3,
            "bytes_sent": statistics.median(sent for _, sent in steps[name]),
            "bucket_cap_mb": everything[name],
        }
    for result in results.values():
        for other in ("float32", "bf16"):
            quotient = result["milliseconds"] / results[other]["milliseconds"]
            result[f"times_{other}"] = quotient
    link = trainings["ours, adapting"].compression.link
    for name in OURS:
        silent_step = silent[everything[name]]
        comm = statistics.median(alone[name]) * 1e3
        exposed = results[name]["milliseconds"] - results[silent_step]["milliseconds"]
        sizes = [bucket.numbers.numel() for bucket in trainings[name].buckets.values()]
        when = [statistics.median(hook) * 1e3 for hook in zip(*ready[silent_step], strict=True)]
        left = left_after_backward(when, sizes, comm)
        added = results[name]["processor_milliseconds"]
        added -= results[silent_step]["processor_milliseconds"]
        to_spare = min(1.0, (os.cpu_count() or 1) / dist.get_world_size() - 1)
        can_hide = max(0.0, comm - max(left, (1 - max(0.0, to_spare)) * added))
        payload = statistics.median(entry.bytes_sent for entry in entries[name])
        results[name] |= {
            "payload_bytes": payload,
            "wire_limit_milliseconds": payload / link.bytes_per_second * 1e3,
            "codec_milliseconds": statistics.median(e.codec_seconds for e in entries[name]) * 1e3,
            "wire_milliseconds": statistics.median(e.wire_seconds for e in entries[name]) * 1e3,
            "bucket_elements": sizes,
            "ready_milliseconds": when,
            "comm_milliseconds": comm,
            "exposed_milliseconds": exposed,
            "cpu_milliseconds": added,
            "left_milliseconds": left,
            "can_hide_milliseconds": can_hide,
            "hidden": min(1.0, max(0.0, (comm - exposed) / can_hide)) if can_hide else None,
        }
    links.hand_in(
        {
            "parameters": sum(p.numel() for p in network(net).parameters()),
            "rounds": rounds,
            "link": dataclasses.asdict(link),
            "methods": results,
        }
    )


def table(title: str, methods: dict[str, Any]) -> Table:
    """All methods on one link."""
    found = Table(box=box.SIMPLE, title=title, title_justify="left")
    found.add_column("method", no_wrap=True)
    for heading in ("ms", "× float32", "× bf16", "MB sent", "bucket MB"):
        found.add_column(heading, justify="right")
    for heading in ("comm ms", "exposed ms", "cpu ms", "can hide ms", "hidden"):
        found.add_column(heading, justify="right")
    for name, result in methods.items():
        bucket_mb = result["bucket_cap_mb"]
        row = [
            name,
            f"{result['milliseconds']:.4g}",
            f"{result['times_float32']:.2f}",
            f"{result['times_bf16']:.2f}",
            f"{result['bytes_sent'] / 1e6:.3f}",
            "torch's" if bucket_mb is None else f"{bucket_mb:g}",
        ]
        if "hidden" in result:
            parts = "comm", "exposed", "cpu", "can_hide"
            row += [f"{result[f'{part}_milliseconds']:.4g}" for part in parts]
            hidden = result["hidden"]
            row.append("–" if hidden is None else f"{hidden:.0%}")
        found.add_row(*row)
    return found


def bucket_of(setting: str) -> tuple[str, float]:
    """``"METHOD=MB"`` as a pair."""
    method, _, megabytes = setting.partition("=")
    if method not in BUCKETS:
        raise argparse.ArgumentTypeError(f"method is {method!r}; allowed: {list(BUCKETS)}")
    return method, float(megabytes)


def main() -> None:
    """Measure what the machine allows; print tables and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    parser.add_argument("--rounds", type=int, default=12, help="half as many at 100mbit")
    parser.add_argument("--ranks", nargs="+", default=["2"])
    parser.add_argument("--rates", nargs="+", default=["loopback", "1gbit", "100mbit"])
    parser.add_argument(
        "--bucket", type=bucket_of, action="append", default=[], metavar="METHOD=MB"
    )
    parser.add_argument("--output", type=Path, default=links.HERE / "results" / "ddp.json")
    options = parser.parse_args()
    if options.worker:
        measure(options.networks[0], options.rounds, BUCKETS | dict(options.bucket))
        return
    console = links.wide_console()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "kernels": kernels.backend(),
        "threads_per_rank": 1,
        "processors": os.cpu_count(),
        "batch": BATCH,
        "hidden": HIDDEN,
        "links": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    buckets = [part for name, mb in options.bucket for part in ("--bucket", f"{name}={mb}")]
    rates = links.possible(options.rates, console)
    for net in options.networks:
        for rate in rates:
            for ranks in options.ranks:
                where = f"{net}, {rate}, {ranks} ranks"
                rounds = max(1, options.rounds // 2) if rate == "100mbit" else options.rounds
                arguments = ["--networks", net, "--rounds", str(rounds), *buckets]
                with console.status(where):
                    result = links.run_ranks(__file__, ranks, rate, *arguments)
                report["links"][where] = result
                options.output.write_text(json.dumps(report, indent=2) + "\n")
                title = f"{where}: {result['parameters']:,} parameters, median of {rounds} steps"
                console.print(table(title, result["methods"]))
    console.print(
        "ms: slowest rank, 1 thread per rank. MB sent: per step and rank, by the interface's "
        f"counter. PowerSGD has one bucket, without overlap: it fails with more.\n{HIDDEN}"
    )
    console.print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
