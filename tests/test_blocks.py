"""Block formats: scales by their rules, and elements that are exactly rounded quotients."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import (
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)

from narrowgauge import BlockFormat, decode, encode, format_of, kernels, matmul, quantize
from narrowgauge.codec import packed_size
from tests import blocks_by_hand
from tests.numbers_by_hand import edges, random_bits, same

MX = {
    "mxfp8_e5m2": format_info_ocp_e5m2,
    "mxfp8_e4m3": format_info_ocp_e4m3,
    "mxfp6_e3m2": format_info_ocp_e3m2,
    "mxfp6_e2m3": format_info_ocp_e2m3,
    "mxfp4_e2m1": format_info_ocp_e2m1,
}
# Every rule, with scales that reach far and scales that do not, wide and narrow elements.
NAMES = [*MX, "nvfp4", "e2m1fn@16:e4m3fn", "e4m3fn@32", "int4@8", "int8@5:floor", "e5m2@3:ue4m0",
         "e4m3fn@7:bf16", "int5@4:e5m2:two-level", "fp16@6:e5m10:two-level", "e3m0@9:ue3m0:floor",
         "int2@4:floor", "e4m3fnuz@4", "e2m1fn@1:e4m3fn", "int8@4:bf16:two-level",
         "bf16@3:bf16:two-level", "e4m7finiteftz@2:e2m1b143:two-level", "int8@2:ue8m0b128:floor",
         "int4@3:ue8m0b149", "int16@2:e5m10:two-level", "int8@3:bf16"]  # fmt: skip


def block_format(name: str) -> BlockFormat:
    format = format_of(name)
    assert isinstance(format, BlockFormat)
    return format


pytestmark = pytest.mark.usefixtures("backend")


def only_once(backend: str) -> None:
    if backend != kernels.available_backends()[0]:
        pytest.skip("does not depend on the level")


# -- equal to the definition -----------------------------------------------------------------------


@cache
def blocks_of_every_magnitude(format: BlockFormat, seed: int = 0) -> torch.Tensor:
    """float32: per exponent a block; its largest number is random, a tie of the scale, or a power
    of two or its neighbour; the others are ties of elements, zeros, or much smaller."""
    generator = torch.Generator().manual_seed(seed)
    size = format.block_size
    kinds = []
    for exponent in range(-149, 128):
        power = torch.tensor(2.0**exponent, dtype=torch.float64).float()
        below = torch.nextafter(power, torch.zeros(()))
        for top in (
            power * 1.75,
            power * 1.5,
            power,
            below,
            power * (1 + torch.rand((), generator=generator)),
        ):
            block = top * torch.rand(size, generator=generator)
            block[::3] = top * torch.randint(-16, 17, block[::3].shape, generator=generator) / 16
            block[::5] *= 2.0**-7
            block[-1] = 0.0 if size > 1 else top
            block[0] = top if exponent % 2 else -top
            kinds.append(block)
    x = torch.cat(kinds)
    return x[x.isfinite()][: x.numel() // size * size]


@cache  # for all levels of the kernels
def by_hand(name: str, seed: int, double: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Such blocks, as float32 or as their neighbours in float64, and what they are rounded to."""
    x = blocks_of_every_magnitude(block_format(name), seed)
    if double:
        x = x[: 300 * block_format(name).block_size].double()
        x = torch.nextafter(x, torch.full_like(x, double * math.inf))
    return x, blocks_by_hand.quantized(x, block_format(name)).to(x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_rounded_by_definition(name: str) -> None:
    x, expected = by_hand(name, 0, 0)
    assert same(quantize(x, name), expected)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_rounded_once(name: str) -> None:
    """Ties of elements and of scales, and their neighbours in float64."""
    for direction in (-1, 1):
        x, expected = by_hand(name, 2, direction)
        assert torch.equal(quantize(x, name), expected)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "int5@4:e5m2:two-level",
        "fp16@6:e5m10:two-level",
        "int8@4:bf16:two-level",
        "bf16@3:bf16:two-level",
    ],
)
def test_two_levels_over_tensors_of_every_magnitude(name: str) -> None:
    """The scale of a tensor is decided by its largest number: one tensor per exponent."""
    format = block_format(name)
    generator = torch.Generator().manual_seed(1)
    for exponent in range(-149, 128, 5):
        x = torch.ldexp(
            torch.rand(3 * format.block_size, generator=generator) + 0.99, torch.tensor(exponent)
        )
        x *= 2.0 ** -torch.arange(len(x)).remainder(14)
        x = x[x.isfinite()]
        assert same(quantize(x, name), blocks_by_hand.quantized(x, format).float()), exponent


@pytest.mark.parametrize("name", NAMES)
def test_any_numbers_and_specials(name: str) -> None:
    format = block_format(name)
    x = torch.cat([edges()[::97], random_bits(1000), torch.zeros(100), -torch.zeros(50)])
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    assert same(quantize(x, name), blocks_by_hand.quantized(x, format).float())


@pytest.mark.parametrize("name", [name for name in NAMES if block_format(name).scale.signed])
def test_rounding_is_decided_by_the_exact_quotient(name: str) -> None:
    """Numbers whose quotients are ties, and the float64 next to them, for awkward scales."""
    format = block_format(name)
    values = format.element.values().double().unique()
    values = values[values.isfinite() & (values >= 0)]
    ties = (values[1:] + values[:-1]) / 2
    ties = torch.cat([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    for scale in (1.125, 1.25, 1.375, 1.75, 13.0):
        for own in (1.0, 1 + 2.0**-23, 2 - 2.0**-22, 1 / 3):
            divisor = scale * float(torch.tensor(own))
            top = format.element.largest * divisor
            numbers = ties[torch.randperm(len(ties), generator=torch.Generator().manual_seed(3))]
            numbers = (numbers * divisor)[:100]
            x = torch.full((len(numbers) * format.block_size,), top, dtype=torch.float64)
            if format.block_size > 1:
                x.view(-1, format.block_size)[:, 1] = numbers
            assert torch.equal(quantize(x, name), blocks_by_hand.quantized(x, format))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "e2m1fn@1:e4m3fn"])
def test_float64_beyond_float32_is_rounded_by_definition(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    for power in (-300, -160, 128, 130, 140, 300):
        x = torch.randn(60, dtype=torch.float64, generator=generator) * 2.0**power
        assert torch.equal(quantize(x, name), blocks_by_hand.quantized(x, block_format(name)))


# -- equal to other libraries ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MX)
def test_mx_formats_are_those_of_gfloat(backend: str, name: str) -> None:
    """Its rule is OCP's; given float64, its logarithm does not round to a power of two."""
    only_once(backend)
    format, info = block_format(name), MX[name]
    theirs = gfloat.BlockFormatInfo(name, info, 32, gfloat.formats.format_info_ocp_e8m0)
    x = torch.cat([blocks_of_every_magnitude(format)[: 32 * 1200], torch.zeros(32)])
    expected = [
        gfloat.quantize_block(theirs, block, gfloat.compute_scale_amax)
        for block in x.double().numpy().reshape(-1, 32)
    ]
    assert np.array_equal(quantize(x.double(), name).numpy().reshape(-1, 32), np.array(expected))


def test_nvfp4_elements_and_scales_are_those_of_gfloat() -> None:
    x = torch.randn(64, 16) * torch.logspace(-6, 2, 64)[:, None]
    codes = encode(x, "nvfp4")
    own = float(codes[:4].view(torch.float32))
    assert own == float(x.abs().max() / torch.tensor(6.0 * 448.0))
    scales = [
        gfloat.round_float(format_info_ocp_e4m3, float(block.abs().max()) / 6 / own, sat=True)
        for block in x
    ]
    assert decode(codes[4:68], "e4m3fn").tolist() == scales
    elements = [
        [
            gfloat.round_float(format_info_ocp_e2m1, float(v) / (s * own) if s else 0.0, sat=True)
            for v in block
        ]
        for block, s in zip(x, scales, strict=True)
    ]
    assert decode(codes[68:], "e2m1fn", x.shape).tolist() == elements
    assert 0.0 in scales  # blocks 10**7 times smaller than the largest vanish


# -- what the rules mean ---------------------------------------------------------------------------


def test_floor_saturates_and_fit_does_not() -> None:
    x = torch.full((32,), 1.9)
    assert quantize(x, "mxfp4_e2m1").unique().tolist() == [1.5]  # 1.9 / 0.25 is beyond 6
    assert quantize(x, "e2m1fn@32").unique().tolist() == [2.0]
    assert quantize(x, "mxfp4_e2m1", rounding="up").unique().tolist() == [1.5]


def test_the_errors_on_the_page_are_measured(backend: str) -> None:
    only_once(backend)
    page = Path(__file__).parent.parent.joinpath("docs/formats.md").read_text(encoding="utf-8")
    table = page.partition("| | `e4m3fn@32`")[2].partition("\n\n")[0]
    names = ["e4m3fn@32", *re.findall("`(.*?)`", table.splitlines()[0])]
    torch.manual_seed(0)
    x = torch.randn(1_000_000)
    spread = x * 2.0 ** (3 * torch.randn(1_000_000))
    for row, numbers in zip(table.splitlines()[2:], (x, spread), strict=True):
        errors = [float((quantize(numbers, n) - numbers).norm() / numbers.norm()) for n in names]
        assert [float(cell) for cell in row.split("|")[2:-1]] == pytest.approx(errors, abs=6e-4)


def test_a_tiny_block_vanishes_without_a_scale_of_its_own() -> None:
    tiny = torch.full((16,), -1e-5)
    assert quantize(tiny, "e2m1fn@16:e4m3fn").tolist() == [-0.0] * 16
    assert quantize(tiny, "nvfp4").allclose(tiny, rtol=1e-6)
    huge = torch.full((16,), 3e38)
    assert quantize(huge, "e2m1fn@16:e4m3fn").tolist() == [6.0 * 448.0] * 16  # saturates
    assert quantize(huge, "nvfp4").allclose(huge, rtol=1e-6)


@pytest.mark.parametrize("name", ["int8@128:bf16:two-level", "int8@128:e8m3:two-level"])
@pytest.mark.parametrize("top", [1e38, 1.0, 6e-5, 1e-38])
def test_two_levels_with_scales_as_wide_as_float32_lose_nothing(name: str, top: float) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x *= top / x.abs().max()
    error = (quantize(x, name) - x).abs().view(-1, 128).amax(1) / x.abs().view(-1, 128).amax(1)
    assert float(error.max()) < 0.5 / 127 + 2.0**-3 / 2  # half a step, and a scale rounded down
    codes = encode(x, name)
    assert same(decode(codes, name, x.shape), quantize(x, name))


def test_scales_that_fit_reach_as_far_as_their_format() -> None:
    for top in (1e-34, 1e-37, 3e38):
        x = torch.tensor([top, top / 7, -top / 3])
        expected = blocks_by_hand.quantized(x, block_format("int4@64")).float()
        assert same(quantize(x, "int4@64"), expected)
        assert torch.allclose(expected, x, atol=top / 7)
    assert quantize(torch.tensor([2.0**127]), "int2@4").tolist() == [2.0**127]
    assert quantize(torch.tensor([1e39], dtype=torch.float64), "mxfp4").tolist() == [6 * 2.0**127]


def test_a_block_longer_than_what_it_cuts_takes_no_more_memory() -> None:
    x = torch.randn(50, 10)  # in rows of a whole block these would be terabytes
    whole, rows = x.double(), torch.stack([quantize(row, "int8@10") for row in x])
    for scale in ("", ":floor", ":bf16", ":e4m3fn:two-level"):
        long, short, flat = (f"int8@{size}{scale}" for size in (10**11, 10, 500))
        for each in (x, whole):
            assert same(quantize(each, long, dim=1), quantize(each, short, dim=1))
            assert same(quantize(each, long), quantize(each, flat))
    assert same(quantize(x, "int8@100000000000", dim=1), rows)
    product = matmul(x, x.T, operands="int8@100000000000")
    assert same(product, matmul(x, x.T, operands="int8@10"))


@pytest.mark.parametrize("name", NAMES)
def test_finite_numbers_never_give_nan_and_others_mark_their_block(name: str) -> None:
    size = block_format(name).block_size
    for dtype in (torch.float32, torch.float64):
        info = torch.finfo(dtype)
        for value in (0.0, 2.0**-149, info.tiny, info.max, -info.max):
            x = torch.full((3 * size,), value, dtype=dtype)
            assert quantize(x, name).isfinite().all() or value in (info.max, -info.max)
            assert not quantize(x, name).isnan().any(), value
            for special in (math.inf, -math.inf, math.nan):
                x[size] = special
                marked = quantize(x, name).view(3, size).isnan()
                assert marked.tolist() == [[False] * size, [True] * size, [False] * size]


# -- along a dimension -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "int4@8", "e2m1fn@16:e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_along_a_dimension(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 40, 5).to(dtype)
    for dim in (0, 1, 2, -1, -2):
        result = quantize(x, name, dim=dim)
        assert result.dtype == dtype
        assert result.is_contiguous()
        if name != "nvfp4":  # whose second scale is the whole tensor's
            for row, rounded in zip(
                x.movedim(dim, -1).reshape(-1, x.shape[dim]),
                result.movedim(dim, -1).reshape(-1, x.shape[dim]),
                strict=True,
            ):
                assert same(rounded, quantize(row, name))
        turned = x.movedim(dim, 0).contiguous().movedim(0, dim)
        assert same(quantize(turned, name, dim=dim), result)
        out = torch.empty(5, 40, 3, dtype=dtype).transpose(0, 2)
        assert quantize(x, name, dim=dim, out=out) is out
        assert same(out.contiguous(), result)
    whole = torch.randn(4, 64).to(dtype)
    assert same(quantize(whole, name, dim=1), quantize(whole, name))


def test_dim_of_any_shape() -> None:
    for shape in ((0,), (0, 5), (5, 0), (3, 0, 2), ()):
        x = torch.zeros(shape)
        for dim in (None, 0, -1):
            assert quantize(x, "nvfp4", dim=dim).shape == shape
    assert quantize(torch.tensor(3.0), "mxfp8_e4m3", dim=0).item() == 3.0
    with pytest.raises(IndexError, match="dim is 2; x has 2 dimensions"):
        quantize(torch.zeros(2, 2), "nvfp4", dim=2)
    x = torch.randn(4, 3)
    assert same(quantize(x, "e4m3", dim=0), quantize(x, "e4m3"))


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_stochastic_blocks_obey_the_seed_and_gradients_pass(dim: int | None) -> None:
    x = torch.randn(33, 40, requires_grad=True)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(quantize(x, "nvfp4", dim=dim, rounding="stochastic"))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])
    grad = torch.randn_like(x)
    results[0].backward(grad)
    assert torch.equal(x.grad, grad)  # type: ignore[arg-type]
    many = torch.full((4000, 16), 0.3)
    many[:, 0] = 6.0
    mean = quantize(many, "e2m1fn@16", dim=1, rounding="stochastic")[:, 1:].mean().item()
    assert abs(mean - 0.3) < 5 * 0.25 / math.sqrt(60_000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, about its internals
@pytest.mark.parametrize("name", ["mxfp4_e2m1", "nvfp4"])
def test_compiles_without_graph_breaks(backend: str, name: str) -> None:
    only_once(backend)

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantize(x, name, dim=0) + quantize(x, name, rounding="toward-zero")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for shape in ((7, 33), (9, 20), (11, 64)):  # from the second one on with sizes as variables
        x = torch.randn(shape, requires_grad=True)
        assert same(compiled(x), run(x))
        assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full(shape, 2.0))


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    format = block_format(name)
    for numel in (0, 1, 31, 32, 33, 500):
        x = torch.randn(numel)
        codes = encode(x, name)
        blocks = -(-numel // format.block_size)
        own = 4 if format.scale_rule == "two-level" and numel else 0
        scales, elements = blocks * format.scale.bits, numel * format.element.bits
        assert (
            codes.numel() == packed_size(numel, name) == own + -(-scales // 8) + -(-elements // 8)
        )
        assert same(decode(codes, name, numel), quantize(x, name))
        assert torch.equal(encode(x, name, out=torch.zeros_like(codes)), codes)
        wide = decode(codes, name, numel, dtype=torch.float64)
        assert same(wide.float(), decode(codes, name, numel))
