"""The cost model against the clock: all-reduces and DDP steps, predicted and measured.

On every link (``network.sh``; limited ones need root and iproute2) each rank measures the link in
turn with all-reduces and with training steps of a 10-million-parameter network. The prediction is
made from the medians of the link and of a step whose gradients do not travel; what it is compared
with are medians too, of the slowest rank in every turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from links import HERE, hand_in, possible, run_ranks, timed, wide_console
from rich import box
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge
from narrowgauge.collectives.link import (
    Link,
    all_reduce_seconds,
    float32_seconds,
    measure_link,
)
from narrowgauge.collectives.transport import Transport

BATCH = 128
NUMEL = 6_500_000


def network() -> nn.Module:
    """About 10 million parameters in linear layers, last first: 2.1, 4.2, 4.2 million."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1000)
    )


def nothing_travels(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that returns every bucket as it is: DDP without communication."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


nothing_travels.__annotations__ = {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def training_step(kind: str) -> Callable[[], float]:
    """A step of DDP, gradients left out, in float32, or in e5m2; returns the seconds of forward."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    if kind == "computation":
        model.register_comm_hook(None, nothing_travels)
    elif kind == "step in e5m2":
        narrowgauge.gradients.compress(model, "e5m2")
    inputs, labels = torch.randn(BATCH, 2048), torch.randint(1000, (BATCH,))
    loss_of = nn.CrossEntropyLoss()

    def run() -> float:
        begin = time.perf_counter()
        loss = loss_of(model(inputs), labels)
        forward = time.perf_counter() - begin
        loss.backward()
        return forward

    return run


def measure(rounds: int) -> None:
    """One rank: measure everything in turn and hand it in."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = Transport(None, timedelta(minutes=2))
    tensor = torch.randn(NUMEL)
    runs: dict[str, Callable[[], object]] = {
        "float32, 26 MB": lambda: dist.all_reduce(tensor.div_(2)),
        "e5m2, 26 MB": lambda: narrowgauge.all_reduce(tensor, "e5m2"),
        "e2m1fn, 26 MB": lambda: narrowgauge.all_reduce(tensor, "e2m1fn"),
    }
    steps = {kind: training_step(kind) for kind in ("computation", "step in fp32", "step in e5m2")}
    forward: list[float] = []
    runs["computation"] = lambda: forward.append(steps["computation"]())
    runs["step in fp32"] = steps["step in fp32"]
    runs["step in e5m2"] = steps["step in e5m2"]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    links: list[tuple[float, ...]] = []
    for turn in range(rounds + 2):
        for name, run in runs.items():
            elapsed, _ = timed(run)
            if turn > 1:  # DDP makes its final buckets after the first step
                seconds[name].append(elapsed)
        if turn > 1:
            links.append(dataclasses.astuple(measure_link(transport)))
    hand_in(
        {
            "link": dataclasses.asdict(Link(*map(statistics.median, zip(*links, strict=True)))),
            "forward": statistics.median(forward[2:]),
            "measured": {name: statistics.median(times) for name, times in seconds.items()},
            "fastest": {name: min(times) for name, times in seconds.items()},
        }
    )


def predicted(result: dict[str, Any], ranks: int) -> dict[str, float]:
    """What the model says, from the link and the seconds of computation."""
    link, compute = Link(**result["link"]), result["measured"]["computation"]
    found = narrowgauge.predict(
        network(),
        nodes=ranks,
        link=link,
        format="e5m2",
        compute_seconds=compute,
        forward_share=result["forward"] / compute,
        message_seconds=0.0,
    )
    return {
        "float32, 26 MB": float32_seconds(link, NUMEL, ranks),
        "e5m2, 26 MB": all_reduce_seconds(link, NUMEL, 8, ranks),
        "e2m1fn, 26 MB": all_reduce_seconds(link, NUMEL, 4, ranks),
        "step in fp32": found.float32.seconds,
        "step in e5m2": found.narrow.seconds,
    }


def run_link(rate: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Measure on ``ranks`` ranks behind links of ``rate``, and predict."""
    result = run_ranks(__file__, str(ranks), rate, "--rounds", str(rounds))
    return result | {"predicted": predicted(result, ranks)}


def table(title: str, result: dict[str, Any]) -> Table:
    """What was predicted and measured on one link."""
    found = Table(box=box.SIMPLE, title=title, title_justify="left")
    found.add_column("what", no_wrap=True)
    for heading in ("predicted ms", "measured ms", "fastest ms", "predicted / measured"):
        found.add_column(heading, justify="right")
    for name, measured in result["measured"].items():
        guess = result["predicted"].get(name)
        found.add_row(
            name,
            f"{guess * 1e3:.4g}" if guess else "",
            f"{measured * 1e3:.4g}",
            f"{result['fastest'][name] * 1e3:.4g}",
            f"{guess / measured:.2f}" if guess else "",
        )
    return found


def main() -> None:
    """Measure what the machine allows; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["loopback", "1gbit", "100mbit"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "costmodel.json")
    options = parser.parse_args()
    if options.worker:
        measure(options.rounds)
        return
    console = wide_console()
    report: dict[str, Any] = {"torch": torch.__version__, "processors": os.cpu_count(), "links": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for rate in possible(options.rates, console):
        for ranks in options.ranks:
            with console.status(f"{rate}, {ranks} ranks"):
                result = run_link(rate, ranks, options.rounds)
            console.print(table(f"{rate}, {ranks} ranks, medians of {options.rounds}", result))
            report["links"][f"{rate}, {ranks} ranks"] = result
            options.output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
