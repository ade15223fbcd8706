from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.library import opcheck

import narrowgauge as ng
from narrowgauge import FloatFormat, IntFormat, format_of, kernels, quantize, quantize_
from tests.numbers_by_hand import edges, random_bits, rounded, same

ROUNDINGS = ["nearest-even", "nearest-away", "toward-zero", "up", "down"]
THEIRS = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
# Without mantissa bits, without subnormals, with odd biases, at the edge of float32, integers.
UNUSUAL = [
    "e3m0", "e4m0b8", "e2m0finite", "e5m2ftz", "e4m3fnftz", "e3m0ftz", "e5m2b17", "e4m3b-3",
    "e5m2b141", "e5m2b140ftz", "e8m2", "e8m2ftz", "e7m3b127ftz", "e6m1fnuz", "e1m2",
    "e8m0", "ue4m0", "int8", "int4", "int2",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("backend")


def scalar(name: str) -> FloatFormat | IntFormat:
    format = format_of(name)
    assert not isinstance(format, ng.BlockFormat)
    return format


@pytest.mark.parametrize("name", THEIRS)
def test_equals_ml_dtypes(name: str) -> None:
    format = scalar(name)
    x = torch.cat([edges(), random_bits(100_000)])
    if not format.has_nan:
        # ml_dtypes turns NaN into −0 there; we keep it NaN.
        assert quantize(x[x.isnan()], name).isnan().all()
        x = x[~x.isnan()]
    overflow = "nan" if format.has_nan and not format.has_infinity else None
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(THEIRS[name]).astype(np.float32))
    assert same(quantize(x, name, overflow=overflow), theirs)


def hard_numbers(format: FloatFormat | IntFormat) -> list[float]:
    """The format's numbers, the middles between them, and their neighbours in float64."""
    last = format.largest_code if isinstance(format, FloatFormat) else int(format.largest)
    codes = sorted({*range(min(last + 1, 20)), *range(max(0, last - 20), last + 1), last // 2})
    values = [format.value_of(code) for code in codes]
    values += [format.largest * factor for factor in (1.25, 1.5, 2.0, 3.0, 1e9)]
    values += [format.smallest * factor for factor in (0.5, 0.25, 0.75, 1e-9, 1e-300)]
    values += [(a + b) / 2 for a, b in itertools.pairwise(values)]
    near = [math.nextafter(value, way) for value in values for way in (-math.inf, math.inf)]
    all_of_them = [*values, *near, 5e-324, 1e308, math.inf, 0.0]
    return [*all_of_them, *(-value for value in all_of_them), math.nan]


@pytest.mark.parametrize("name", [*UNUSUAL, "e5m2", "e4m3fn", "e2m1fn", "e4m3fnuz"])
def test_float64_rounds_once_and_by_definition(name: str) -> None:
    format = scalar(name)
    numbers = hard_numbers(format)
    x = torch.tensor(numbers, dtype=torch.float64)
    allowed = [None, "saturate"]
    allowed += ["infinity"] if format.has_infinity else []
    allowed += ["nan"] if format.has_nan else []
    for rounding in ROUNDINGS:
        for overflow in allowed:
            expected = [rounded(each, format, rounding, overflow) for each in numbers]
            result = quantize(x, name, rounding=rounding, overflow=overflow)
            assert same(result, torch.tensor(expected, dtype=torch.float64)), (rounding, overflow)


@pytest.mark.parametrize("name", [*UNUSUAL, "e5m2", "e4m3fn", "tf32"])
def test_float32_equals_float64(name: str) -> None:
    # float64 was checked by definition; float32 has kernels of its own.
    x = torch.cat([edges()[::3], random_bits(10_000), torch.randn(10_000)])
    for rounding in ROUNDINGS:
        wide = quantize(x.double(), name, rounding=rounding).float()
        assert same(quantize(x, name, rounding=rounding), wide), rounding


def test_float64_is_not_rounded_to_float32_first() -> None:
    just_above_the_tie = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert quantize(just_above_the_tie, "e4m3").item() == 1.125
    assert quantize(just_above_the_tie.float(), "e4m3").item() == 1.0


def test_ties_without_mantissa_go_to_the_even_code() -> None:
    assert quantize(torch.tensor([3.0, 6.0, 12.0]), "e3m0").tolist() == [2.0, 8.0, 8.0]


# -- faults of other libraries ---------------------------------------------------------------------


def test_all_of_float32_is_the_identity() -> None:
    x = torch.cat([torch.tensor([3.0]), edges(), random_bits(10_000)])
    assert same(quantize(x, FloatFormat(8, 23)), x)


def test_negative_zero_nan_and_infinity_stay() -> None:
    x = torch.tensor([-0.0, math.nan, -math.nan, math.inf, -math.inf, -1e-30])
    result = quantize(x, "e4m3")
    assert result[0].signbit()
    assert result[5].signbit()
    assert result[1:3].isnan().all()
    assert result[3:5].tolist() == [math.inf, -math.inf]


def test_infinite_input_is_no_overflow() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e30])
    assert quantize(x, "e5m2", overflow="saturate").tolist() == [math.inf, -math.inf, 57344.0]
    assert quantize(x, "e4m3fn")[:2].isnan().all()
    assert quantize(x, "e4m3fn")[2] == 448
    assert quantize(x, "e2m1fn").tolist() == [6.0, -6.0, 6.0]


def test_fp16_subnormals_and_bf16_subnormals() -> None:
    x = torch.cat([edges(), random_bits(10_000)])
    assert same(quantize(x, "fp16"), x.half().float())
    assert same(quantize(x, "bf16"), x.bfloat16().float())


def test_just_beyond_the_largest_is_not_zero() -> None:
    x = torch.tensor([2.0**16, 2.0**17 - 1, 61440.0, 61439.0])
    assert quantize(x, "e5m2").tolist() == [math.inf, math.inf, math.inf, 57344.0]


def test_scales_are_representable() -> None:
    x = torch.tensor([3.0, 1e-45, 3e38, 0.0, -1.0])
    result = quantize(x, "e8m0")
    # 3 is a tie between codes 128 and 129; there is no zero.
    assert result[:3].tolist() == [2.0, 2.0**-127, 2.0**127]
    assert result[3:].isnan().all()


# -- tensors of every kind -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", ["nearest-even", "up", "stochastic"])
def test_dtypes_shapes_and_strides(dtype: torch.dtype, rounding: str) -> None:
    def q(x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return quantize(x, "e4m3", rounding=rounding, **options)

    x = torch.randn(3, 5, 8, 4, dtype=dtype) * 20
    expected = q(x)
    assert expected.dtype == dtype
    torch.manual_seed(1)
    assert same(quantize(x.float(), "e4m3", rounding=rounding).to(dtype), expected)
    assert same(q(x.contiguous(memory_format=torch.channels_last)), expected)
    transposed = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not transposed.is_contiguous()
    assert same(q(transposed), expected)
    spread = torch.zeros(3, 5, 8, 8, dtype=dtype)[..., ::2]
    spread.copy_(x)
    assert same(q(spread), expected)
    out = torch.zeros(3, 5, 8, 8, dtype=dtype)[..., 1::2]
    assert q(x, out=out) is out
    assert same(out, expected)
    assert q(spread, out=spread) is spread
    assert same(spread, expected)
    assert same(q(x[:1, :1, :1, :1].expand(2, 3, 4, 5))[0], q(x[0, 0, 0, 0].expand(3, 4, 5)))
    assert q(torch.tensor(1.1, dtype=dtype)).shape == ()
    assert q(torch.zeros(0, 3, dtype=dtype)).shape == (0, 3)


def test_large_tensors_on_two_threads() -> None:
    x = torch.randn(140_003)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(3)
            each = [
                quantize(x, "e5m2", rounding=rounding) for rounding in (*ROUNDINGS, "stochastic")
            ]
            results.append(each)
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert same(one, two)


def test_in_place() -> None:
    x = torch.randn(100)
    expected = quantize(x, "e3m0")
    version = x._version
    assert quantize_(x, "e3m0") is x
    assert same(x, expected)
    assert x._version > version


def test_block_format_is_encoding_and_decoding() -> None:
    x = torch.randn(7, 50)
    expected = ng.decode(ng.encode(x, "mxfp4"), "mxfp4", x.shape)
    assert same(quantize(x, "mxfp4"), expected)
    out = torch.empty(7, 50)
    assert quantize(x, "mxfp4", out=out) is out
    assert same(out, expected)
    leaf = x.clone().requires_grad_()
    quantize(leaf, "mxfp4").sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()


# -- stochastic rounding ---------------------------------------------------------------------------


def test_stochastic_is_unbiased() -> None:
    count = 100_000
    for value, format in ((1.3, "e5m2"), (-1.1, "e4m3"), (2.0**-18, "e5m2"), (2.5, "int4")):
        torch.manual_seed(0)
        result = quantize(torch.full((count,), value), format, rounding="stochastic")
        neighbours = result.unique()
        assert len(neighbours) == 2
        spread = float(neighbours[1] - neighbours[0])
        # One of two numbers: a standard deviation of at most half their distance. Of the mean of
        # all, three standard deviations.
        assert abs(result.double().mean().item() - value) < 3 * spread / 2 / count**0.5
        exact = quantize(neighbours, format, rounding="stochastic")
        assert torch.equal(exact, neighbours)


def test_stochastic_obeys_seed_and_generator() -> None:
    x = torch.randn(1000)

    def q(generator: torch.Generator | None = None) -> torch.Tensor:
        return quantize(x, "e3m0", rounding="stochastic", generator=generator)

    torch.manual_seed(5)
    first, second = q(), q()
    torch.manual_seed(5)
    assert torch.equal(first, q())
    assert not torch.equal(first, second)
    third = q(torch.Generator().manual_seed(7))
    assert torch.equal(third, q(torch.Generator().manual_seed(7)))
    assert not torch.equal(third, q(torch.Generator().manual_seed(8)))


# -- autograd and torch.compile --------------------------------------------------------------------


def test_gradient_passes_straight_through() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    weight = torch.randn(4, 5)
    (quantize(x * 2, "e2m1fn", rounding="stochastic") * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * weight)
    x.grad = None
    doubled = x * 2
    (quantize_(doubled, "e2m1fn") * weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        quantize_(x, "e2m1fn")
    with torch.no_grad():
        quantize_(x, "e2m1fn")


def test_operators_pass_opcheck(backend: str) -> None:
    if backend not in (kernels.available_backends()[0], "reference"):
        pytest.skip("the registrations are the same at every level")
    operators = torch.ops.narrowgauge
    x, key = torch.randn(10, 33), torch.tensor([5])
    for each in (x, x.t(), x.double(), x.half()):
        how = ("e5m2", "stochastic", None, key)
        opcheck(operators.quantize.default, (each.clone().requires_grad_(), *how))
        opcheck(operators.quantize_out.default, (each, *how, torch.empty_like(each)))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["e4m3", FloatFormat(3, 2, 5), torch.bfloat16, "int4@64"])
@pytest.mark.filterwarnings("ignore")  # torch's own, about its internals
def test_compiles_without_graph_breaks(backend: str, format: ng.formats.FormatLike) -> None:
    if backend != kernels.available_backends()[0]:
        pytest.skip("compilation does not depend on the level")

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        stochastic = quantize(x * 2, format, rounding="stochastic")
        into = quantize(x, format, out=torch.empty_like(x))
        return [quantize(x, format), stochastic, quantize_(x * 3, format), into]

    x = torch.randn(8, 33)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    expected = run(x)
    torch.manual_seed(0)
    for ours, theirs in zip(compiled(x), expected, strict=True):
        assert same(ours, theirs)
    grad = torch.randn(8, 33, requires_grad=True)
    straight = torch.compile(
        lambda x: quantize(x, format).sum(), fullgraph=True, backend="aot_eager"
    )
    straight(grad).backward()
    assert grad.grad is not None
    assert (grad.grad == 1).all()


# -- errors ----------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed() -> None:
    x = torch.ones(4)
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"format": "e4m3fm"}, ValueError, "did you mean 'e4m3fn'"),
        ({"rounding": "nearest"}, ValueError, "rounding is 'nearest'; allowed: 'nearest-even'"),
        ({"overflow": "inf"}, ValueError, "overflow is 'inf'; allowed: None, 'infinity'"),
        (
            {"format": "e4m3fn", "overflow": "infinity"},
            ValueError,
            "but e4m3fn has no infinity; allowed: None, 'saturate', 'nan'",
        ),
        ({"format": "e2m1fn", "overflow": "nan"}, ValueError, "but e2m1fn has no NaN"),
        ({"out": torch.ones(5)}, ValueError, r"out is torch.float32 of shape \(5,\)"),
        ({"out": torch.ones(4).double()}, ValueError, "out is torch.float64"),
        ({"out": torch.ones(1).expand(4)}, ValueError, "elements share memory"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            quantize(x, **{"format": "e5m2", **options})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x is torch.int64; allowed: torch.float32"):
        quantize(torch.arange(3), "e5m2")
    long = torch.ones(9)
    with pytest.raises(ValueError, match="out shares memory with the input"):
        quantize(long[:8], "e5m2", out=long[1:])
    for dim in (None, 0):
        with pytest.raises(ValueError, match="out shares memory with the input"):
            quantize(long[:8], "int4@4", dim=dim, out=long[1:])
    with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
        quantize(x.requires_grad_(), "e5m2", out=torch.ones(4))


def test_arguments_of_a_wrong_type_are_named() -> None:
    x = torch.ones(4)
    for dim in (1.0, "x", True):
        for format in ("int4@2", "e4m3"):
            with pytest.raises(TypeError, match=f"dim is {dim!r}; it must be an int, or None"):
                quantize(x, format, dim=dim)  # type: ignore[arg-type]
    tensor = r"it must be a torch.Tensor \(torch.as_tensor makes one\)"
    cases: list[tuple[object, dict[str, object], type[Exception], str]] = [
        ([1.0], {}, TypeError, f"x is list; {tensor}"),
        (np.ones(3), {}, TypeError, f"x is ndarray; {tensor}"),
        (x.to_sparse(), {}, TypeError, "x is a torch.sparse_coo tensor; it must be a dense one"),
        (x, {"generator": 1}, TypeError, "generator is int; it must be a torch.Generator or None"),
        (x, {"out": 3}, TypeError, f"out is int; {tensor}"),
        (x, {"overflow": True}, ValueError, "overflow is True; allowed: None, 'infinity'"),
        (x, {"overflow": 0}, ValueError, "overflow is 0; allowed: None, 'infinity'"),
    ]
    for given, options, error, text in cases:
        for function in (quantize, ng.encode):
            with pytest.raises(error, match=text):
                function(given, "e5m2", **options)  # type: ignore[operator]
    with pytest.raises(TypeError, match="x is list; it must be"):
        quantize_([1.0], "e5m2")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("rounding", ["nearest-even", "up", "stochastic"])
def test_negative_views_are_read_and_written(name: str, rounding: str) -> None:
    view = torch.randn(70, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    plain = view.resolve_neg().clone()

    def q(x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        return quantize(x, name, rounding=rounding, **options)

    expected = q(plain)
    assert torch.equal(q(view), expected)
    assert torch.equal(q(view, out=torch.empty(70)), expected)
    other = torch.zeros(70, dtype=torch.complex64).conj().imag
    assert torch.equal(q(plain, out=other), expected)
    torch.manual_seed(2)
    assert quantize_(view, name, rounding=rounding) is view
    assert torch.equal(view, expected)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # torch's own
def test_forward_mode_is_refused_not_silently_zero() -> None:
    x, tangent = torch.randn(3, 3), torch.ones(3, 3)
    message = "forward-mode differentiation .* is not supported through rounding; use backward"
    for function in (
        lambda x: ng.quantize(x, "e5m2"),
        lambda x: ng.quantize(x, "mxfp8_e4m3"),
        lambda x: ng.matmul(x, x, accumulate="e5m2"),
        lambda x: ng.nn.Linear(3, 3, formats=ng.nn.LayerFormats("e5m2", "e5m2"))(x),
    ):
        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(function, (x,), (tangent,))


def test_vmap_is_the_same_as_a_loop() -> None:
    x = torch.randn(4, 3)
    for format in ("e5m2", "mxfp8_e4m3"):
        batched = torch.func.vmap(lambda x, format=format: ng.quantize(x, format))(x)
        assert torch.equal(batched, torch.stack([ng.quantize(row, format) for row in x]))
