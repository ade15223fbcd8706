"""The simulator, rounding after every operation, against everything else that does so, in one run.

Matrix products, one convolution, and a step of ``EmulatedNodes``. The others: torch's own unrounded
operation, a naive C++ loop, torch.compile of plain torch, qtorch and mptorch. What is missing on
this machine is listed with the reason. All methods of a table take turns, and the medians' ratios
count. qtorch has no rounded products, so one is built from its rounding, as its users do.

The naive loop rounds by the kernel's own trick, but one element at a time, compiled with -O3: the
ratio is what vectors and tiles bring.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from narrowgauge import kernels, matmul, quantize
from narrowgauge.gradients import EmulatedNodes
from narrowgauge.nn import Conv2d, LayerFormats

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
extern "C" void product(const float* a, const float* b, float* out, int64_t rows, int64_t depth,
                        int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      float sum = 0;
      for (int64_t k = 0; k < depth; k++)
        sum = round_e5m2(sum + round_e5m2(a[i * depth + k] * b[k * columns + j]));
      out[i * columns + j] = sum;
    }
}
"""
E5M2: dict[str, object] = {"operands": "e5m2", "accumulate": "e5m2"}
WAYS: dict[str, dict[str, object]] = {
    "fp32": {},
    "fp32, Kahan": {"compensated": True},
    "e5m2": E5M2,
    "e5m2, Kahan": {**E5M2, "compensated": True},
    "e3m0": {"operands": "e3m0", "accumulate": "e3m0"},
    "e4m3fn into fp32": {"operands": "e4m3fn"},
    "bf16": {"operands": "bf16", "accumulate": "bf16"},
    "fp16, fused": {"operands": "fp16", "accumulate": "fp16", "fused": True},
    "e4m3 into fp16, fused, chunk 16": {
        "operands": "e4m3", "accumulate": "fp16", "fused": True, "chunk": 16,
    },
    "fp32, fused, chunk 16": {"fused": True, "chunk": 16},
    "e8m15": {"accumulate": "e8m15"},
    "e5m2, stochastic": {**E5M2, "rounding": "stochastic"},
}  # fmt: skip
UNROLLED = (
    32  # steps of k that torch.compile sees at once; more take longer to compile, no less run
)
QTORCH_STEPS = 8  # steps of k that are timed with qtorch; the others would take as long each
NODES = 8
MPTORCH = "mptorch is on no package index; pip install git+https://github.com/mptorch/mptorch"


@dataclass
class Section:
    """What is timed in turns, and what is not."""

    title: str
    yardstick: str
    macs: int = 0  # multiply-accumulates of one call, where that means something
    methods: dict[str, Callable[[], object]] = field(default_factory=dict)
    stands_for: dict[str, float] = field(default_factory=dict)  # calls that a timed part stands for
    missing: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # medians

    def add(self, name: str, make: Callable[[], Callable[[], object]]) -> None:
        """Take ``make()`` as a method; if it or the first call fails, note why it is missing."""
        try:
            method = make()
            method()
        except Exception as error:  # compiling C++ while being imported may fail in any way
            text = str(error).strip() or type(error).__name__
            self.missing[name] = text.splitlines()[0][:120]
        else:
            self.methods[name] = method

    def measure(self, rounds: int, status: Callable[[str], None]) -> None:
        """Medians of ``rounds`` turns after one to warm up."""
        seconds: dict[str, list[float]] = {name: [] for name in self.methods}
        for turn in range(rounds + 1):
            for name, method in self.methods.items():
                status(f"{self.title}: turn {turn} of {rounds}, {name}")
                start = time.perf_counter()
                method()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
        for name, each in seconds.items():
            self.seconds[name] = statistics.median(each) * self.stands_for.get(name, 1)

    def table(self, threads: int) -> Table:
        """What was measured, for people."""
        title = f"{self.title}, {threads} threads, {kernels.backend()}"
        table = Table(box=box.SIMPLE, title=title)
        table.add_column("method", no_wrap=True)
        for heading in ("ms", *(["GMAC/s"] if self.macs else []), f"× {self.yardstick}"):
            table.add_column(heading, justify="right")
        for name, each in self.seconds.items():
            speed = [f"{self.macs / each / 1e9:.2f}"] if self.macs else []
            note = " (extrapolated)" if name in self.stands_for else ""
            ratio = f"{each / self.seconds[self.yardstick]:.3g}"
            table.add_row(name + note, f"{each * 1e3:.4g}", *speed, ratio)
        return table


def naive_loop(folder: Path) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The compiled loop; raises if there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found")
    source, library = folder / "naive.cpp", folder / "naive.so"
    if not library.exists():
        source.write_text(NAIVE, encoding="utf-8")
        command = [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).product

    def run(a: Tensor, b: Tensor, out: Tensor) -> None:
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (a, b, out))
        sizes = (ctypes.c_int64(each) for each in (*a.shape, b.shape[1]))
        function(*pointers, *sizes, torch.get_num_threads())

    return run


def compiled_steps() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Some steps of k in plain torch, compiled: torch's own cast to e5m2 rounds."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(torch.float8_e5m2).float()

    def steps(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for k in range(a.shape[1]):
            total = rounded(total + rounded(a[:, k, None] * b[k]))
        return total

    return torch.compile(steps, fullgraph=True, dynamic=False)


def products(size: int, folder: Path) -> Section:
    """Square matrix products."""
    torch.manual_seed(0)
    a, b = torch.randn(size, size), torch.randn(size, size)
    left, right, out = quantize(a, "e5m2"), quantize(b, "e5m2"), torch.empty_like(a)
    expected = matmul(a, b, **E5M2)  # type: ignore[arg-type]
    section = Section(f"matmul {size}³", "torch.matmul, float32", size**3)
    section.methods[section.yardstick] = lambda: a @ b
    for name, way in WAYS.items():
        section.methods[name] = lambda way=way: matmul(a, b, **way)  # type: ignore[misc]

    def checked(method: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if not torch.equal(method(), expected):
            raise RuntimeError("it computes something else")
        return method

    def naive() -> Callable[[], Tensor]:
        loop = naive_loop(folder)

        def run() -> Tensor:
            loop(left, right, out)
            return out

        return checked(run)

    def compiled() -> Callable[[], Tensor]:
        steps = compiled_steps()

        def run() -> Tensor:
            total = torch.zeros(size, size)
            for k in range(0, size, UNROLLED):
                total = steps(total, left[:, k : k + UNROLLED], right[k : k + UNROLLED])
            return total

        return checked(run)

    def qtorch() -> Callable[[], Tensor]:
        from qtorch.quant import float_quantize

        def rounded(x: Tensor) -> Tensor:
            result: Tensor = float_quantize(x, exp=5, man=2, rounding="nearest")
            return result

        def run() -> Tensor:
            total = torch.zeros(size, size)
            for k in range(QTORCH_STEPS):
                total = rounded(total + rounded(left[:, k, None] * right[k]))
            return total

        return run

    def mptorch() -> Callable[[], Tensor]:
        try:
            from mptorch.quant import float_mm
        except ImportError as error:
            raise RuntimeError(f"{error}: {MPTORCH}") from error
        formats = {"man_add": 2, "exp_add": 5, "man_mul": 2, "exp_mul": 5}
        return lambda: float_mm(left, right, **formats, fma=False, saturate=False)

    section.add("naive loop, e5m2", naive)
    section.add("torch.compile, e5m2", compiled)
    section.add("qtorch, e5m2", qtorch)
    section.stands_for["qtorch, e5m2"] = size / QTORCH_STEPS
    section.add("mptorch, e5m2", mptorch)
    return section


def convolution(folder: Path) -> Section:
    """Eight 16 × 16 images, 32 channels to 64, windows of 3 × 3."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, 16, 16)
    section = Section("Conv2d 32 → 64, 3 × 3, 8 × 16 × 16", "torch", 8 * 16 * 16 * 64 * 32 * 9)
    ways = {
        "e5m2 stored, sums of torch": LayerFormats("e5m2", "e5m2", "e5m2"),
        "e5m2": LayerFormats("e5m2", "e5m2", "e5m2", accumulate="e5m2"),
        "e5m2, Kahan": LayerFormats("e5m2", "e5m2", "e5m2", accumulate="e5m2", compensated=True),
    }
    layers: dict[str, nn.Conv2d] = {section.yardstick: nn.Conv2d(32, 64, 3, padding=1, bias=False)}
    for name, formats in ways.items():
        layers[name] = Conv2d(32, 64, 3, padding=1, bias=False, formats=formats)
    for name, layer in layers.items():

        def forward(layer: nn.Conv2d = layer) -> Tensor:
            with torch.no_grad():
                result: Tensor = layer(x)
            return result

        section.methods[name] = forward
    for name, layer in layers.items():
        section.methods[f"{name}: forward and backward"] = lambda layer=layer: (  # type: ignore[misc]
            layer(x).sum().backward()
        )

    def naive() -> Callable[[], Tensor]:
        loop = naive_loop(folder)
        weight = quantize(layers["e5m2"].weight.detach(), "e5m2").flatten(1)
        out = torch.empty(64, 8 * 16 * 16)

        def run() -> Tensor:
            columns = F.unfold(quantize(x, "e5m2"), 3, padding=1).transpose(0, 1).flatten(1)
            loop(weight, columns.contiguous(), out)
            return out.view(64, 8, 16, 16).transpose(0, 1)

        if not torch.equal(run(), section.methods["e5m2"]()):  # type: ignore[arg-type]
            raise RuntimeError("it computes something else")
        return run

    section.add("unfold and naive loop, e5m2", naive)
    return section


def emulated_nodes() -> Section:
    """One step of a convolutional network on eight nodes, and the eight backward passes in it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(128, 256, 3, padding=1, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    images, labels = torch.randn(NODES, 32, 3, 32, 32), torch.randint(0, 10, (NODES, 32))
    parameters = sum(p.numel() for p in model.parameters())
    section = Section(
        f"{NODES} nodes of 32 images, {parameters / 1e6:.2f} million parameters",
        "passes alone",
    )

    def step(nodes: EmulatedNodes | None) -> None:
        for x, y in zip(images, labels, strict=True):
            F.cross_entropy(model(x), y).backward()
            if nodes is None:
                model.zero_grad()
            else:
                nodes.collect()
        model.zero_grad()

    ways: dict[str, dict[str, object]] = {
        "e5m2": {},
        "e5m2, Kahan": {"compensated": True},
        "e5m2, APS": {"scale": "shared"},
        "e5m2, APS, ring": {"scale": "shared", "order": "ring"},
        "e5m2, local scales, tree": {"scale": "local", "order": "tree"},
    }
    section.methods[section.yardstick] = lambda: step(None)
    for name, way in ways.items():
        nodes = EmulatedNodes(model, NODES, "e5m2", **way)  # type: ignore[arg-type]
        section.methods[f"EmulatedNodes, {name}"] = lambda nodes=nodes: step(nodes)  # type: ignore[misc]
    return section


def verdicts(sections: dict[str, Section], threads: int) -> list[dict[str, object]]:
    """What was wanted, what was measured, and whether that is enough."""
    found: list[dict[str, object]] = []

    def say(what: str, value: float | None, wanted: float, at_least: bool, why: str = "") -> None:
        verdict = why or "not measured"
        if value is not None and not why:
            reached = value >= wanted if at_least else value <= wanted
            verdict = "reached" if reached else "missed"
        bound = f"{'≥' if at_least else '≤'} {wanted:g}"
        found.append({"what": what, "measured": value, "wanted": bound, "verdict": verdict})

    square = sections.get("512")
    if square is not None:
        ours, others = square.seconds["e5m2"], square.seconds
        for peer, wanted in (("naive loop, e5m2", 20.0), ("mptorch, e5m2", 50.0)):
            ratio = others[peer] / ours if peer in others else None
            missing = square.missing.get(peer, "")
            say(f"512³: times as fast as {peer.removesuffix(', e5m2')}", ratio, wanted, True,
                missing and "not installed, see above")  # fmt: skip
        # The numbers were measured on a quiet Zen 4 server with AVX-512.
        elsewhere = "" if threads == 2 else f"meant for 2 threads, not {threads}"
        say("512³: ms on Zen 4", ours * 1e3, 1.1 * 23, False, elsewhere)
        kahan = others["e5m2, Kahan"] * 1e3
        say("512³, Kahan: ms on Zen 4", kahan, 1.1 * 80, False, elsewhere)
    nodes = sections.get("nodes")
    if nodes is not None:
        for name, seconds in nodes.seconds.items():
            if name != nodes.yardstick:
                ratio = seconds / nodes.seconds[nodes.yardstick]
                say(f"{name}: times its passes alone", ratio, 1.25, False)
    return found


def main() -> None:
    """Time, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "results" / "simulator.json")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512], help="of products")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    sections: dict[str, Section] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        makers: dict[str, Callable[[], Section]] = {
            **{str(n): lambda n=n: products(n, Path(folder)) for n in options.sizes},  # type: ignore[misc]
            "convolution": lambda: convolution(Path(folder)),
            "nodes": emulated_nodes,
        }
        for name, make in makers.items():
            status.update(f"{name}: preparing; torch.compile takes its time")
            section = sections[name] = make()
            section.measure(options.rounds, status.update)
            console.print(section.table(options.threads))
            for each, reason in section.missing.items():
                console.print(f"not run: {each}: {reason}")
    console.print(
        f"Medians of {options.rounds} turns. qtorch: {QTORCH_STEPS} of the steps of k, times their "
        "number. The load of the machine counts: ratios mean more than milliseconds."
    )
    found = verdicts(sections, options.threads)
    table = Table("target, e5m2", "measured", "wanted", "", box=box.SIMPLE)
    for each in found:
        value = each["measured"]
        shown = f"{value:.3g}" if isinstance(value, float) else "-"
        table.add_row(str(each["what"]), shown, str(each["wanted"]), str(each["verdict"]))
    console.print(table)
    report = {
        "threads": options.threads,
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "backend": kernels.backend(),
        "rounds": options.rounds,
        "sections": {
            name: {
                "title": section.title,
                "seconds": section.seconds,
                "extrapolated": [each for each in section.stands_for if each in section.seconds],
                "not_run": section.missing,
            }
            for name, section in sections.items()
        },
        "targets": found,
    }
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {options.path}")


if __name__ == "__main__":
    main()
