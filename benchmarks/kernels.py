"""Rounding and codec against ``copy_``, torch's casts, qtorch and ml_dtypes, in one run.

Machines are noisy, so all methods take turns and the ratios of medians count. Outputs exist
already unless "fresh" or ``.float()`` is said: a fresh 64 MB tensor costs several times the
rounding itself in page faults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from narrowgauge import decode, encode, kernels, quantize
from narrowgauge.kernels.backends import current
from narrowgauge.kernels.grid import grid_of
from narrowgauge.kernels.raw import threads_for

HERE = Path(__file__).resolve().parent
Methods = dict[str, Callable[[], object]]

# method, the yardstick, the least ratio wanted (None: for comparison)
TARGETS: list[tuple[str, str, float | None]] = [
    ("quantize e5m2", "copy_", 0.85),
    ("quantize e5m2 stochastic", "copy_", 0.5),
    ("encode e5m2", "torch to e5m2", 1.0),
    # As people write it, torch makes a fresh tensor; into an existing one it is faster.
    ("decode e5m2", "torch e5m2.float()", 5.0),
    ("decode e5m2", "torch from e5m2", None),
    ("decode e5m2, fresh", "torch e5m2.float()", None),
    ("decode e4m3fn", "torch e4m3fn.float()", 5.0),
    ("decode e4m3fn", "torch from e4m3fn", 5.0),
]
SMALL_TARGETS: list[tuple[str, str, float | None]] = [("kernel e5m2", "copy_", 0.7)]


def methods(numel: int) -> tuple[Methods, dict[str, str]]:
    """What to time on ``numel`` float32 numbers; and what could not be, with the reason."""
    x, out = torch.randn(numel), torch.empty(numel)
    codes = torch.empty(numel, dtype=torch.uint8)
    half = torch.empty(numel // 2, dtype=torch.uint8)
    e5m2 = torch.empty(numel, dtype=torch.float8_e5m2)
    e4m3fn = torch.empty(numel, dtype=torch.float8_e4m3fn)
    kernel, grid, threads = current(), grid_of("e5m2"), threads_for(numel)
    found: Methods = {
        "copy_": lambda: out.copy_(x),
        # Without the operator around it, whose few microseconds count only for small tensors.
        "kernel e5m2": lambda: kernel.quantize(x, out, grid, "nearest-even", None, threads),
        "quantize e5m2": lambda: quantize(x, "e5m2", out=out),
        "quantize e4m3": lambda: quantize(x, "e4m3", out=out),
        "quantize e4m3fn": lambda: quantize(x, "e4m3fn", out=out),
        "quantize e3m0": lambda: quantize(x, "e3m0", out=out),
        "quantize bf16": lambda: quantize(x, "bf16", out=out),
        "quantize e5m2 stochastic": lambda: quantize(x, "e5m2", rounding="stochastic", out=out),
        "quantize e5m2 up": lambda: quantize(x, "e5m2", rounding="up", out=out),
        "encode e5m2": lambda: encode(x, "e5m2", out=codes),
        "encode e4m3fn": lambda: encode(x, "e4m3fn", out=codes),
        "encode e2m1fn": lambda: encode(x, "e2m1fn", out=half),
        "torch to e5m2": lambda: e5m2.copy_(x),
        "torch to e4m3fn": lambda: e4m3fn.copy_(x),
        "decode e5m2": lambda: decode(codes, "e5m2", out=out),
        "decode e4m3fn": lambda: decode(codes, "e4m3fn", out=out),
        "decode e2m1fn": lambda: decode(half, "e2m1fn", out=out),
        "torch from e5m2": lambda: out.copy_(e5m2),
        "torch from e4m3fn": lambda: out.copy_(e4m3fn),
        # Into fresh tensors, which is mostly page faults.
        "decode e5m2, fresh": lambda: decode(codes, "e5m2"),
        "torch e5m2.float()": lambda: e5m2.float(),
        "torch e4m3fn.float()": lambda: e4m3fn.float(),
    }
    missing: dict[str, str] = {}
    try:
        import ml_dtypes
    except ImportError as error:
        missing["ml_dtypes to e5m2"] = str(error)
    else:
        array, theirs = x.numpy(), np.empty(numel, dtype=ml_dtypes.float8_e5m2)
        found["ml_dtypes to e5m2"] = lambda: np.copyto(theirs, array, casting="unsafe")
    try:
        from qtorch.quant import float_quantize
    except Exception as error:  # it compiles C++ while being imported, which may fail in any way
        missing["qtorch e5m2"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    else:
        found["qtorch e5m2"] = lambda: float_quantize(x, exp=5, man=2, rounding="nearest")
    return found, missing


def medians(found: Methods, rounds: int) -> dict[str, float]:
    """Seconds of each method, the median of ``rounds`` turns."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, method in found.items():
            method()  # the caches as this method leaves them
            start = time.perf_counter()
            method()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Time, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "results" / "kernels.json")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    about = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": kernels.backend(),
        "processor_capability": torch.backends.cpu.get_cpu_capability(),
    }
    report: dict[str, object] = {**about, "sizes": {}}
    sizes: dict[str, object] = {}
    for numel, rounds, targets in (
        (1 << 24, options.rounds, TARGETS),
        (1 << 16, 20 * options.rounds, SMALL_TARGETS),
    ):
        found, missing = methods(numel)
        times = medians(found, rounds)
        title = f"{numel:,} float32, {about['threads']} threads, {about['backend']}"
        table = Table("method", "ms", "GB/s of float32", "of copy_", title=title)
        for name, seconds in times.items():
            table.add_row(
                name,
                f"{seconds * 1e3:.3f}",
                f"{8 * numel / seconds / 1e9:.1f}",
                f"{times['copy_'] / seconds:.2f}",
            )
        for name, reason in missing.items():
            table.add_row(name, "-", "-", f"not run: {reason}")
        console.print(table)
        ratios = []
        for name, yardstick, wanted in targets:
            ratio = times[yardstick] / times[name]
            verdict = "for comparison"
            if wanted is not None:
                verdict = f"wanted {wanted}: {'reached' if ratio >= wanted else 'missed'}"
            console.print(f"{name}: {ratio:.2f} × {yardstick} ({verdict})")
            ratios.append({"method": name, "of": yardstick, "ratio": ratio, "wanted": wanted})
        sizes[str(numel)] = {"seconds": times, "not_run": missing, "ratios": ratios}
    report["sizes"] = sizes
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {options.path}")


if __name__ == "__main__":
    main()
