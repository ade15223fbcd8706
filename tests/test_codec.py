from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import narrowgauge as ng
from narrowgauge import IntFormat, decode, encode, format_of, kernels, quantize
from narrowgauge.codec import packed_size
from tests.numbers_by_hand import edges, random_bits, same
from tests.test_rounding import THEIRS, UNUSUAL

WIDTHS = {1: "ue1m0", 2: "e1m0finite", 3: "e2m0finite", 4: "e2m1fn", 5: "e2m2", 6: "e3m2fn",
          7: "e3m3", 8: "e4m3", 9: "e4m4", 10: "e5m4", 11: "e5m5", 12: "e5m6", 13: "e5m7",
          14: "e5m8", 15: "e5m9", 16: "fp16"}  # fmt: skip
quick = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


pytestmark = pytest.mark.usefixtures("backend")


def packed_by_hand(codes: list[int], bits: int) -> torch.Tensor:
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    size = (len(codes) * bits + 7) // 8
    return torch.tensor(list(stream.to_bytes(size, "little")), dtype=torch.uint8)


@pytest.mark.parametrize("bits", WIDTHS)
@quick
@given(data=st.data())
def test_packing_of_every_width(bits: int, data: st.DataObject) -> None:
    format = format_of(WIDTHS[bits])
    assert not isinstance(format, ng.BlockFormat)
    assert format.bits == bits
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    packed = packed_by_hand(codes, bits)
    assert packed.numel() == packed_size(len(codes), format)
    values = decode(packed, format, len(codes))
    assert same(values, format.values()[torch.tensor(codes, dtype=torch.int64)])
    ordinary = [code for code in codes if not math.isnan(format.value_of(code))]
    again = encode(format.values()[torch.tensor(ordinary, dtype=torch.int64)], format)
    assert torch.equal(again, packed_by_hand(ordinary, bits))


@pytest.mark.parametrize("bits", range(2, 17))
@quick
@given(data=st.data())
def test_integers_of_every_width(bits: int, data: st.DataObject) -> None:
    limit = 2 ** (bits - 1) - 1
    numbers = data.draw(st.lists(st.integers(-limit, limit), max_size=40))
    packed = encode(torch.tensor(numbers, dtype=torch.float32), IntFormat(bits))
    assert torch.equal(packed, packed_by_hand([n % 2**bits for n in numbers], bits))
    assert decode(packed, IntFormat(bits), len(numbers)).tolist() == numbers


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "e4m3b11fnuz"])
def test_codes_equal_ml_dtypes(name: str) -> None:
    format = format_of(name)
    x = torch.cat([edges(), random_bits(50_000)])
    x = x[~x.isnan()]
    overflow = "nan" if format_of(name).has_nan and not format.has_infinity else None  # type: ignore[union-attr]
    with np.errstate(all="ignore"):
        theirs = x.numpy().astype(THEIRS[name])
    if format.bits == 16:
        expected = torch.from_numpy(theirs.view(np.uint8))
    elif format.bits == 8:
        expected = torch.from_numpy(theirs.view(np.uint8))
        nan = torch.from_numpy(np.isnan(theirs.astype(np.float32)))
        ours = encode(x, name, overflow=overflow)
        assert (decode(ours, name)[nan]).isnan().all()  # the sign of NaN is ours to choose
        assert torch.equal(ours[~nan], expected[~nan])
        return
    else:  # ml_dtypes leaves each code in a byte of its own
        codes = (theirs.view(np.uint8) & (2**format.bits - 1)).tolist()  # type: ignore[operator]
        expected = packed_by_hand(codes[:4001], int(format.bits))
        x = x[:4001]
    assert torch.equal(encode(x, name, overflow=overflow), expected)


@pytest.mark.parametrize("name", [*UNUSUAL, *THEIRS, "mxfp8_e5m2", "int8@7", "e3m2fn@5:ue4m0"])
def test_encoding_rounds_as_quantize_does(name: str) -> None:
    format = format_of(name)
    x = torch.cat([torch.randn(3000), edges()[::3], random_bits(2000)])
    if isinstance(format, ng.BlockFormat):
        x = torch.randn(3001)
    elif not format.has_nan:
        x = x[~x.isnan()]
    for rounding in ("nearest-even", "down", "stochastic"):
        for each in (x, x.double()):
            torch.manual_seed(2)
            expected = quantize(each, name, rounding=rounding).float()
            torch.manual_seed(2)
            codes = encode(each, name, rounding=rounding)
            assert same(decode(codes, name, each.shape), expected), rounding


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e2m1fn", "bf16", "int8", "e5m2b141", "e6m9"])
@pytest.mark.parametrize("exponent", [-126, -120, -3, 0, 9, 126])
def test_exponent_multiplies_exactly(name: str, exponent: int) -> None:
    x = torch.cat([edges(), torch.randn(1000) * 2.0**-exponent])
    x = x[x.isfinite()]
    codes = encode(x, name, exponent=exponent)
    exact = quantize(x.double() * 2.0**exponent, name)
    assert same(decode(codes, name, x.shape), exact.float())
    assert torch.equal(codes, encode(x.double(), name, exponent=exponent))
    back = decode(codes, name, x.shape, exponent=exponent)
    assert same(back, exact.float() * 2.0**-exponent)
    wide = decode(codes, name, x.shape, exponent=exponent, dtype=torch.float64)
    assert same(wide, exact * 2.0**-exponent)


@pytest.mark.parametrize("name", ["e4m3", "e2m1fn", "e3m2fn", "e5m6"])
def test_exponent_per_block(name: str) -> None:
    x = torch.randn(10, 33)
    exponents = torch.randint(-5, 6, (48,), dtype=torch.int8)
    per_element = exponents.repeat_interleave(7)[: x.numel()].view(x.shape)
    codes = encode(x, name, exponent=exponents, block_size=7)
    scaled = torch.ldexp(x, per_element)
    assert torch.equal(codes, encode(scaled, name))
    back = decode(codes, name, x.shape, exponent=exponents, block_size=7)
    assert same(back, torch.ldexp(quantize(scaled, name), -per_element))
    one = encode(x, name, exponent=torch.tensor(3))
    assert torch.equal(one, encode(x, name, exponent=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_tensor_and_out(dtype: torch.dtype) -> None:
    x = torch.randn(6, 9, dtype=dtype)
    codes = encode(x, "e3m2fn")
    assert torch.equal(encode(x.t().contiguous().t(), "e3m2fn"), codes)
    out = torch.zeros(packed_size(54, "e3m2fn"), dtype=torch.uint8)
    assert encode(x, "e3m2fn", out=out) is out
    assert torch.equal(out, codes)
    apart = torch.zeros(2 * len(codes), dtype=torch.uint8)[::2]
    assert torch.equal(encode(x, "e3m2fn", out=apart), codes)
    values = decode(codes, "e3m2fn", (6, 9), dtype=dtype)
    assert values.dtype == dtype
    for target in (torch.zeros(6, 9, dtype=dtype), torch.zeros(9, 6, dtype=dtype).t()):
        assert decode(apart, "e3m2fn", out=target) is target
        assert same(target, values)
    assert encode(torch.zeros(0, dtype=dtype), "e3m2fn").numel() == 0
    assert decode(torch.zeros(0, dtype=torch.uint8), "e3m2fn").numel() == 0
    assert encode(torch.tensor(1.0, dtype=dtype), "e3m2fn").numel() == 1


def test_whole_elements_when_no_shape_is_given() -> None:
    assert decode(torch.zeros(3, dtype=torch.uint8), "e3m2fn").shape == (4,)
    assert decode(torch.zeros(3, dtype=torch.uint8), "e5m6").shape == (2,)
    assert decode(encode(torch.randn(64), "mxfp8_e5m2"), "mxfp8_e5m2").shape == (64,)
    with pytest.raises(ValueError, match="codes has 3 bytes, which no number of bf16 elements"):
        decode(torch.zeros(3, dtype=torch.uint8), "bf16")


# -- block formats ---------------------------------------------------------------------------------


def test_blocks_take_the_smallest_scale_without_overflow() -> None:
    x = torch.cat([torch.randn(32) * 2.0**e for e in (-100, -5, 0, 7, 90)])
    codes = encode(x, "e4m3fn@32")
    assert codes.numel() == 5 + 160
    scales = torch.ldexp(torch.ones(5), codes[:5].int() - 127)
    blocks = x.view(5, 32)
    elements = decode(codes[5:], "e4m3fn").view(5, 32)
    assert same(elements, quantize(blocks / scales[:, None], "e4m3fn"))
    largest = blocks.abs().amax(1)
    assert (largest / scales <= 464).all()  # rounds to at most 448
    assert (largest / (scales / 2) > 464).all()
    assert same(decode(codes, "e4m3fn@32"), elements.mul(scales[:, None]).flatten())


def test_a_block_that_is_not_finite_comes_out_nan() -> None:
    x = torch.ones(5, 8)
    x[1, 3], x[3, 7] = math.nan, -math.inf
    for name in ("int4@8", "e5m2@8"):
        result = decode(encode(x, name), name, x.shape)
        assert result.isnan().all(1).tolist() == [False, True, False, True, False]
        assert (result[::2] == 1).all()


def test_float64_blocks_are_judged_before_rounding() -> None:
    above = torch.tensor([464.0 + 2.0**-40], dtype=torch.float64)  # overflows by less than an ulp
    assert encode(above, "e4m3fn@32")[0] == 128
    assert encode(torch.tensor([464.0], dtype=torch.float64), "e4m3fn@32")[0] == 127


# -- any bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e5m2", "e4m3fnuz", "e2m1fn", "e5m6", "int5", "e8m0", "int4@5"])
@quick
@given(data=st.binary(max_size=60))
def test_any_bytes_decode(name: str, data: bytes) -> None:
    codes = torch.tensor(list(data), dtype=torch.uint8)
    fits = {packed_size(numel, name) for numel in range(len(data) * 2 + 1)}
    if len(data) in fits:
        assert packed_size(decode(codes, name).numel(), name) == len(data)
    else:
        with pytest.raises(ValueError, match="which no number of"):
            decode(codes, name)


# -- operators and errors --------------------------------------------------------------------------


def test_operators_pass_opcheck(backend: str) -> None:
    if backend != kernels.available_backends()[0]:
        pytest.skip("the registrations are the same at every level")
    operators = torch.ops.narrowgauge
    x, scale = torch.randn(10, 33), torch.tensor([2.0])
    codes = torch.zeros(165, dtype=torch.uint8)
    how = ("e2m1fn", "nearest-even", None, None, scale, 0)
    opcheck(operators.encode.default, (x, *how))
    opcheck(operators.encode_out.default, (x, *how, codes.clone()))
    opcheck(operators.decode.default, (codes, "e2m1fn", 330, scale, 0))
    opcheck(operators.decode_out.default, (codes, "e2m1fn", scale, 0, x.clone()))
    opcheck(operators.largest_magnitudes.default, (x, 7))
    for name in ("mxfp4_e2m1", "nvfp4"):
        block_codes = encode(x, name)
        opcheck(operators.encode_blocks.default, (x, name, "nearest-even", None, None))
        opcheck(operators.decode_blocks.default, (block_codes, name, 330, torch.bfloat16))
        for dim in (None, 0):
            how = (name, dim, "stochastic", None, torch.tensor([7]))
            opcheck(operators.quantize_blocks.default, (x.requires_grad_(), *how))
            out = torch.empty(10, 33)
            opcheck(operators.quantize_blocks_out.default, (x.detach(), *how, out))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e5m2", "e2m1fn", "mxfp8_e4m3", "nvfp4", "int4@64"])
@pytest.mark.filterwarnings("ignore")  # torch's own, about its internals
def test_compiles_without_graph_breaks(backend: str, name: str) -> None:
    if backend != kernels.available_backends()[0]:
        pytest.skip("compilation does not depend on the level")

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = encode(x, name, exponent=3 if name in ("e5m2", "e2m1fn") else None)
        return codes, decode(codes, name, x.shape)

    x = torch.randn(5, 77)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x), run(x), strict=True):
        assert torch.equal(ours, theirs)


def test_errors_say_what_is_wrong() -> None:
    x, codes = torch.ones(10), torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="contains NaN, which e2m1fn cannot hold; use a format"):
        encode(torch.tensor([1.0, math.nan]), "e2m1fn")
    with pytest.raises(ValueError, match="contains NaN, which int8 cannot hold"):
        encode(torch.tensor([math.nan], dtype=torch.float64), "int8")
    with pytest.raises(ValueError, match="tf32 has 19 bits; formats of at most 16 bits"):
        encode(x, "tf32")
    with pytest.raises(ValueError, match="exponent is 127; allowed: -126 to 126"):
        encode(x, "e5m2", exponent=127)
    with pytest.raises(ValueError, match="an exponent is out of range; allowed: -126 to 126"):
        encode(x, "e5m2", exponent=torch.tensor([127]))
    with pytest.raises(TypeError, match=r"exponent is torch.float32; it must be an int"):
        encode(x, "e5m2", exponent=torch.ones(1))
    with pytest.raises(ValueError, match="10 numbers in blocks of 4 need 3"):
        encode(x, "e5m2", exponent=torch.zeros(2, dtype=torch.int32), block_size=4)
    with pytest.raises(ValueError, match="block_size is given without exponent"):
        encode(x, "e5m2", block_size=4)
    with pytest.raises(ValueError, match="int4@64 finds its exponents itself"):
        encode(x, "int4@64", exponent=1)
    with pytest.raises(ValueError, match=r"out is torch.uint8 of shape \(10,\)"):
        encode(x, "e2m1fn", out=codes)
    with pytest.raises(TypeError, match=r"codes is torch.int8; it must be torch.uint8"):
        decode(codes.to(torch.int8), "e5m2")
    with pytest.raises(ValueError, match="it must be one-dimensional"):
        decode(codes.view(2, 5), "e5m2")
    with pytest.raises(ValueError, match=r"codes has 10 bytes; 11 elements of e5m2 .* take 11"):
        decode(codes, "e5m2", 11)
    with pytest.raises(ValueError, match=r"out is torch.float32 of shape"):
        decode(codes, "e5m2", 10, out=torch.ones(2, 5))
    with pytest.raises(TypeError, match=r"dtype is torch.int32; allowed"):
        decode(codes, "e5m2", dtype=torch.int32)
    with pytest.raises(ValueError, match="numel is -1"):
        packed_size(-1, "e5m2")


def test_e8m0_codes_equal_ml_dtypes() -> None:
    powers = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    theirs = powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert torch.equal(encode(powers, "e8m0"), torch.from_numpy(theirs))


def test_arguments_of_a_wrong_type_are_named() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"codes is bytes; it must be a torch\.Tensor"):
        decode(b"1234", "e4m3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"out is int; it must be a torch\.Tensor"):
        decode(codes, "e4m3", out=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exponent is float; it must be an int or an integer"):
        encode(torch.ones(4), "e4m3", exponent=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"block_size is 2\.0; it must be an int or None"):
        decode(codes, "e4m3", exponent=codes[:2], block_size=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["e4m3", "mxfp4"])
def test_negative_views_are_encoded_and_decoded_into(name: str) -> None:
    view = torch.randn(70, dtype=torch.complex64).conj().imag
    codes = encode(view, name)
    assert torch.equal(codes, encode(view.resolve_neg().clone(), name))
    assert torch.equal(encode(view, name, out=torch.zeros_like(codes)), codes)
    assert decode(codes, name, out=view) is view
    assert torch.equal(view, decode(codes, name, 70))
