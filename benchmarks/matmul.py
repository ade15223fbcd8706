"""Rounded matrix products against torch.matmul and a naive loop, in one run.

The loop rounds after every operation by the same trick as the kernel, but one element at a time,
compiled with -O3: the ratio is what vectors and tiles bring. Without a C++ compiler it is left out.
All methods take turns, and the medians' ratios count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge import kernels, matmul, quantize

HERE = Path(__file__).resolve().parent
NAIVE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
// float32 to e5m2, to nearest, ties to even: adding and subtracting 1.5 * 2**(exponent + 21) leaves
// two bits of mantissa, and fewer below 2**-14.
static inline float round_e5m2(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t exponent = bits & 0x7f800000u;
  exponent = exponent < (113u << 23) ? 113u << 23 : exponent > (143u << 23) ? 143u << 23 : exponent;
  bits = exponent + (21u << 23 | 0x400000u);
  float c;
  std::memcpy(&c, &bits, 4);
  const float y = std::fabs((x + c) - c);
  return std::copysign(y > 57344.0f ? INFINITY : y, x);
}
extern "C" void product(const float* a, const float* b, float* out, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = 0;
      for (int64_t k = 0; k < n; k++)
        sum = round_e5m2(sum + round_e5m2(a[i * n + k] * b[k * n + j]));
      out[i * n + j] = sum;
    }
}
"""
WAYS: dict[str, dict[str, object]] = {
    "fp32": {},
    "fp32, Kahan": {"compensated": True},
    "e5m2": {"operands": "e5m2", "accumulate": "e5m2"},
    "e5m2, Kahan": {"operands": "e5m2", "accumulate": "e5m2", "compensated": True},
    "e3m0": {"operands": "e3m0", "accumulate": "e3m0"},
    "e4m3fn into fp32": {"operands": "e4m3fn"},
    "bf16": {"operands": "bf16", "accumulate": "bf16"},
    "fp16, fused": {"operands": "fp16", "accumulate": "fp16", "fused": True},
    "e4m3 into fp16, fused, chunk 16": {
        "operands": "e4m3", "accumulate": "fp16", "fused": True, "chunk": 16,
    },
    "fp32, fused, chunk 16": {"fused": True, "chunk": 16},
    "e8m15": {"accumulate": "e8m15"},
    "e5m2, stochastic": {"operands": "e5m2", "accumulate": "e5m2", "rounding": "stochastic"},
}  # fmt: skip


def naive(folder: Path) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """The compiled loop, or ``None``."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    source, library = folder / "naive.cpp", folder / "naive.so"
    source.write_text(NAIVE, encoding="utf-8")
    command = [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).product

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (a, b, out))
        function(*pointers, ctypes.c_int64(a.shape[0]), torch.get_num_threads())

    return run


def main() -> None:
    """Time, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "results" / "matmul.json")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    a, b = torch.randn(options.size, options.size), torch.randn(options.size, options.size)
    methods: dict[str, Callable[[], object]] = {"torch.matmul, float32": lambda: a @ b}
    for name, way in WAYS.items():
        methods[name] = lambda way=way: matmul(a, b, **way)  # type: ignore[misc]
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        loop = naive(Path(folder))
        if loop is None:
            console.print("naive loop: not run, no C++ compiler was found")
        else:
            left, right, out = quantize(a, "e5m2"), quantize(b, "e5m2"), torch.empty_like(a)
            methods["naive loop, e5m2"] = lambda: loop(left, right, out)
            loop(left, right, out)
            assert torch.equal(out, matmul(a, b, **WAYS["e5m2"])), (
                "the loop computes something else"
            )  # type: ignore[arg-type]
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(options.rounds + 1):
            for name, method in methods.items():
                start = time.perf_counter()
                method()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
    times = {name: statistics.median(each) for name, each in seconds.items()}
    title = f"{options.size}³, {torch.get_num_threads()} threads, {kernels.backend()}"
    table = Table("method", "ms", "GMAC/s", "× torch.matmul's time", title=title)
    for name, each in times.items():
        ratio = each / times["torch.matmul, float32"]
        speed = options.size**3 / each / 1e9
        table.add_row(name, f"{each * 1e3:.1f}", f"{speed:.2f}", f"{ratio:.1f}")
    console.print(table)
    if "naive loop, e5m2" in times:
        gain = times["naive loop, e5m2"] / times["e5m2"]
        verdict = "reached" if gain >= 20 else "missed"
        console.print(f"e5m2: {gain:.1f} × as fast as the naive loop, wanted 20 ({verdict})")
    report = {
        "size": options.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": kernels.backend(),
        "seconds": times,
    }
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {options.path}")


if __name__ == "__main__":
    main()
