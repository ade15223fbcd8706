"""All-reduce of one tensor: ours against Gloo's float32 and bf16, PowerSGD, and the link's limit.

    python benchmarks/allreduce.py               2 and 4 ranks, every link, 4 KB to 100 MB
    python benchmarks/allreduce.py --two-hosts   two hosts of two ranks each: flat or on two levels

Run it as root with iproute2 for limited links (``make bench``); otherwise only the loopback is
measured and the table says so. Every method is timed in turn within one run, as often as fits into
``--seconds`` per size; the slowest rank counts. Bytes come from the interface's own counter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import links
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

import narrowgauge
from narrowgauge import kernels
from narrowgauge.collectives.link import measure_link
from narrowgauge.collectives.transport import Transport

UNITS = {"KB": 1000, "MB": 1_000_000}
RANK = 4  # of PowerSGD's factors
LEAST_ROUNDS = 3
NOTHING = "nothing"  # what measuring itself sends

Ours = Callable[..., Any]  # takes async_op, and then returns a Reduction


def bytes_of(size: str) -> int:
    """``"26MB"`` as a number."""
    return int(float(size[:-2]) * UNITS[size[-2:].upper()])


def gloo(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Torch's own all-reduce, in float32 and with a cast to bf16 and back."""
    size = dist.get_world_size()
    half = tensor.bfloat16()

    def float32() -> None:
        dist.all_reduce(tensor.div_(size))

    def bf16() -> None:
        half.copy_(tensor).div_(size)
        dist.all_reduce(half)
        tensor.copy_(half)

    return {"Gloo float32": float32, "Gloo bf16": bf16}


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The most nearly square view."""
    numel = tensor.numel()
    rows = max(n for n in range(1, math.isqrt(numel) + 1) if numel % n == 0)
    return tensor.view(rows, -1)


def power_sgd(tensor: torch.Tensor) -> Callable[[], object]:
    """What torch's PowerSGD hook does with a matrix: error feedback, factors kept for the next."""
    matrix = as_matrix(tensor)
    error = torch.zeros_like(matrix)
    rank = min(RANK, *matrix.shape)
    q = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(0))

    def run() -> None:
        matrix.add_(error)
        p = matrix @ torch.linalg.qr(q)[0]
        dist.all_reduce(p)
        p = torch.linalg.qr(p)[0]
        torch.mm(matrix.T, p, out=q)
        dist.all_reduce(q.div_(dist.get_world_size()))
        error.copy_(matrix)
        torch.mm(p, q.T, out=matrix)
        error.sub_(matrix)

    return run


def measure_size(numel: int, rounds: int, seconds: float, two_hosts: bool) -> dict[str, Any]:
    """Time every method in turn for one size."""
    ends = links.ends()
    source = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    tensor = torch.empty(numel)
    ours: dict[str, Ours] = {"ours e5m2": partial(narrowgauge.all_reduce, tensor, "e5m2")}
    data = {  # bytes that stand for the whole tensor
        "Gloo float32": 4 * numel,
        "Gloo bf16": 2 * numel,
        "PowerSGD 4": 4 * RANK * sum(as_matrix(tensor).shape),
        "ours e5m2": numel,
        "ours e2m1fn": numel / 2,
        "ours, two levels": numel,
    }
    runs: dict[str, Callable[[], object]] = {NOTHING: lambda: None} | gloo(tensor)
    if two_hosts:
        inside = int(os.environ["LOCAL_WORLD_SIZE"])
        ours["ours, two levels"] = partial(narrowgauge.all_reduce, tensor, "e5m2", inside=inside)
    else:
        runs["PowerSGD 4"] = power_sgd(tensor)
        ours["ours e2m1fn"] = partial(narrowgauge.all_reduce, tensor, "e2m1fn")
        ours["ours, adapting"] = partial(narrowgauge.all_reduce, tensor, "e5m2", adapt=True)
    runs |= ours

    def turn() -> dict[str, tuple[float, int]]:
        found = {}
        for name, run in runs.items():
            tensor.copy_(source)
            found[name] = links.timed(run)
        return found

    once = sum(elapsed for elapsed, _ in turn().values())  # the warm-up; equal on all ranks
    rounds = max(min(LEAST_ROUNDS, rounds), min(rounds, int(seconds / once)))
    turns = [turn() for _ in range(rounds)]
    own_bytes = statistics.median(found[NOTHING][1] for found in turns)
    results: dict[str, dict[str, Any]] = {}
    for name in list(runs)[1:]:
        times = [found[name][0] for found in turns]
        sent = statistics.median(found[name][1] for found in turns) - own_bytes
        if name == "ours, adapting":
            narrow = sent < results["Gloo float32"]["bytes_sent"] / 2
            data[name] = data["ours e5m2" if narrow else "Gloo float32"]
        payload = 2 * (ends - 1) / ends * data[name]
        results[name] = {
            "milliseconds": statistics.median(times) * 1e3,
            "fastest_milliseconds": min(times) * 1e3,
            "bytes_sent": sent,
            "payload_bytes": payload,
            "rounds": rounds,
        }
        # Adapting, a call that returns at once may decide otherwise than the one that was timed.
        if name in ours and name != "ours, adapting":
            results[name] |= apart(ours[name], tensor, source, 1 + rounds // 4)
        rate = links.BITS_PER_SECOND.get(os.environ["LINK_RATE"])
        if rate:
            limit = payload * 8 / rate * 1e3
            results[name]["limit_milliseconds"] = limit
            results[name]["share_of_limit"] = limit / results[name]["milliseconds"]
    if "ours, adapting" in results:
        results["ours, adapting"]["sent_as"] = "e5m2" if narrow else "float32"
    for result in results.values():
        quotient = result["milliseconds"] / results["Gloo float32"]["milliseconds"]
        result["times_float32"] = quotient
    return results


def apart(start: Ours, tensor: torch.Tensor, source: torch.Tensor, rounds: int) -> dict[str, float]:
    """This rank's time in codec and wire, each summed over threads that work at one time."""
    found: dict[str, list[float]] = {"codec_milliseconds": [], "wire_milliseconds": []}
    for _ in range(rounds):
        tensor.copy_(source)
        dist.barrier()
        reduction = start(async_op=True)
        reduction.wait()
        found["codec_milliseconds"].append(reduction.codec_seconds * 1e3)
        found["wire_milliseconds"].append(reduction.wire_seconds * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


def measure(sizes: list[str], rounds: int, seconds: float, two_hosts: bool) -> None:
    """One rank: measure all sizes and hand in the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, Any] = {"raw_bits_per_second": links.raw_bits_per_second()}
    if not two_hosts:
        result["link"] = dataclasses.asdict(measure_link(Transport(None, None)))
    result["sizes"] = {
        size: measure_size(bytes_of(size) // 4, rounds, seconds, two_hosts) for size in sizes
    }
    links.hand_in(result)


def table(title: str, sizes: dict[str, Any]) -> Table:
    """All methods and sizes on one link."""
    found = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in ("size", "method"):
        found.add_column(heading, no_wrap=True)
    for heading in ("ms", "× float32", "of limit", "MB sent", "× payload", "codec ms", "wire ms"):
        found.add_column(heading, justify="right")
    for size, results in sizes.items():
        for name, result in results.items():
            sent_as = f" ({result['sent_as']})" if "sent_as" in result else ""
            found.add_row(
                size,
                name + sent_as,
                f"{result['milliseconds']:.4g}",
                f"{result['times_float32']:.2f}",
                f"{result['share_of_limit']:.0%}" if "share_of_limit" in result else "",
                f"{result['bytes_sent'] / 1e6:.4g}",
                f"{result['bytes_sent'] / result['payload_bytes']:.3f}",
                f"{result['codec_milliseconds']:.3g}" if "codec_milliseconds" in result else "",
                f"{result['wire_milliseconds']:.3g}" if "wire_milliseconds" in result else "",
            )
        found.add_section()
    return found


def main() -> None:
    """Measure what the machine allows; print tables and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", help="of float32, such as 64KB or 26MB")
    parser.add_argument("--rounds", type=int, default=50, help="at most, per size")
    parser.add_argument("--seconds", type=float, default=10, help="per size, but 3 rounds at least")
    parser.add_argument("--ranks", nargs="+", default=["2", "4"])
    parser.add_argument("--rates", nargs="+", default=["loopback", *links.BITS_PER_SECOND])
    parser.add_argument(
        "--two-hosts", action="store_true", help="2 hosts of 2 ranks, limited links"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    name = "allreduce-two-hosts" if options.two_hosts else "allreduce"
    output = options.output or links.HERE / "results" / f"{name}.json"
    sizes = options.sizes or ["4KB", "64KB", "1MB", "26MB", "100MB"]
    if options.worker:
        measure(sizes, options.rounds, options.seconds, options.two_hosts)
        return
    arguments = ["--sizes", *sizes, "--rounds", str(options.rounds)]
    arguments += ["--seconds", str(options.seconds), *["--two-hosts"] * options.two_hosts]
    console = links.wide_console()
    rates = links.possible(options.rates, console)
    if options.two_hosts:  # whose counter and limit count what leaves a host
        rates = [rate for rate in rates if rate != "loopback"]
    if not rates:
        console.print("Nothing is measured.")
        return
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "kernels": kernels.backend(),
        "threads_per_rank": 1,
        "processors": os.cpu_count(),
        "links": {},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    for rate in rates:
        for ranks in ["2x2"] if options.two_hosts else options.ranks:
            where = f"{rate}, {ranks} ranks"
            with console.status(where):
                result = links.run_ranks(__file__, ranks, rate, *arguments)
            report["links"][where] = result
            output.write_text(json.dumps(report, indent=2) + "\n")
            raw = f"{result['raw_bits_per_second'] / 1e9:.3g} Gbit/s"
            console.print(table(f"{where}; one plain TCP connection: {raw}", result["sizes"]))
    console.print(
        "ms: median, slowest rank, 1 thread per rank. of limit: (payload ÷ rate) ÷ time; payload: "
        "2(p-1)/p · the tensor's bytes as sent. MB sent: by the interface's counter, per rank "
        "(with 2x2 ranks, per host, and p counts hosts). codec, wire: of rank 0 in calls of their "
        "own, "
        "summed over threads that work at the same time; wire is waiting for messages."
    )
    console.print(f"Written to {output}")


if __name__ == "__main__":
    main()
