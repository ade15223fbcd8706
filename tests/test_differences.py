"""Differences in blocks: every implementation gives the bits of a slow independent one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.formats import IntFormat, format_of, table_of
from narrowgauge.kernels import backends
from narrowgauge.kernels.differences import (
    ESCAPED,
    apply_difference,
    difference_blocks,
    difference_sizes,
    encode_difference,
)
from tests.numbers_by_hand import edges, random_bits

# numpy's, of infinities and NaN in Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

FORMATS = ["int8", "int4", "bf16", "e4m3", "e5m2", "e4m3fn", "fp16", "int3", "e2m1fn", "e3m5"]


@pytest.fixture(params=[*backends.available_backends(), "triton"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Each backend in turn, for tensors on the CPU."""
    before, name = backends.current().name, request.param
    if name == "triton":
        pytest.importorskip("triton")
        from narrowgauge.kernels.triton import Triton, launch

        monkeypatch.setattr(launch, "_TILE", 4096)  # the interpreter's time goes into steps
        if torch.cuda.is_available():
            pytest.skip("tensors on the CPU are for the interpreter")
        backends._current = Triton()  # type: ignore[assignment]
    else:
        backends.select(name)
    yield name
    backends.select(before)


def by_hand(master: Tensor, replica: Tensor, name: str, size: int) -> list[int]:
    """Per number the code, and per block the scale, by trying all codes and powers of two."""
    format = format_of(name)
    assert not isinstance(format, ng.BlockFormat)
    values = table_of(format).double()
    finite = [c for c in range(len(values)) if math.isfinite(values[c])]
    even = torch.tensor([c for c in finite if c % 2 == 0] + [c for c in finite if c % 2])
    table = values[even]  # the first of two that are equally near is the even one
    difference = (master - replica).double()
    codes, scales = [], []
    for begin in range(0, len(master), size):
        d = difference[begin : begin + size]
        largest, k = float(d.abs().max()), 0
        if not math.isfinite(largest):
            scales.append(ESCAPED)
            codes += [0] * len(d)
            continue
        if largest:
            below_the_top = table[table < table.max()].max()
            top = table.max() + (table.max() - below_the_top) / 2
            fitting = [127]
            for k in range(-127, 128):
                scaled = largest * 2.0**k
                if scaled > top or (scaled == top and int(even[table.argmax()]) % 2):
                    fitting.append(k - 1)
            k = min(fitting)
        scales.append(127 - k)
        nearest = (d[:, None] * 2.0**k - table).abs()
        chosen = even[nearest.argmin(1)]
        for number, code in zip(d, chosen, strict=True):
            zero = values[code] == 0
            if zero and not isinstance(format, IntFormat):
                negative = bool(torch.signbit(number)) and format.has_negative_zero
                code = torch.tensor(2 ** (format.bits - 1) if negative else 0)
            codes.append(int(code))
    return [*scales, *codes]


def unpacked(message: Tensor, numel: int, bits: int, blocks: int) -> list[int]:
    stream = int.from_bytes(bytes(message[blocks:].tolist()), "little")
    return message[:blocks].tolist() + [stream >> (n * bits) & (2**bits - 1) for n in range(numel)]


def cases() -> list[tuple[Tensor, Tensor]]:
    """Numbers as training has them, every kind of bits, and ties."""
    torch.manual_seed(0)
    master = torch.randn(1000)
    near = master + 1e-4 * torch.randn(1000)
    wild = random_bits(1500)
    wild[300:700].nan_to_num_(1.0, 2.0, -2.0)
    finite = wild.clone().nan_to_num_(0.0, 1.0, -1.0)
    ties = (torch.arange(512) - 256) / 2.0
    ties[::256] = 127.5
    small = torch.cat([edges()[:200], torch.zeros(100), random_bits(300).mul(1e-30)])
    small = small.clamp(-1e-38, 1e-38).nan_to_num_(0.0)
    return [
        (master, near),
        (wild, torch.zeros(1500)),
        (finite, finite.flip(0)),
        (ties, torch.zeros(512)),
        (small, -small.flip(0)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(17), torch.zeros(17)),
    ]


@pytest.mark.parametrize("name", [name for name in FORMATS if format_of(name).bits <= 9])
def test_encodes_and_applies_what_is_found_by_trying_all(implementation: str, name: str) -> None:
    size = 32
    blocks = difference_blocks(name, size)
    for master, replica in cases():
        numel = master.numel()
        message = torch.full((sum(difference_sizes(numel, blocks)),), 85, dtype=torch.uint8)
        escaped = encode_difference(master, replica, blocks, message)
        count = difference_sizes(numel, blocks)[0]
        expected = by_hand(master, replica, name, size)
        assert unpacked(message, numel, blocks.grid.bits, count) == expected
        assert escaped == expected[:count].count(ESCAPED)
        after = replica.clone()
        apply_difference(message, blocks, after)
        scales = torch.tensor(expected[:count]).repeat_interleave(size)[:numel]
        values = table_of(format_of(name))[torch.tensor(expected[count:], dtype=torch.int64)]  # type: ignore[arg-type]
        change = (values.double() * torch.exp2(scales.double() - 127)).float()
        change[scales == ESCAPED] = 0.0
        wanted = replica + change
        same = (after.view(torch.int32) == wanted.view(torch.int32)) | (
            after.isnan() & wanted.isnan()
        )
        assert bool(same.all())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sixteen_bits_are_those_of_ml_dtypes(implementation: str, name: str) -> None:
    """numpy subtracts, ml_dtypes (numpy itself for fp16) rounds; none of our own code is asked."""
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bf16" else np.float16)
    size = 32
    blocks = difference_blocks(name, size)
    torch.manual_seed(3)
    base = torch.randn(1024)
    ties = (1.0 + torch.arange(1024) * 2.0**-12) * torch.tensor([1.0, -1.0]).repeat(512)
    ties[::size] = 65519.996 if name == "fp16" else 1e30  # the last number that fits, and the rest
    spread = base * 10.0 ** torch.randint(-12, 12, (1024,))
    for master, replica in (
        (base, base + 1e-4 * torch.randn(1024)),
        (base, torch.zeros(1024)),
        (spread, spread.flip(0)),
        (ties, torch.zeros(1024)),
        (torch.zeros(1024), torch.zeros(1024)),
    ):
        difference = (master.numpy() - replica.numpy()).reshape(-1, size)
        exponents = np.zeros((len(difference), 1))
        if name == "fp16":  # the largest power of two under which no number rounds to infinity
            largest = np.abs(difference).max(1, keepdims=True).astype(np.float64)
            exponents = np.floor(np.log2(65520.0 / np.where(largest > 0, largest, 65519.0)))
            exponents -= largest * 2.0**exponents >= 65520.0
            exponents = np.where(largest > 0, np.minimum(exponents, 127), 0.0)
        codes = (difference.astype(np.float64) * 2.0**exponents).astype(np.float32).astype(dtype)
        message = torch.zeros(sum(difference_sizes(1024, blocks)), dtype=torch.uint8)
        assert encode_difference(master, replica, blocks, message) == 0
        found = message.numpy()
        assert (found[: len(difference)] == 127 - exponents.flatten()).all()
        assert (found[len(difference) :].view(np.uint16) == codes.flatten().view(np.uint16)).all()
        change = (codes.astype(np.float64) * 2.0**-exponents).astype(np.float32).flatten()
        after = replica.clone()
        apply_difference(message, blocks, after)
        assert (after.numpy() == replica.numpy() + change).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bits_equal_those_of_the_reference(implementation: str, name: str) -> None:
    threads = (1,) if implementation in ("triton", "reference") else (1, 3)
    sizes = (16,) if implementation == "triton" else (16, 256, 1024)
    for size, tolerance in itertools.product(sizes, (math.inf, 1e-3, 0.0)):
        blocks = difference_blocks(name, size)
        for master, replica in cases():
            reference = backends.Reference()
            bytes_of = difference_sizes(master.numel(), blocks)
            wanted, wanted_after = torch.empty(sum(bytes_of), dtype=torch.uint8), replica.clone()
            scales, codes = wanted.split(bytes_of)
            wanted_escaped = reference.encode_difference(
                master, replica, scales, codes, blocks, tolerance, 1
            )
            reference.apply_difference(scales, codes, wanted_after, blocks, 1)
            for count in threads:
                message, after = torch.full_like(wanted, 85), replica.clone()
                escaped = encode_difference(
                    master, replica, blocks, message, tolerance=tolerance, threads=count
                )
                apply_difference(message, blocks, after, threads=count)
                assert escaped == wanted_escaped
                assert message.equal(wanted)
                same = after.view(torch.int32) == wanted_after.view(torch.int32)
                assert bool((same | (after.isnan() & wanted_after.isnan())).all())


@pytest.mark.parametrize("name", ["int8", "int4", "e4m3", "e5m2"])
def test_bytes_are_those_of_the_block_format(implementation: str, name: str) -> None:
    torch.manual_seed(1)
    master, replica = torch.randn(5000), torch.randn(5000)
    blocks = difference_blocks(name, 64)
    message = torch.zeros(sum(difference_sizes(5000, blocks)), dtype=torch.uint8)
    encode_difference(master, replica, blocks, message)
    coded = ng.encode(master - replica, f"{name}@64")
    assert message.equal(coded.data)


def test_what_rounding_may_change_is_kept_within_the_tolerance() -> None:
    torch.manual_seed(2)
    for name in FORMATS:
        for scale in (1e-6, 1e-3, 1.0):
            master = torch.randn(4096)
            replica = master + scale * torch.randn(4096)
            blocks = difference_blocks(name, 128)
            message = torch.zeros(sum(difference_sizes(4096, blocks)), dtype=torch.uint8)
            encode_difference(master, replica, blocks, message, tolerance=1e-3)
            apply_difference(message, blocks, replica)
            error = (master - replica).abs().view(-1, 128).amax(1)
            kept = message[:32] != ESCAPED
            assert bool((error <= 1.001e-3 * master.abs().view(-1, 128).amax(1))[kept].all())


def test_unfit_formats_and_blocks_are_refused() -> None:
    for name, text in (
        ("fp32", "signed formats of at most 16 bits"),
        ("e8m0", "signed formats"),
        ("mxfp8_e4m3", "rule 'fit'"),
        ("nvfp4", "rule 'fit'"),
        ("int8@48", "a block has 48 numbers; allowed: powers of two from 16 to 1024"),
    ):
        with pytest.raises(ValueError, match=text):
            difference_blocks(name)
    for size in (8, 2048, True, 2.0):
        with pytest.raises(ValueError, match="a block has"):
            difference_blocks("int8", size)  # type: ignore[arg-type]
