"""All-reduce of one large tensor: ours against Gloo's float32 and bf16 and the wire's limit.

Run it as root with iproute2 for limited links (``make bench``); otherwise only the loopback is
measured and the table says so. Every method is timed in turn within one run; the slowest rank
counts. Bytes come from the interface's own counter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

import narrowgauge
from narrowgauge import kernels

HERE = Path(__file__).resolve().parent
BITS_PER_SECOND = {"1gbit": 1e9, "100mbit": 1e8}
BITS = {"Gloo float32": 32, "Gloo bf16": 16, "ours e5m2": 8, "ours e2m1fn": 4}


def methods(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The all-reduces to compare, each averaging ``tensor`` in place."""
    size = dist.get_world_size()
    half = tensor.bfloat16()

    def float32() -> None:
        dist.all_reduce(tensor.div_(size))

    def bf16() -> None:
        half.copy_(tensor).div_(size)
        dist.all_reduce(half)
        tensor.copy_(half)

    return {
        "Gloo float32": float32,
        "Gloo bf16": bf16,
        "ours e5m2": lambda: narrowgauge.all_reduce(tensor, "e5m2"),
        "ours e2m1fn": lambda: narrowgauge.all_reduce(tensor, "e2m1fn"),
    }


def sent_bytes() -> int:
    """Bytes the interface has sent so far, by its own counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def measure(numel: int, rounds: int) -> None:
    """One rank: time every method in turn and print rank 0's result as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    tensor = torch.empty(numel)
    source = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: dict[str, list[float]] = {name: [] for name in BITS}
    sent: dict[str, list[int]] = {name: [] for name in BITS}
    runs = methods(tensor)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            tensor.copy_(source)
            dist.barrier()
            bytes_before = sent_bytes()
            dist.barrier()  # nobody sends before everybody has read the counter
            begin = time.perf_counter()
            run()
            elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            # Behind the data in the link's queue: when it is through, so are the bytes to count.
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            after = sent_bytes()
            if turn:  # the first is a warm-up
                seconds[name].append(elapsed.item())
                # The loopback's counter sees what all ranks send.
                shared = ranks if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 1
                sent[name].append((after - bytes_before) // shared)
    if dist.get_rank() == 0:
        result = {
            name: {
                "milliseconds": statistics.median(seconds[name]) * 1e3,
                "fastest_milliseconds": min(seconds[name]) * 1e3,
                "bytes_sent": statistics.median(sent[name]),
            }
            for name in BITS
        }
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


def run_link(rate: str, ranks: int, numel: int, rounds: int) -> dict[str, Any]:
    """Measure on ``ranks`` ranks behind links of ``rate``."""
    command = [
        *("bash", str(HERE / "network.sh"), str(ranks), rate),
        *(sys.executable, __file__, "--worker", "--numel", str(numel), "--rounds", str(rounds)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the ranks failed with code {done.returncode}:\n{done.stderr[-3000:]}")
    results: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    for name, result in results.items():
        payload = 2 * (ranks - 1) / ranks * numel * BITS[name] / 8
        result["payload_bytes"] = payload
        if rate in BITS_PER_SECOND:
            result["limit_milliseconds"] = payload * 8 / BITS_PER_SECOND[rate] * 1e3
    return results


def main() -> None:
    """Measure what the machine allows; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--numel", type=int, default=6_500_000, help="elements (26 MB of float32)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["loopback", "1gbit", "100mbit"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "allreduce.json")
    options = parser.parse_args()
    if options.worker:
        measure(options.numel, options.rounds)
        return
    console = Console()
    limited = (
        os.geteuid() == 0 and shutil.which("tc") is not None and shutil.which("ip") is not None
    )
    if not limited:
        console.print("Limited links need root and iproute2; only the loopback is measured.")
    rates = [rate for rate in options.rates if limited or rate == "loopback"]
    report: dict[str, Any] = {
        "numel": options.numel,
        "torch": torch.__version__,
        "kernels": kernels.backend(),
        "threads_per_rank": 1,
        "processors": os.cpu_count(),
        "links": {},
    }
    table = Table(
        box=box.SIMPLE,
        title=f"All-reduce of {options.numel * 4 / 1e6:.0f} MB float32: median of "
        f"{options.rounds}, slowest rank, 1 thread per rank",
    )
    for heading in ("link", "ranks", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "limit", "× limit", "× float32", "MB sent", "× payload"):
        table.add_column(heading, justify="right")
    for rate in rates:
        for ranks in options.ranks:
            with console.status(f"{rate}, {ranks} ranks"):
                results = run_link(rate, ranks, options.numel, options.rounds)
            report["links"][f"{rate}, {ranks} ranks"] = results
            for name, result in results.items():
                limit = result.get("limit_milliseconds")
                table.add_row(
                    rate,
                    str(ranks),
                    name,
                    f"{result['milliseconds']:.4g}",
                    f"{limit:.4g}" if limit else "",
                    f"{result['milliseconds'] / limit:.2f}" if limit else "",
                    f"{result['milliseconds'] / results['Gloo float32']['milliseconds']:.2f}",
                    f"{result['bytes_sent'] / 1e6:.1f}",
                    f"{result['bytes_sent'] / result['payload_bytes']:.3f}",
                )
            table.add_section()
    console.print(table)
    console.print(
        "limit: payload ÷ rate, in ms. MB sent: by the interface's counter, per rank; payload: "
        "2(p-1)/p · elements · bits/8."
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
