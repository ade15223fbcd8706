from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch.library import opcheck

from narrowgauge import (
    BlockFormat,
    FloatFormat,
    MatmulBackward,
    format_of,
    kernels,
    matmul,
    quantize,
)
from tests import blocks_by_hand, matmul_by_hand
from tests.numbers_by_hand import same

pytestmark = pytest.mark.usefixtures("backend")


def only_once(backend: str) -> None:
    if backend != kernels.available_backends()[0]:
        pytest.skip("does not depend on the level")


def floating(name: str) -> FloatFormat:
    format = format_of(name)
    assert isinstance(format, FloatFormat)
    return format


FORMATS = ["e5m2", "e4m3", "e3m0", "bf16", "fp16", "e6m9", "e8m15"]
SIZES = [(1, 1, 1), (3, 17, 5), (5, 33, 17), (17, 3, 33), (2, 70, 3)]


@cache
def operands(name: str, size: tuple[int, int, int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices of numbers of a format; `size` is (rows, depth, columns)."""
    rows, depth, columns = size
    generator = torch.Generator().manual_seed(rows * depth + columns)
    a = torch.randn(rows, depth, generator=generator)
    b = torch.randn(depth, columns, generator=generator)
    if kind == "wide":  # as far as the exponents of float32 reach, with cancellation
        a = torch.ldexp(a, torch.randint(-120, 60, a.shape, generator=generator))
        b = torch.ldexp(b, torch.randint(-60, 62, b.shape, generator=generator))
        a[:, depth // 2 :] = -a[:, : depth - depth // 2]
    if kind == "edge":  # sums around the largest number, products around the smallest
        format = floating(name)
        a = a * math.sqrt(format.largest) / 4
        b = b * math.sqrt(format.largest) / 4
        b[:, ::3] *= math.sqrt(format.smallest / format.largest)
        a[::2] *= math.sqrt(format.smallest / format.largest)
    if kind == "special":
        a[torch.rand(a.shape, generator=generator) < 0.02] = math.inf
        b[torch.rand(b.shape, generator=generator) < 0.02] = -math.inf
        a[torch.rand(a.shape, generator=generator) < 0.01] = math.nan
        a[torch.rand(a.shape, generator=generator) < 0.05] = -0.0
    return (a, b) if kind == "wide" else (quantize(a, name), quantize(b, name))


@cache
def by_hand(
    name: str,
    size: tuple[int, int, int],
    kind: str,
    multiply: str | None,
    accumulate: str,
    compensated: bool,
    chunk: int,
    rounding: str = "nearest-even",
) -> torch.Tensor:
    a, b = operands(name, size, kind)
    products = None if multiply is None else floating(multiply)
    sums = floating(accumulate)
    return matmul_by_hand.matrix(a, b, products, sums, compensated, chunk, rounding)


# -- equal to the definition -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_every_intermediate_is_rounded_exactly(
    backend: str, name: str, compensated: bool, fused: bool, chunk: int
) -> None:
    for kind in ("normal", "edge", "special", "wide"):
        for size in SIZES if kind == "normal" else [(3, 17, 5)]:
            if backend == "reference" and math.prod(size) > 300:
                continue  # the same, slowly
            a, b = operands(name, size, kind)
            result = matmul(
                a, b, accumulate=name, fused=fused, compensated=compensated, chunk=chunk
            )
            products = None if fused else name
            expected = by_hand(name, size, kind, products, name, compensated, chunk)
            assert same(result, expected), (kind, size)


WAYS = list(itertools.product(FORMATS, [False, True], [False, True], [1, 4, 64]))
ODD_SIZES = list(itertools.product([1, 3, 17, 33], repeat=3))


def laid_out(x: torch.Tensor, index: int) -> torch.Tensor:
    """The same matrix, in one of four layouts of memory."""
    rows, columns = x.shape
    if index % 4 == 1:
        return x.t().contiguous().t()
    room = torch.full((2 * rows + 1, 2 * columns + 1), math.nan)
    view = {2: room[1::2, 1::2], 3: room[1 : 1 + rows, 1 : 1 + columns]}.get(index % 4)
    return x if view is None else view.copy_(x)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_odd_sizes_strides_and_specials_in_every_way(backend: str, way: int) -> None:
    # Not every combination: each way meets two sizes, all sizes, layouts and kinds meet some way.
    name, compensated, fused, chunk = WAYS[way]
    for turn, kind in enumerate(("normal", "special")):
        size = ODD_SIZES[(37 * way + 27 * turn) % len(ODD_SIZES)]
        if backend == "reference" and math.prod(size) > 300:
            continue  # the same, slowly
        a, b = operands(name, size, kind)
        a, b = laid_out(a, way + turn), laid_out(b, way // 4 + turn)
        result = matmul(a, b, accumulate=name, fused=fused, compensated=compensated, chunk=chunk)
        products = None if fused else name
        expected = by_hand(name, size, kind, products, name, compensated, chunk)
        assert same(result, expected), (kind, size)


def test_empty_dimensions_in_every_way() -> None:
    for name, compensated, fused, chunk in WAYS:
        for rows, depth, columns in ((0, 3, 17), (3, 0, 17), (3, 17, 0), (0, 0, 0)):
            result = matmul(
                torch.ones(rows, depth), torch.ones(depth, columns),
                accumulate=name, compensated=compensated, fused=fused, chunk=chunk,
            )  # fmt: skip
            # The empty sum is +0.
            assert same(result, torch.zeros(rows, columns)), (name, rows, depth, columns)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("accumulate", ["fp32", "bf16", "fp16", "e4m3fn", "e5m2"])
@pytest.mark.parametrize("compensated", [False, True])
def test_formats_of_products_and_sums_differ(
    backend: str, name: str, accumulate: str, compensated: bool
) -> None:
    for kind in ("normal", "edge", "special") if backend != "reference" else ("edge",):
        a, b = operands(name, (3, 17, 5), kind)
        for multiply in ("e4m3fn", "fp16", "fp32", None):
            result = matmul(
                a,
                b,
                multiply=multiply,
                accumulate=accumulate,
                fused=multiply is None,
                compensated=compensated,
            )
            expected = by_hand(name, (3, 17, 5), kind, multiply, accumulate, compensated, 1)
            assert same(result, expected), (kind, multiply)


@pytest.mark.parametrize("compensated", [False, True])
def test_a_larger_one(backend: str, compensated: bool) -> None:
    if backend == "reference":
        pytest.skip("the same, slowly")
    size = (33, 33, 33)
    a, b = operands("e5m2", size, "normal")
    result = matmul(a, b, accumulate="e5m2", compensated=compensated)
    assert same(result, by_hand("e5m2", size, "normal", "e5m2", "e5m2", compensated, 1))


@pytest.mark.parametrize("name", ["e5m2", "fp16", "e8m15", "fp32"])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("compensated", [False, True])
def test_toward_zero(name: str, chunk: int, compensated: bool) -> None:
    for kind in ("normal", "edge", "special"):
        a, b = operands(name, (3, 17, 5), kind)
        how = {"accumulate": name, "chunk": chunk, "compensated": compensated}
        result = matmul(a, b, **how, rounding="toward-zero")  # type: ignore[arg-type]
        expected = by_hand(name, (3, 17, 5), kind, name, name, compensated, chunk, "toward-zero")
        assert same(result, expected), kind


@pytest.mark.parametrize("rounding", ["nearest-even", "nearest-away", "up", "down", "stochastic"])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e2m1fn", "e5m2ftz", "e4m3fnuz", "int8"])
def test_any_rounding_and_format_equals_the_reference(
    backend: str, rounding: str, name: str
) -> None:
    a, b = torch.randn(2, 3, 13) * 3, torch.randn(2, 13, 301) * 3
    a[0, 0, 0], a[0, 1, 1] = math.inf, math.nan
    ways = [{}, {"chunk": 4, "fused": True}, {"compensated": True}]

    def results() -> list[torch.Tensor]:
        torch.manual_seed(4)
        return [matmul(a, b, accumulate=name, rounding=rounding, **way) for way in ways]  # type: ignore[arg-type]

    ours = results()
    kernels.select("reference")
    for each, expected in zip(ours, results(), strict=True):
        assert same(each, expected)


def test_the_sum_of_a_chunk_is_exact_where_two_float64_do_not_hold_it() -> None:
    a = torch.tensor([[2.0**100, 1.0, 2.0**-100, -(2.0**100), -1.0]])
    b = torch.tensor([[2.0**20], [2.0**-20], [2.0**-20], [2.0**20], [2.0**-20]])
    assert matmul(a, b, fused=True, chunk=5).item() == 2.0**-120
    assert matmul(a, b, fused=True, chunk=2).item() == -(2.0**-20)
    assert matmul(a, b, fused=True, chunk=5, compensated=True).item() == 2.0**-120


def test_a_fused_product_is_not_rounded_twice() -> None:
    # The product lies just above the middle of two float32, by less than float64 tells beside 1.
    a, b = torch.tensor([[1.0, 1 + 2.0**-23]]), torch.tensor([[1.0], [2.0**-24 * (1 - 2.0**-23)]])
    exact = 1 + 2.0**-24 * (1 - 2.0**-46)
    assert exact == 1 + 2.0**-24  # in float64, which then ties to 1
    assert matmul(a, b, fused=True).item() == 1
    above = torch.tensor([[1.0], [2.0**-24 * (1 + 2.0**-23)]])
    a[0, 1] = 1.0
    assert matmul(a, above, fused=True).item() == 1 + 2.0**-23


# -- sizes, strides, specials ----------------------------------------------------------------------


def test_shapes_are_those_of_torch() -> None:
    shapes = [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((4, 5), (5, 3)), ((2, 4, 5), (5, 3)),
        ((2, 4, 5), (5,)), ((5,), (2, 5, 3)), ((2, 4, 5), (2, 5, 3)), ((4, 5), (2, 5, 3)),
        ((3, 1, 4, 5), (2, 5, 3)), ((3, 2, 4, 5), (1, 2, 5, 3)), ((0, 5), (5, 3)), ((4, 0), (0, 3)),
        ((4, 5), (5, 0)), ((2, 0, 4, 5), (5, 3)), ((0, 4, 5), (0, 5, 3)), ((2, 4, 0), (2, 0, 3)),
        ((2, 4, 0), (0, 3)), ((0,), (0,)), ((1, 4, 5), (0, 5, 3)),
    ]  # fmt: skip
    for first, second in shapes:
        a, b = torch.randint(-3, 4, first).float(), torch.randint(-3, 4, second).float()
        result, expected = matmul(a, b), torch.matmul(a, b)
        assert result.shape == expected.shape, (first, second)
        assert torch.equal(result, expected), (first, second)
        assert torch.equal(matmul(a, b, chunk=3, fused=True), expected)


def test_strides_do_not_matter() -> None:
    a, b = torch.randn(2, 7, 19), torch.randn(2, 19, 37)
    for how in ({}, {"fused": True}, {"chunk": 4}, {"rounding": "toward-zero"}):
        expected = matmul(a, b, accumulate="e5m2", **how)  # type: ignore[arg-type]
        spread = torch.zeros(2, 7, 38)[..., ::2]
        spread.copy_(a)
        turned = b.transpose(1, 2).contiguous().transpose(1, 2)
        backwards = a.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        for x, y in ((spread, b), (a, turned), (backwards, turned)):
            assert same(matmul(x, y, accumulate="e5m2", **how), expected)  # type: ignore[arg-type]
        expanded = matmul(a[:1, :1].expand(3, 7, 19), b[0].expand(3, 19, 37), accumulate="e5m2")
        assert same(expanded[1, 3:4], matmul(a[0, :1], b[0], accumulate="e5m2"))


def test_dtypes() -> None:
    a, b = torch.randn(4, 9), torch.randn(9, 5)
    exact = matmul(a.bfloat16().float(), b.bfloat16().float(), accumulate="bf16")
    half = matmul(a.bfloat16(), b.bfloat16(), accumulate="bf16")
    assert half.dtype == torch.bfloat16
    assert same(half.float(), exact)
    double = matmul(a.double(), b.double(), operands=("e4m3", "e5m2"), accumulate="fp16")
    assert double.dtype == torch.float64
    rounded = matmul(quantize(a, "e4m3"), quantize(b, "e5m2"), accumulate="fp16")
    assert same(double.float(), rounded)
    above = torch.tensor([[1.0625 + 2.0**-40]], dtype=torch.float64)  # rounded once
    assert matmul(above, torch.ones_like(above), operands="e4m3").item() == 1.125


def test_after_an_infinity_compensation_does_not_make_it_nan() -> None:
    a, b = torch.full((1, 40), 240.0), torch.full((40, 3), 240.0)
    b[:, 1] = -240.0
    b[5:, 2] = -240.0
    plain = matmul(a, b, operands="e5m2", accumulate="e5m2")
    kahan = matmul(a, b, operands="e5m2", accumulate="e5m2", compensated=True)
    assert plain[0, :2].tolist() == [math.inf, -math.inf]
    assert same(kahan[0, :2], plain[0, :2])
    nothing = matmul(a, b, operands="e4m3", accumulate="e4m3", compensated=True)
    assert nothing[0].tolist()[:2] == [math.inf, -math.inf]


def test_a_compensation_beyond_the_largest_number_is_dropped() -> None:
    # t - s is the largest number and half a spacing: it rounds to infinity although t is finite.
    largest, step = 57344.0, 8192.0
    a = torch.tensor([[-step, -step / 2, largest, 0.0, step]])
    b = torch.ones(5, 1)
    result = matmul(a, b, accumulate="e5m2", compensated=True).item()
    assert result == matmul_by_hand.element(
        a[0].tolist(), [1.0] * 5, floating("e5m2"), floating("e5m2"), True, 1
    )
    assert math.isfinite(result)


def test_kahan_is_better_than_plain(backend: str) -> None:
    only_once(backend)
    torch.manual_seed(0)
    a, b = torch.rand(4, 2000), torch.rand(2000, 4)
    exact = a.double() @ b.double()
    plain = matmul(a, b, multiply="fp32", accumulate="bf16")
    kahan = matmul(a, b, multiply="bf16", accumulate="bf16", compensated=True)
    assert (kahan - exact).abs().max() < 0.02 * (plain - exact).abs().min()


def test_threads_do_not_matter(backend: str) -> None:
    if backend == "reference":
        pytest.skip("knows no threads")
    a, b = torch.randn(3, 40, 33), torch.randn(33, 300)
    threads = torch.get_num_threads()
    ways: list[dict[str, object]] = [{}, {"compensated": True}, {"chunk": 8, "fused": True}]
    ways += [{**way, "rounding": "stochastic"} for way in ways]
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(3)
            results.append([matmul(a, b, accumulate="e5m2", **way) for way in ways])  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert same(one, two)


# -- stochastic rounding ---------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_obeys_seeds(backend: str) -> None:
    only_once(backend)
    a = torch.full((300, 50), 0.37)
    b = torch.full((50, 256), 0.91)
    torch.manual_seed(1)
    first = matmul(a, b, multiply="fp32", accumulate="e5m4", rounding="stochastic")
    torch.manual_seed(1)
    again = matmul(a, b, multiply="fp32", accumulate="e5m4", rounding="stochastic")
    other = matmul(
        a, b, multiply="fp32", accumulate="e5m4", rounding="stochastic",
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert same(first, again)
    assert same(first, other)
    # 76,800 sums of 50 roundings, each off by at most one spacing (0.5): the mean's standard
    # deviation is below 0.25 * sqrt(50 / 76800) = 0.0064; five of them:
    assert abs(first.mean().item() - 50 * 0.37 * 0.91) < 0.032
    assert first.unique().numel() > 5
    torch.manual_seed(2)
    assert not same(first, matmul(a, b, multiply="fp32", accumulate="e5m4", rounding="stochastic"))


@pytest.mark.parametrize("way", [{}, {"compensated": True}, {"chunk": 4}])
def test_stochastic_rounding_of_products_is_unbiased(backend: str, way: dict[str, object]) -> None:
    only_once(backend)
    a, b = torch.full((300, 50), 0.37), torch.full((50, 256), -0.91)
    torch.manual_seed(1)
    result = matmul(a, b, multiply="e4m3", accumulate="fp32", rounding="stochastic", **way)  # type: ignore[arg-type]
    # 3,840,000 products of -0.3367, rounded to -0.34375 or -0.3125: a standard deviation of at most
    # half that spacing each, so of the mean of sums 1/64 * sqrt(50 / 76800) = 0.0004; five of them.
    # (What float32 sums lose is a thousandth of it.)
    assert abs(result.double().mean().item() + 50 * 0.37 * 0.91) < 0.002
    assert result.unique().numel() > 5


# -- gradients -------------------------------------------------------------------------------------


def test_gradients_are_products_of_rounded_operands() -> None:
    a = torch.randn(6, 9, requires_grad=True)
    b = torch.randn(9, 5, requires_grad=True)
    grad = torch.randn(6, 5)
    forward = {"operands": ("e4m3", "e3m4"), "accumulate": "fp16"}
    left, right = quantize(a.detach(), "e4m3"), quantize(b.detach(), "e3m4")
    matmul(a, b, **forward).backward(grad)  # type: ignore[arg-type]
    assert same(a.grad, matmul(grad, right.t(), accumulate="fp16"))  # type: ignore[arg-type]
    assert same(b.grad, matmul(left.t(), grad, accumulate="fp16"))  # type: ignore[arg-type]
    a.grad = b.grad = None
    backward = MatmulBackward("e5m2", "e5m2", "bf16", compensated=True)
    matmul(a, b, **forward, backward=backward).backward(grad)  # type: ignore[arg-type]
    rounded = quantize(grad, "e5m2")
    sums = {"multiply": "e5m2", "accumulate": "bf16", "compensated": True}
    assert same(a.grad, matmul(rounded, right.t(), **sums))  # type: ignore[arg-type]
    assert same(b.grad, matmul(left.t(), rounded, **sums))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second"),
    [((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)), ((4, 5), (2, 5, 3)),
     ((3, 1, 4, 5), (2, 5, 3)), ((2, 4, 0), (0, 3))],
)  # fmt: skip
def test_gradients_of_every_shape(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a = torch.randint(-3, 4, first).float().requires_grad_()
    b = torch.randint(-3, 4, second).float().requires_grad_()
    for product in (matmul, torch.matmul):
        out = product(a, b)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    # Small integers: both are exact, and the second gradient was added to the first.
    for x in (a, b):
        assert x.grad is not None
        once = x.grad.clone()
        x.grad = None
        out = torch.matmul(a, b)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward(inputs=[x])
        assert torch.equal(once, 2 * x.grad)


def test_gradients_of_gradients_and_of_only_one() -> None:
    a = torch.randint(-3, 4, (4, 5)).float().requires_grad_()
    b = torch.randint(-3, 4, (5, 3)).float().requires_grad_()
    results = []
    for product in (matmul, torch.matmul):
        (first,) = torch.autograd.grad((product(a, b) ** 2).sum(), a, create_graph=True)
        results.append(torch.autograd.grad((first**2).sum(), (a, b)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    (alone,) = torch.autograd.grad(matmul(a.detach(), b, accumulate="e5m2").sum(), b)
    assert alone.shape == b.shape


def test_stochastic_gradients_obey_the_seed() -> None:
    a, b = torch.randn(4, 9, requires_grad=True), torch.randn(9, 5)
    backward = MatmulBackward("e5m2", accumulate="e5m2", rounding="stochastic")
    grads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out = matmul(a, b, operands="e5m2", backward=backward)
        grads.append(torch.autograd.grad(out.sum(), a)[0])
    assert same(grads[0], grads[1])
    assert not same(grads[0], grads[2])
    assert same(matmul(a, b, operands="e5m2", backward=backward), matmul(a, b, operands="e5m2"))


# -- block formats ---------------------------------------------------------------------------------


def in_blocks(x: torch.Tensor, name: str, dim: int) -> torch.Tensor:
    """A matrix rounded by definition, in blocks along its rows (1) or columns (0)."""
    format = format_of(name)
    assert isinstance(format, BlockFormat)
    rows = x if dim == 1 else x.t()
    # Zeros up to a whole block let one call round all rows: a second level is the tensor's.
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % format.block_size))
    rounded = blocks_by_hand.quantized(padded.flatten(), format).view(padded.shape)
    rounded = rounded[:, : rows.shape[1]].float()
    return rounded if dim == 1 else rounded.t()


@pytest.mark.parametrize(
    ("first", "second", "incoming"),
    [("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e5m2"), ("nvfp4", "nvfp4", "nvfp4"),
     ("int4@5", "e2m1fn@16:e4m3fn", None), ("mxfp4_e2m1", "e4m3", "e5m2"),
     (None, "mxfp6_e2m3", "mxfp8_e4m3")],
)  # fmt: skip
def test_blocks_lie_along_the_sum_of_each_product(
    first: str | None, second: str | None, incoming: str | None
) -> None:
    """Forward and both backward products, from the numbers given, not from rounded ones."""

    def rounded(x: torch.Tensor, name: str | None, dim: int) -> torch.Tensor:
        if name is None:
            return x
        blocks = isinstance(format_of(name), BlockFormat)
        return in_blocks(x, name, dim) if blocks else quantize(x, name)

    a, b = torch.randn(6, 37, requires_grad=True), torch.randn(37, 9, requires_grad=True)
    grad = torch.randn(6, 9)
    backward = MatmulBackward(incoming, accumulate="bf16")
    out = matmul(a, b, operands=(first, second), accumulate="fp16", backward=backward)
    out.backward(grad)
    x, y = a.detach(), b.detach()
    fp16, bf16 = floating("fp16"), floating("bf16")

    def product(left: torch.Tensor, right: torch.Tensor, sums: FloatFormat) -> torch.Tensor:
        return matmul_by_hand.matrix(left, right, sums, sums, False, 1)

    assert same(out.detach(), product(rounded(x, first, 1), rounded(y, second, 0), fp16))
    wanted = product(rounded(grad, incoming, 1), rounded(y.t(), second, 0), bf16)
    assert same(a.grad, wanted)  # type: ignore[arg-type]
    wanted = product(rounded(x.t(), first, 1), rounded(grad, incoming, 0), bf16)
    assert same(b.grad, wanted)  # type: ignore[arg-type]


def test_blocks_of_every_shape_and_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a = torch.randn(3, 1, 4, 20, dtype=dtype, requires_grad=True)
        b = torch.randn(2, 20, 5, dtype=dtype, requires_grad=True)
        backward = MatmulBackward("mxfp8_e5m2")
        out = matmul(a, b, operands="mxfp8_e4m3", backward=backward)
        left, right = quantize(a, "mxfp8_e4m3", dim=-1), quantize(b, "mxfp8_e4m3", dim=-2)
        assert same(out, matmul(left.float(), right.float()).to(dtype))
        (grad,) = torch.autograd.grad(out.sum(), b)
        assert grad.dtype == dtype
        assert grad.shape == b.shape
    tokens, weight = torch.randn(2, 3, 40), torch.randn(40, 7, requires_grad=True)
    out = matmul(tokens, weight, operands="nvfp4")
    (grad,) = torch.autograd.grad(out.sum(), weight)
    flat = quantize(tokens.view(6, 40), "nvfp4", dim=0)  # blocks over the tokens of all batches
    assert same(grad, matmul(flat.t(), torch.ones(6, 7)))
    above = torch.full((1, 32), 1.0625 + 2.0**-40, dtype=torch.float64)  # rounded once
    above[0, 0] = 256.0
    ones = torch.ones(32, 1, dtype=torch.float64)
    assert matmul(above, ones, operands=("e4m3fn@32", "fp32")).item() == 256 + 31 * 1.125


def test_blocks_differentiate_twice_and_obey_the_seed() -> None:
    a, b = torch.randn(4, 50, requires_grad=True), torch.randn(50, 40, requires_grad=True)
    grad, direction = torch.randn(4, 40, requires_grad=True), torch.randn(4, 50)
    backward = MatmulBackward("mxfp8_e5m2")
    out = matmul(a, b, operands="mxfp4_e2m1", backward=backward)
    (first,) = torch.autograd.grad(out, a, grad, create_graph=True)
    by_grad, by_b = torch.autograd.grad(first, (grad, b), direction)
    v, g = direction, grad.detach()  # first is g @ b.T, so v @ b and v.T @ g
    right = quantize(b.detach(), "mxfp4_e2m1", dim=0)
    assert same(by_grad, matmul(quantize(v, "mxfp8_e5m2", dim=1), right))
    left = quantize(v.t(), "mxfp8_e5m2", dim=1)
    assert same(by_b, matmul(left, quantize(g, "mxfp8_e5m2", dim=0)))
    backward = MatmulBackward("nvfp4", rounding="stochastic")
    grads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out = matmul(a, b, operands="nvfp4", rounding="stochastic", backward=backward)
        grads.append(
            torch.cat([out.flatten(), torch.autograd.grad(out.exp().sum(), a)[0].flatten()])
        )
    assert same(grads[0], grads[1])
    assert not same(grads[0], grads[2])


# -- torch's own tests of operators, and the compiler ----------------------------------------------


def test_the_operator_passes_opcheck(backend: str) -> None:
    if backend not in (kernels.available_backends()[0], "reference"):
        pytest.skip("the registrations are the same at every level")
    a, b = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 4, 5).transpose(1, 2)
    sums = (None, "e5m2", True, 2, "nearest-even")
    opcheck(torch.ops.narrowgauge.matmul.default, (a, b, None, None, *sums, "e4m3", *sums, None))
    sums = ("e4m3", "e5m2", False, 1, "stochastic")
    key = torch.tensor([5])
    opcheck(
        torch.ops.narrowgauge.matmul.default, (a, b, "nvfp4", "int4@3", *sums, None, *sums, key)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, about its internals
def test_compiles_without_graph_breaks(backend: str) -> None:
    only_once(backend)
    special = FloatFormat(3, 2, 5)
    backward = MatmulBackward(special, accumulate="fp16", rounding="stochastic")

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        plain = matmul(a, b, operands=("e4m3", special), accumulate="fp16")
        other = matmul(a, b, rounding="stochastic", fused=True, chunk=4, backward=backward)
        blocks = MatmulBackward("mxfp8_e5m2", rounding="stochastic")
        return plain + other + matmul(a, b, operands=("nvfp4", "int4@7"), backward=blocks)

    a, b = torch.randn(2, 6, 9, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (run, compiled):
        torch.manual_seed(0)
        out = function(a, b)
        results.append((out, *torch.autograd.grad(out.sum(), (a, b))))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


# -- errors ----------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed(backend: str) -> None:
    only_once(backend)
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"operands": "e4m3fm"}, ValueError, "did you mean 'e4m3fn'"),
        ({"operands": ("e4m3", "e5m2", "e3m4")}, ValueError, "operands has 3 formats; give one"),
        ({"accumulate": "nvfp4"}, ValueError, "accumulate is nvfp4, a block format, but products"),
        ({"multiply": "int4@8"}, ValueError, "one by one; use its elements' format int4"),
        ({"accumulate": "e8m0"}, ValueError, "accumulate is e8m0, which has no sign and no zero"),
        ({"multiply": "e5m2", "fused": True}, ValueError, "multiply is e5m2, but fused=True keeps"),
        ({"fused": "no"}, TypeError, "fused is 'no'; it must be True or False"),
        ({"compensated": None}, TypeError, "compensated is None; it must be True or False"),
        ({"chunk": 0}, ValueError, "chunk is 0; it must be an integer of at least 1"),
        ({"chunk": 1.5}, ValueError, "chunk is 1.5; it must be an integer"),
        ({"rounding": "nearest"}, ValueError, "rounding is 'nearest'; allowed: 'nearest-even'"),
        ({"backward": "e5m2"}, TypeError, "backward is str; it must be a MatmulBackward"),
        (
            {"backward": MatmulBackward(multiply="e5m2", fused=True)},
            ValueError,
            "backward.multiply is e5m2, but backward.fused=True",
        ),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            matmul(a, b, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a is torch.int64; allowed: torch.float32"):
        matmul(torch.ones(2, 3).long(), b)
    with pytest.raises(TypeError, match=r"a is torch.float64, whose products are not simulated"):
        matmul(a.double(), b.double())
    with pytest.raises(TypeError, match=r"a is torch.float32 and b is torch.bfloat16"):
        matmul(a, b.bfloat16())
    with pytest.raises(ValueError, match="a has no dimension"):
        matmul(torch.tensor(1.0), b)
    with pytest.raises(ValueError, match=r"do not fit: a has rows of 3 numbers, b columns of 2"):
        matmul(a, a)
    with pytest.raises(ValueError, match="batch dimensions of 2 and 3 cannot be broadcast"):
        matmul(torch.ones(2, 2, 3), torch.ones(3, 3, 4))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"b is list; it must be a torch\.Tensor"):
        matmul(torch.ones(1), [1.0])  # type: ignore[arg-type]
