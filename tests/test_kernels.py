from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge import decode, encode, format_of, kernels, quantize
from narrowgauge.codec import packed_size
from narrowgauge.formats import table_of
from narrowgauge.kernels import native, reference
from narrowgauge.kernels.grid import ROUNDINGS, grid_of
from narrowgauge.scaling import ALL_ZERO, NON_FINITE, scale_exponent
from tests.numbers_by_hand import edges, random_bits, same
from tests.test_rounding import THEIRS, UNUSUAL

pytestmark = pytest.mark.usefixtures("backend")


FORMATS = [
    "e5m2",
    "e4m3",
    "e2m1fn",
    "e3m2fn",
    "e3m0",
    "e5m6",
    "bf16",
    "fp16",
    "int4",
    "int8",
    "fp32",
]


def bytes_for(numel: int, name: str) -> int:
    return 4 * numel if name == "fp32" else packed_size(numel, name)


def value_of(codes: torch.Tensor, name: str, numel: int) -> torch.Tensor:
    return codes.view(torch.float32) if name == "fp32" else decode(codes, name, numel)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 1001, 70_003])
@pytest.mark.parametrize("threads", [None, 1, 2])
def test_encode_and_decode_into(name: str, numel: int, threads: int | None) -> None:
    exponent = 0 if name == "fp32" else 5
    x = torch.randn(numel)
    codes = torch.full((bytes_for(numel, name),), 255, dtype=torch.uint8)
    kernels.encode_into(x, name, exponent, codes, threads=threads)
    expected = x.view(torch.uint8) if name == "fp32" else encode(x * 2.0**exponent, name)
    assert torch.equal(codes, expected)
    out = torch.empty(numel)
    kernels.decode_into(codes, name, exponent, out, factor=0.3, threads=threads)
    by_hand = value_of(codes, name, numel) * 2.0**-exponent * torch.tensor(0.3)
    assert same(out, by_hand)


def fitting_cases() -> dict[str, torch.Tensor]:
    """Float32 in which the largest number is met early, late, step by step, or never."""
    x = torch.randn(40_003)
    late, rising, zeros = x.clone(), x.clone(), x.clone()
    late[-1] = 1e4
    rising *= 2.0 ** (torch.arange(40_003) // 9000 * 20 - 60)
    zeros[:20_000] = 0.0
    zeros[:9_000].neg_()
    return {
        "none": x[:0],
        "one": x[:1],
        "plain": x,
        "late": late,
        "falling": rising.flip(0),
        "rising": rising,
        "zeros first": zeros,
        "zeros": torch.zeros(9_001),
        "subnormal": x * 1e-40,
        "one subnormal": torch.full((3,), 1e-45),
        "beyond the smallest exponent": x[:100].sign() * 3e38,
        "infinite late": torch.cat([x, torch.tensor([math.inf])]),
        "nan": torch.cat([x[:7], torch.tensor([math.nan]), x]),
        "bits": random_bits(20_000),
    } | {f"2**{k}": torch.tensor([1.0, 2.0**k, -(2.0**k)]) for k in (-149, -127, -126, 0, 127)}


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "fp32")])
@pytest.mark.parametrize("case", fitting_cases())
def test_codes_that_fit_are_those_of_the_largest_magnitude(name: str, case: str) -> None:
    x = fitting_cases()[case]
    largest = float(x.abs().max()) if len(x) else 0.0
    expected = ALL_ZERO if largest == 0 else scale_exponent(largest, format_of(name))
    codes = torch.full((bytes_for(len(x), name),), 255, dtype=torch.uint8)
    assert kernels.encode_fitting_into(x, name, codes) == expected
    if expected not in (ALL_ZERO, NON_FINITE):
        again = torch.zeros_like(codes)
        kernels.encode_into(x, name, expected, again, threads=1)
        assert torch.equal(codes, again)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "fp32")])
def test_the_exponent_that_fits_at_every_border(name: str) -> None:
    midpoint, _ = format_of(name).overflow_threshold
    for exponent in range(-149, 128):
        border = torch.tensor(midpoint, dtype=torch.float64) * 2.0**exponent
        nearest = border.float().view(torch.int32)
        for magnitude in (nearest + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32):
            x = magnitude.view(1)
            codes = torch.empty(bytes_for(1, name), dtype=torch.uint8)
            expected = scale_exponent(float(x), format_of(name)) if x else ALL_ZERO
            assert kernels.encode_fitting_into(x, name, codes) == expected, float(x)


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "int8", "e2m1fn", "bf16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_decoded_past_the_caches_is_the_same(name: str, offset: int) -> None:
    numel = 2**18 + 1029
    codes = torch.randint(0, 256, (bytes_for(numel, name),), dtype=torch.uint8)
    out = torch.full((offset + numel + 1,), 7.0)
    kernels.decode_into(codes, name, 1, out[offset:-1], factor=0.3)
    part = 2**14  # of which the codes fill whole bytes
    for begin in range(0, numel, part):
        few = torch.empty(min(part, numel - begin))
        first = begin // part * bytes_for(part, name)
        kernels.decode_into(
            codes[first : first + bytes_for(len(few), name)], name, 1, few, factor=0.3
        )
        assert same(out[offset + begin : offset + begin + len(few)], few)
    assert out[-1] == 7
    assert offset == 0 or out[0] == 7


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "fp16", "int8"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 17, 20, 24, 32, 1000])
def test_many_numbers_in_blocks_of_any_size_are_decoded(name: str, block_size: int) -> None:
    numel = 2**18 + 5
    x = torch.randn(numel)
    exponents = torch.arange(-(-numel // block_size), dtype=torch.int32) % 5
    codes = encode(x, name, exponent=exponents, block_size=block_size)
    found = decode(codes, name, (numel,), exponent=exponents, block_size=block_size)
    scales = (2.0**exponents).repeat_interleave(block_size)[:numel]
    assert same(found, quantize(x * scales, name) / scales)


def test_fitting_needs_a_format_with_a_scale() -> None:
    x, codes = torch.ones(2), torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="fp32, which travels unscaled; use encode_into"):
        kernels.encode_fitting_into(x, "fp32", codes)
    with pytest.raises(ValueError, match="out has 8 elements; it must have 2"):
        kernels.encode_fitting_into(x, "e5m2", codes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("senders", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [1, 1003, 66_001])
def test_reduce_into_and_reduce_encode_into(name: str, senders: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(senders)
    size = bytes_for(numel, name)
    codes = [
        torch.randint(0, 256, (size,), generator=generator).to(torch.uint8) for _ in range(senders)
    ]  # NaN and infinity among them
    format = format_of(name)
    if not isinstance(format, ng.IntFormat) and format.has_infinity and not format.has_nan:
        for each in codes:
            each.bitwise_and_(0xEE)  # no infinities, whose difference would be a NaN
    exponents = [0] * senders if name == "fp32" else [3, -2, 0, 7][:senders]
    factor = 1 / senders
    total: torch.Tensor | None = None
    for each, exponent in zip(codes, exponents, strict=True):
        value = value_of(each, name, numel) * 2.0**-exponent
        total = value if total is None else total + value
    assert total is not None
    expected = total * torch.tensor(factor)
    out = torch.empty(numel)
    kernels.reduce_into(codes, name, exponents, out, factor=factor, threads=2)
    assert same(out, expected)
    again = torch.empty(size, dtype=torch.uint8)
    exponent_out = 0 if name == "fp32" else 1
    kernels.reduce_encode_into(
        codes, name, exponents, exponent_out, again, numel=numel, factor=factor, threads=2
    )
    if name == "fp32":
        assert same(again.view(torch.float32), expected)
    else:
        assert torch.equal(again, encode(expected * 2.0**exponent_out, name))
    if size * 8 % int(format.bits) == 0:
        without_count = torch.empty_like(again)
        kernels.reduce_encode_into(
            codes, name, exponents, exponent_out, without_count, factor=factor
        )
        assert torch.equal(without_count[:-1], again[:-1])


def test_largest_magnitudes() -> None:
    x = torch.randn(100_001)
    x[777], x[50_000] = -math.inf, math.nan
    for block_size in (None, 1, 7, 1000, 60_000, 200_000):
        size = block_size or len(x)
        expected = [(block.view(torch.int32) & 0x7FFFFFFF).max() for block in x.split(size)]
        for threads in (1, 2):
            result = kernels.largest_magnitudes(x, block_size, threads=threads)
            assert result.dtype == torch.int32
            assert torch.equal(result, torch.stack(expected))
    assert kernels.largest_magnitudes(torch.empty(0)).tolist() == [0]
    assert kernels.largest_magnitudes(torch.empty(0), 4).tolist() == []


def test_errors_of_the_raw_functions() -> None:
    x, codes = torch.ones(4), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="format is tf32; allowed: scalar formats of at most 16"):
        kernels.encode_into(x, "tf32", 0, codes)
    with pytest.raises(ValueError, match="exponent is 127; allowed: -126 to 126"):
        kernels.encode_into(x, "e5m2", 127, codes)
    with pytest.raises(ValueError, match="exponent is 1; fp32 travels unscaled"):
        kernels.decode_into(codes, "fp32", -1, x[:1])
    with pytest.raises(ValueError, match="out has 4 elements; it must have 2"):
        kernels.encode_into(x, "e2m1fn", 0, codes)
    with pytest.raises(ValueError, match=r"it must be contiguous torch.float32 on the CPU"):
        kernels.encode_into(torch.ones(8)[::2], "e5m2", 0, codes)
    with pytest.raises(ValueError, match="contains NaN, which e2m1fn cannot hold"):
        kernels.encode_into(torch.tensor([math.nan, 1.0]), "e2m1fn", 0, codes[:1])
    with pytest.raises(ValueError, match="there are 1 codes and 2 exponents"):
        kernels.reduce_into([codes], "e5m2", [0, 0], x)


# -- every level gives the same bits ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*UNUSUAL, *THEIRS, "tf32", "fp32"])
def test_bits_equal_those_of_reference(backend: str, name: str) -> None:
    x = torch.cat([edges()[::5], random_bits(3000), torch.randn(2003)])
    key = torch.tensor([-0x123456789ABCDEF])
    for each in (x, x.double()):
        for rounding in ROUNDINGS:
            expected = reference.quantize(each, grid_of(format_of(name).name), rounding, key)
            args = (each, format_of(name).name, rounding, None, key)
            result = torch.ops.narrowgauge.quantize(*args)
            kind = torch.int32 if each.dtype == torch.float32 else torch.int64
            assert torch.equal(result.view(kind), expected.view(kind)), rounding


# -- installations ---------------------------------------------------------------------------------


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def package() -> Path:
    return Path(ng.__file__).parent


def test_without_the_native_library(backend: str, package: Path, tmp_path: Path) -> None:
    if backend != "reference":
        pytest.skip("needs to be tried once")
    bare = tmp_path / "narrowgauge"
    shutil.copytree(package, bare, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = """
import sys, warnings
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)  # before the hook of an editable installation
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import narrowgauge, torch
    from narrowgauge import kernels
    result = narrowgauge.quantize(torch.tensor([3.3, 1e9]), "e5m2")
    narrowgauge.decode(narrowgauge.encode(result, "e2m1fn"), "e2m1fn")
ours = [str(w.message) for w in caught if "narrowgauge" in str(w.message)]
print(narrowgauge.__file__, kernels.backend(), kernels.available_backends(), result.tolist())
print(len(ours), *ours)
"""
    result = run(code, tmp_path, NARROWGAUGE_KERNELS="")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == f"{bare / '__init__.py'} reference ['reference'] [3.5, inf]"
    assert second == (
        "1 narrowgauge was installed without its native kernels, so the slow reference kernels in "
        "plain torch are in use. To get the fast ones, install it again where a C++17 compiler is "
        "found, in its source folder: pip install --force-reinstall --no-deps --no-cache-dir ."
    )


def test_the_variable_chooses(backend: str, package: Path) -> None:
    code = "from narrowgauge import kernels; print(kernels.backend())"
    result = run(code, package.parent, NARROWGAUGE_KERNELS=backend)
    assert result.stdout.strip() == backend, result.stderr


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels 'avx' are not available here; available: .*ref"):
        kernels.select("avx")


def test_result_does_not_depend_on_flushing_subnormals() -> None:
    x = torch.cat([edges(), random_bits(5000)])
    expected = [quantize(x, name) for name in ("e5m2", "e4m3fn", "fp16", "e3m0")]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = [quantize(x, name) for name in ("e5m2", "e4m3fn", "fp16", "e3m0")]
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(expected, flushed, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("name", ["e8m2ftz", "e7m3b127ftz"])
def test_subnormals_of_float32_are_below_the_smallest_number(name: str) -> None:
    x = torch.tensor([9e-39, 5.88e-39, 5.8774717e-39, 1e-45, -9e-39, 1.2e-38])
    grid, key = grid_of(name), torch.tensor([7])
    for rounding in ROUNDINGS:
        expected = reference.quantize(x, grid, rounding, key)
        args = (x, name, rounding, None, key)
        assert same(torch.ops.narrowgauge.quantize(*args), expected), rounding
        codes, _ = reference.encode(x, grid, rounding, key, None, 0)
        assert torch.equal(torch.ops.narrowgauge.encode(*args, None, 0), codes), rounding
    assert quantize(x[:1], name).item() == 2.0**-126


@pytest.mark.parametrize("threads", [0, -1, 1025, 100_000])
def test_a_number_of_threads_out_of_range_is_refused(threads: int) -> None:
    x, codes = torch.ones(4), torch.zeros(4, dtype=torch.uint8)
    calls = [
        lambda n: kernels.largest_magnitudes(x, threads=n),
        lambda n: kernels.encode_into(x, "e5m2", 0, codes, threads=n),
        lambda n: kernels.decode_into(codes, "e5m2", 0, x, threads=n),
        lambda n: kernels.reduce_into([codes], "e5m2", [0], x, threads=n),
        lambda n: kernels.reduce_encode_into([codes], "e5m2", [0], 0, codes, threads=n),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"threads is {threads}; allowed: 1 to 1024, or None"):
            call(threads)
        with pytest.raises(TypeError, match=r"threads is 2\.0; it must be an int or None"):
            call(2.0)


@pytest.mark.parametrize("name", ["e4m3", "e5m2ftz", "int4", "mxfp4"])
def test_the_default_device_changes_nothing(name: str) -> None:
    x, codes = torch.randn(70), torch.zeros(70, dtype=torch.uint8)
    table_of.cache_clear()
    native._described.cache_clear()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = torch.empty(70, dtype=torch.float64, device="cpu")
        packed = encode(x, name)
        kernels.reduce_encode_into([codes, codes], "e4m3", [0, 1], 3, codes)
        return [
            quantize(x, name, rounding="stochastic"),
            decode(packed, name, 70, out=out),
            encode(x, name, rounding="stochastic"),
            kernels.largest_magnitudes(x),
            codes,
            ng.matmul(x[None], x[:, None], accumulate="e5m2", rounding="stochastic"),
        ]

    with torch.device("meta"):
        first = run()
    for a, b in zip(first, run(), strict=True):
        assert a.device.type == "cpu"
        assert torch.equal(a, b)
