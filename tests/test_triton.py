"""Triton's kernels give the CPU's bits: on a GPU if there is one, else in Triton's interpreter.

The interpreter runs a kernel's Python with numpy. What it cannot tell, whether kernels compile and
whether the compiler contracts or flushes, is read from the machine code made for a GPU that need
not be there.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge import kernels
from narrowgauge.kernels import backends, operators, reference
from narrowgauge.kernels.grid import ROUNDINGS, Sums, grid_of
from tests.numbers_by_hand import edges, random_bits

pytest.importorskip("triton")
from narrowgauge.kernels.triton import Triton, launch

# numpy's, of infinities and NaN in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = Triton()
KEY = torch.tensor([-0x123456789ABCDEF])
FORMATS = [
    "e5m2", "e4m3", "e4m3fn", "e4m3fnuz", "e3m0", "bf16", "fp16", "e6m9", "e8m15", "int8", "int4",
    "e8m0", "e5m2ftz", "e8m2ftz", "e7m3b127ftz", "e2m1fn", "e5m2fnuz", "fp32",
]  # fmt: skip
PACKED = [name for name in FORMATS if grid_of(name).bits <= 16] + ["e2m0", "e3m2fn", "e6m5", "int3"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(kind), b.cpu().view(kind))


def numbers(count: int) -> Tensor:
    """Every kind of number, NaN and infinities first."""
    return torch.cat([edges()[-4:], random_bits(count, count), edges()[::997]])[:count]


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_every_exponent_and_tie(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "_TILE", 2**16)  # the interpreter's time goes into steps
    x = torch.cat([edges()[::3], random_bits(999)]).to(DEVICE, dtype)
    if dtype == torch.float64:
        x[::5] *= 1 + 2.0**-40  # beside the ties of float32
        x[::7] *= 2.0**-200
    for rounding, overflow in itertools.product(ROUNDINGS, (None, "saturate")):
        if overflow is not None and rounding != "nearest-even":
            continue
        grid, out = grid_of(name, overflow), torch.empty_like(x)
        TRITON.quantize(x, out, grid, rounding, KEY, 1)
        assert same_bits(out, reference.quantize(x, grid, rounding, KEY)), (rounding, overflow)


@pytest.mark.parametrize("numel", [0, 1, 3, 1024, 3001])
@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64, 7 << 32])
def test_random_words_are_those_of_the_cpu(numel: int, key: int) -> None:
    x, grid, word = torch.randn(numel, device=DEVICE), grid_of("e3m2"), torch.tensor([key])
    expected = reference.quantize(x, grid, "stochastic", word)
    TRITON.quantize(x, x, grid, "stochastic", word, 1)  # in place
    assert same_bits(x, expected)


# -- codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encodes(name: str, dtype: torch.dtype) -> None:
    grid = grid_of(name)
    for (numel, block), rounding in zip(
        itertools.product((1003, 8, 1), (None, 0, 7, 32)), itertools.cycle(ROUNDINGS), strict=False
    ):
        x = numbers(numel).to(DEVICE, dtype)
        scales = None
        if block is not None:
            exponents = torch.randint(-126, 127, (-(-numel // block) if block else 1,))
            scales = ((exponents + 127) << 23).int().view(torch.float32).to(DEVICE)  # 2**exponents
            scales[1::3] = math.nan
        codes, spoilt = reference.encode(x, grid, rounding, KEY, scales, block or 0)
        memory = torch.full((codes.numel() + 1,), 255, dtype=torch.uint8, device=DEVICE)
        out = memory[1:]  # at an odd address
        found = TRITON.encode(x, out, grid, rounding, KEY, scales, block or 0, 1)
        assert same_bits(out, codes), (numel, block, rounding)
        assert found == bool(spoilt)
        assert memory[0] == 255


@pytest.mark.parametrize("name", [*PACKED, "fp32"])
def test_decodes(name: str) -> None:
    bits = grid_of(name).bits
    for numel, block in itertools.product((2500, 5, 1), (None, 0, 7, 32)):
        size = (numel * bits + 7) // 8
        codes = torch.randint(0, 256, (size,), dtype=torch.uint8).to(DEVICE)
        scales = None
        if block is not None:
            scales = torch.randn(-(-numel // block) if block else 1).to(DEVICE)
            scales[1::3] = math.nan
            scales[2::5] *= 2.0**-120
        for factor in (1.0, 0.3):
            values = reference.decode(codes, grid_of(name), numel)
            expected = reference.scaled(values, scales, block or 0, factor)
            out = torch.empty(numel, device=DEVICE)
            TRITON.decode(codes, out, grid_of(name), scales, block or 0, factor, 1)
            assert same_bits(out, expected), (numel, block, factor)


@pytest.mark.parametrize("block", [0, 1, 7, 32, 1000, 5000, 20_000])
def test_largest_magnitudes(block: int) -> None:
    for numel in (0, 1, 1003, 9001):
        x = torch.randn(numel, device=DEVICE)
        x[500:501], x[5000:5001] = -math.inf, math.nan
        expected = reference.largest_magnitudes(x, block)
        out = torch.empty_like(expected)
        TRITON.largest_magnitudes(x, out, block, 1)
        assert torch.equal(out, expected), numel


def test_empty_tensors_launch_nothing() -> None:
    nothing, codes = torch.empty(0, device=DEVICE), torch.empty(0, dtype=torch.uint8, device=DEVICE)
    assert TRITON.encode(nothing, codes, grid_of("int4"), "nearest-even", None, None, 0, 1) is False
    TRITON.decode(codes, nothing, grid_of("int4"), None, 0, 1.0, 1)
    TRITON.matmul(
        torch.empty(2, 0, 3, device=DEVICE),
        torch.empty(2, 3, 4, device=DEVICE),
        torch.empty(2, 0, 4, device=DEVICE),
        Sums(None, grid_of("fp32"), False, 1, "nearest-even"),
        None,
        1,
    )


# -- products --------------------------------------------------------------------------------------


def products(a: Tensor, b: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """By Triton's kernel, and by the CPU's."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    ours, expected = torch.full(shape, 7.0, device=DEVICE), torch.empty(shape)
    TRITON.matmul(a.to(DEVICE), b.to(DEVICE), ours, sums, KEY, 1)
    backends.current().matmul(a, b, expected, sums, KEY, 1)
    return ours, expected


def operands(batch: int, rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random ones with an infinity and a NaN, and numbers that cancel, overflow and underflow."""
    a, b = torch.randn(batch, rows, depth) * 3, torch.randn(batch, depth, columns) * 3
    if rows > 2 and depth > 2:
        a[0, 0, 1], a[0, 1, 0] = math.inf, math.nan
        a[:, 2, :2] = torch.tensor([3e4, -3e4])
        a[:, -1] *= 2.0**-20
        b[:, :, 0] = b[:, :1, 0]
    return a, b


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize(
    ("multiply", "accumulate"),
    [("e5m2", "e5m2"), (None, "fp16"), ("e4m3fn", "bf16"), ("fp32", "fp32"), (None, "fp32")],
)
def test_products(compensated: bool, multiply: str | None, accumulate: str) -> None:
    grid = None if multiply is None else grid_of(multiply)
    sums = Sums(grid, grid_of(accumulate), compensated, 1, "nearest-even")
    ours, expected = products(*operands(1, 3, 17, 3), sums)
    assert same_bits(ours, expected)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 17, 5, 33), (2, 33, 3, 1), (1, 2, 0, 3)])
@pytest.mark.parametrize("compensated", [False, True])
def test_shapes(shape: tuple[int, ...], compensated: bool) -> None:
    sums = Sums(grid_of("e4m3"), grid_of("fp16"), compensated, 1, "nearest-even")
    ours, expected = products(*operands(*shape), sums)
    assert same_bits(ours, expected)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_larger_product(chunk: int) -> None:
    sums = Sums(grid_of("e5m2"), grid_of("e5m2"), False, chunk, "nearest-even")
    ours, expected = products(*operands(1, 33, 17, 70), sums)  # more than one tile each way
    assert same_bits(ours, expected)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize(("multiply", "accumulate"), [("fp16", "fp16"), (None, "e5m2ftz")])
def test_chunks(chunk: int, compensated: bool, multiply: str | None, accumulate: str) -> None:
    grid = None if multiply is None else grid_of(multiply)
    for rounding in ("nearest-even", "stochastic"):
        sums = Sums(grid, grid_of(accumulate), compensated, chunk, rounding)
        ours, expected = products(*operands(1, 3, 17, 5), sums)
        assert same_bits(ours, expected), rounding


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_products_in_every_rounding(rounding: str) -> None:
    for name, compensated in (("e4m3fnuz", False), ("int8", True)):
        sums = Sums(grid_of(name), grid_of(name), compensated, 1, rounding)
        ours, expected = products(*operands(1, 3, 4, 260), sums)  # columns of two sequences
        assert same_bits(ours, expected), name


def test_strides_do_not_matter() -> None:
    a, b = operands(2, 3, 9, 70)
    sums = Sums(grid_of("e5m2"), grid_of("e5m2"), False, 1, "stochastic")
    ours, expected = products(a, b, sums)
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.zeros(2, 3, 18)[..., ::2]
    spread.copy_(a)
    assert same_bits(products(spread, turned, sums)[0], expected)
    one = products(a[:1].expand(2, 3, 9), b[1:].expand(2, 9, 70), sums)
    assert same_bits(*one)
    assert same_bits(ours, expected)


def test_sums_that_two_float64_do_not_hold_go_to_the_reference() -> None:
    a = torch.tensor([[[2.0**100, 1.0, 2.0**-100, -(2.0**100), -1.0]]])
    b = torch.tensor([[[2.0**20], [2.0**-20], [2.0**-20], [2.0**20], [2.0**-20]]])
    fused = Sums(None, grid_of("fp32"), False, 5, "nearest-even")
    with pytest.warns(UserWarning, match="did not fit into two float64, so this product was made"):
        ours, expected = products(a, b, fused)
    assert ours.item() == expected.item() == 2.0**-120
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert products(a[:, :, :2], b[:, :2], fused)[0].item() == 2.0**120


def test_formats_tell_when_two_float64_hold_a_sum() -> None:
    def fits(multiply: str | None, accumulate: str, chunk: int) -> bool:
        grid = None if multiply is None else grid_of(multiply)
        sums = Sums(grid, grid_of(accumulate), False, chunk, "nearest-even")
        return launch._fits_two_doubles(sums, chunk)

    assert fits("e5m2", "e5m2", 2**20)
    assert fits("fp16", "fp16", 64)
    assert not fits("bf16", "bf16", 2)
    assert not fits("e4m3", "fp32", 2)
    assert not fits(None, "e5m2", 2)


# -- the library's functions, with Triton chosen for their tensors ---------------------------------


def test_the_operators_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 100)
    a, b = torch.randn(4, 9, requires_grad=True), torch.randn(9, 5)

    def results(device: str) -> list[Tensor]:
        torch.manual_seed(5)
        y, left, right = x.to(device), a.to(device), b.to(device)
        packed = ng.encode(y, "mxfp4")
        product = ng.matmul(left, right, operands="e4m3", accumulate="e5m2", rounding="stochastic")
        return [
            ng.quantize(y, "e4m3", rounding="stochastic"),
            ng.quantize(y.bfloat16(), "e5m2").float(),
            ng.quantize(y.t(), "mxfp8_e4m3"),
            ng.encode(y.double(), "e3m2fn", exponent=3),
            packed,
            ng.decode(packed, "mxfp4", (3, 100)),
            ng.decode(ng.encode(y, "int5"), "int5", (3, 100), dtype=torch.float64).float(),
            product.detach(),
            torch.autograd.grad(product.sum(), a)[0],
        ]

    expected = results("cpu")
    monkeypatch.setattr(operators, "for_device", lambda device: TRITON)
    for ours, theirs in zip(results(DEVICE), expected, strict=True):
        assert same_bits(ours.contiguous(), theirs.contiguous())
    with pytest.raises(kernels.UnrepresentableNaN, match="contains NaN, which int4 cannot hold"):
        ng.encode(torch.tensor([math.nan], device=DEVICE), "int4")


def test_it_is_chosen_for_gpus_unless_the_reference_is_asked_for() -> None:
    cuda, before = torch.device("cuda"), kernels.backend()
    assert backends.for_device(cuda).name == "triton"
    assert backends.for_device(torch.device("cpu")).name == before
    try:
        kernels.select("reference")
        assert backends.for_device(cuda).name == "reference"
    finally:
        kernels.select(None if before == kernels.available_backends()[0] else before)
    assert backends.for_device(cuda).name == "triton"


def test_without_kernels_a_warning_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backends._for_type.cache_clear()
    monkeypatch.delitem(sys.modules, "narrowgauge.kernels.triton")
    monkeypatch.setitem(sys.modules, "triton", None)  # what importing it then finds
    for each in ("launch", "matmul", "elementwise", "rounding"):
        monkeypatch.delitem(sys.modules, f"narrowgauge.kernels.triton.{each}")
    try:
        with pytest.warns(UserWarning, match=r"need Triton, which cannot be .* pip install triton"):
            assert backends.for_device(torch.device("cuda")).name == "reference"
        assert backends.for_device(torch.device("cuda")).name == "reference"
        with pytest.warns(UserWarning, match="no kernels for tensors on 'mps', only for 'cpu' and"):
            assert backends.for_device(torch.device("mps")).name == "reference"
        assert backends.for_device(torch.device("mps")).name == "reference"
    finally:
        backends._for_type.cache_clear()


def python(code: str, **variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_narrowgauge_neither_needs_nor_imports_it() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch, narrowgauge
narrowgauge.decode(narrowgauge.encode(torch.randn(5), "e5m2"), "e5m2")
print(narrowgauge.matmul(torch.ones(2, 2), torch.ones(2, 2), accumulate="e5m2").tolist())
print("narrowgauge.kernels.triton" in sys.modules)
"""
    assert python(code) == "[[2.0, 2.0], [2.0, 2.0]]\nFalse\n"


# -- machine code ----------------------------------------------------------------------------------

COMPILE = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Absent:
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

driver.set_active(Absent())
from narrowgauge.kernels.grid import Sums, grid_of
from narrowgauge.kernels.triton import Triton, elementwise, launch

found = []

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            code = self.kernel.warmup(*args, grid=grid, **options).asm
            found.append((self.kernel.__name__, code["ptx"], len(code["cubin"])))
        return launch

for name in ("quantize", "encode", "decode", "largest_magnitudes"):
    setattr(elementwise, name, Compiled(getattr(elementwise, name)))
launch.matmul = Compiled(launch.matmul)
triton, key, codes = Triton(), torch.tensor([-5]), torch.empty(64, dtype=torch.uint8)
for dtype in (torch.float32, torch.float64):
    x = torch.randn(8, dtype=dtype)
    for name, how in (("e5m2", "nearest-even"), ("e8m0", "stochastic"), ("int4", "up")):
        grid = grid_of(name, "saturate")
        triton.quantize(x, x, grid, how, key, 1)
        if not grid.has_nan:
            launch.torch.zeros = lambda *_, **__: torch.empty(1, dtype=torch.int32)
        triton.encode(x, codes, grid, how, key, torch.ones(1), 32, 1)
        triton.decode(codes, torch.empty(8), grid, torch.ones(1), 32, 1.0, 1)
triton.largest_magnitudes(torch.randn(8), torch.empty(1, dtype=torch.int32), 0, 1)
a, b, out = torch.randn(2, 3, 5), torch.randn(2, 5, 7), torch.empty(2, 3, 7)
for multiply, kahan, chunk, how in (
    ("e5m2", True, 1, "nearest-even"), (None, False, 1, "down"), ("fp16", False, 4, "stochastic"),
):
    product = None if multiply is None else grid_of(multiply)
    triton.matmul(a, b, out, Sums(product, grid_of("fp16"), kahan, chunk, how), key, 1)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kernels_compile_and_nothing_is_contracted_or_flushed(tmp_path: Path) -> None:
    found = json.loads(python(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)))
    names = {name for name, *_ in found}
    assert names == {"quantize", "encode", "decode", "largest_magnitudes", "matmul"}
    for name, assembly, size in found:
        assert size > 0
        for wrong in ("fma.", ".ftz", "ex2.", "div.full", "approx"):
            assert wrong not in assembly, (name, wrong)
