"""Formats know their numbers, and names mean one format each."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge import BlockFormat, FloatFormat, IntFormat, format_of
from narrowgauge.formats import known_formats

THEIRS = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}


def float_format(name: str) -> FloatFormat:
    format = format_of(name)
    assert isinstance(format, FloatFormat)
    return format


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(name: str) -> None:
    format = float_format(name)
    codes = np.arange(2**format.bits, dtype=np.uint16 if format.bits > 8 else np.uint8)
    theirs = codes.view(THEIRS[name]).astype(np.float32)
    ours = format.values().numpy()
    same = (ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), codes[~same]


@pytest.mark.parametrize("name", [name for name in THEIRS if name not in ("fp16", "e8m0")])
def test_properties_are_those_of_finfo(name: str) -> None:
    format, info = float_format(name), ml_dtypes.finfo(THEIRS[name])
    assert format.bits == info.bits
    assert format.largest == float(info.max)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest_subnormal == float(info.smallest_subnormal)
    assert format.smallest == float(info.smallest_subnormal)
    assert format.epsilon == float(info.eps)


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "bf16", "fp16"])
def test_torch_dtype_has_the_same_bits(name: str) -> None:
    format = float_format(name)
    dtype = format.torch_dtype
    assert dtype is not None
    assert format_of(dtype) == format
    integer = torch.uint8 if format.bits == 8 else torch.int16
    codes = torch.arange(2**format.bits).to(integer)
    assert torch.equal(codes.view(dtype).float().nan_to_num(), format.values().nan_to_num())


def test_formats_that_only_look_like_torch_dtypes_have_none() -> None:
    assert format_of("e4m3").torch_dtype is None  # torch's e4m3 is e4m3fn
    assert format_of("int8").torch_dtype is None  # torch's integers are not symmetric


@given(
    exponent_bits=st.integers(1, 8),
    mantissa_bits=st.integers(0, 23),
    bias=st.none() | st.integers(-40, 160),
    specials=st.sampled_from(["ieee", "fn", "fnuz", "finite"]),
    subnormals=st.booleans(),
)
def test_a_float_format_is_refused_or_found_again_by_its_name(
    exponent_bits: int, mantissa_bits: int, bias: int | None, specials: str, subnormals: bool
) -> None:
    try:
        format = FloatFormat(exponent_bits, mantissa_bits, bias, specials, subnormals)  # type: ignore[arg-type]
    except ValueError:
        return
    assert format_of(format.name) == format
    assert format_of(str(format).upper()) == format
    assert eval(repr(format)) == format
    assert 0 < format.smallest <= format.largest <= torch.finfo(torch.float32).max


@given(
    bits=st.integers(2, 16),
    element=st.sampled_from(["e2m1fn", "e4m3", "int4"]),
    size=st.integers(1, 999),
)
def test_integers_and_blocks_are_found_again_by_their_names(
    bits: int, element: str, size: int
) -> None:
    assert format_of(IntFormat(bits).name) == IntFormat(bits)
    scalar = format_of(element)
    assert not isinstance(scalar, BlockFormat)
    rules = {"e8m0": ("fit", "floor"), "ue4m0": ("fit", "floor"), "e4m3fn": ("amax", "two-level")}
    for scale, scale_rules in rules.items():
        for rule in scale_rules:
            block = BlockFormat(scalar, size, float_format(scale), rule)  # type: ignore[arg-type]
            assert format_of(block.name) == block
            assert format_of(f"{element}@{size}:{scale}:{rule}") == block
            assert block.bits == scalar.bits + float_format(scale).bits / size


@pytest.mark.parametrize("name", known_formats())
def test_known_formats_survive_copies_and_keep_their_names(name: str) -> None:
    format = format_of(name)
    assert format.name == str(format) == name
    assert pickle.loads(pickle.dumps(format)) == format == copy.deepcopy(format)
    assert hash(format) == hash(copy.copy(format))


def test_names_of_near_formats_are_not_confused() -> None:
    assert FloatFormat(8, 0).name == "e8m0ieee"  # e8m0 is the scale of OCP MX
    assert FloatFormat(2, 1, specials="fn").name == "e2m1nan"  # e2m1fn has no NaN


def test_integers_are_symmetric() -> None:
    values = IntFormat(4).values().tolist()
    assert values == [*range(8), *range(-8, 0)]
    assert IntFormat(4).largest == 7


def test_overflow_threshold_is_where_ml_dtypes_overflows() -> None:
    for name, dtype in THEIRS.items():
        if name in ("e8m0", "fp16"):  # ties go away from zero there; numpy warns of overflow
            continue
        format = float_format(name)
        midpoint, inclusive = format.overflow_threshold
        before = np.nextafter(np.float32(midpoint), np.float32(0))
        at, below = (np.float32(x).astype(dtype).astype(np.float32) for x in (midpoint, before))
        assert float(below) == format.largest
        if format.specials != "finite":  # those saturate
            assert (not math.isfinite(at)) == inclusive, name


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("e4m3fm", "format 'e4m3fm' is unknown; did you mean 'e4m3fn'? known: fp32"),
        ("nonsense", "format 'nonsense' is unknown; known: fp32"),
        ("", "format '' is unknown"),
        ("e9m2", "exponent_bits is 9; allowed: 1 to 8"),
        ("e4m24", "mantissa_bits is 24; allowed: 0 to 23"),
        ("int17", "bits is 17; an integer format has 2 to 16 bits"),
        ("int4@0", "block_size is 0; it must be at least 1"),
        ("fp32@32", "fp32 cannot be a block's element"),
        (
            "e4m3@32:e5m2:fit",
            "scale is e5m2; scale_rule 'fit' needs an unsigned power",
        ),
        ("e4m3@32:floor:e8m0", "format 'e4m3@32:floor:e8m0' is unknown"),
        ("e4m3@32:amax", "scale is e8m0; scale_rule 'amax' needs a signed format with NaN"),
        ("e4m3@32:fp32", "scale is fp32; scale_rule 'amax' needs a signed format with NaN"),
        ("e4m3@32:e2m1fn", "scale is e2m1fn; scale_rule 'amax' needs a signed format with NaN"),
        ("e4m3@32:ue4m0b40", "scale is ue4m0b40, which lacks 1; choose another bias"),
        ("e1m0", "has no finite number besides zero"),
        ("e4m3b-200", "outside of float32"),
        ("e2m8b147fnuzftz", "in steps of 2**-154 and more, outside of float32"),
        (torch.int64, "torch.int64 is not a format; allowed dtypes: torch.float32"),
    ],
)
def test_a_wrong_format_is_refused_by_name(given: str | torch.dtype, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        format_of(given)
    assert text in str(caught.value)


@pytest.mark.parametrize("given", [None, 3, 2.5, ["e5m2"]])
def test_what_is_no_format_at_all_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match="a format is a name"):
        format_of(given)  # type: ignore[arg-type]


def test_values_are_listed_up_to_16_bits() -> None:
    with pytest.raises(ValueError, match="listed only up to 16 bits"):
        float_format("fp32").values()
    with pytest.raises(ValueError, match="code is 256; e5m2 has codes 0 to 255"):
        float_format("e5m2").value_of(256)


@pytest.mark.parametrize("name", ["e4m3", "int4"])
def test_values_may_be_changed_by_whoever_asked_for_them(name: str) -> None:
    format = format_of(name)
    assert not isinstance(format, BlockFormat)
    before = format.values()
    format.values().zero_()
    assert torch.equal(format.values().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FloatFormat(True, 3), "exponent_bits is True; it must be an int"),
        (lambda: FloatFormat(4.0, 3), r"exponent_bits is 4\.0; it must be an int"),  # type: ignore[arg-type]
        (lambda: FloatFormat(4, 3, subnormals="no"), "subnormals is 'no'; allowed: .'bool'"),  # type: ignore[arg-type]
        (lambda: IntFormat(8.0), r"bits is 8\.0; it must be an int"),  # type: ignore[arg-type]
        (lambda: BlockFormat(IntFormat(4), 32.0), r"block_size is 32\.0; it must be an int"),  # type: ignore[arg-type]
        (lambda: BlockFormat("int4"), "element is 'int4'; allowed: .'FloatFormat', 'IntFormat'"),  # type: ignore[arg-type]
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_integers_of_numpy_become_plain_ones() -> None:
    format = FloatFormat(np.int64(4), np.int32(3), np.int64(11))  # type: ignore[arg-type]
    assert format == FloatFormat(4, 3, 11)
    assert type(format.bias) is type(format.exponent_bits) is int


def test_an_unknown_rule_of_scales_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"scale_rule is 'max'; allowed: \('fit', 'floor', 'amax'"):
        BlockFormat(IntFormat(4), scale_rule="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [-9999, -(10**30), 10**30])
def test_a_bias_far_out_is_refused(bias: int) -> None:
    with pytest.raises(ValueError, match=f"bias is {bias}; none beyond 400"):
        FloatFormat(4, 3, bias)


@pytest.mark.parametrize(
    "name",
    ["e٤m٣", "int８", "int4@３", "ue4m0finite", "int4@1:" * 2000 + "e8m0", "e4m3b" + "9" * 5000,
     "int" + "1" * 5000, "e" + "1" * 5000 + "m3", "int4@" + "1" * 5000],
    ids=range(9),
)  # fmt: skip
def test_strange_names_are_unknown(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown"):
        format_of(name)
