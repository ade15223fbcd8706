from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import torch

from tests import exhaustive

AROUND_NAN = ["--first", "0x7f7ff000", "--count", "0x2000"]
AROUND_ONE = ["--first", "0x3f7ff000", "--count", "0x2000", "--formats", "e4m3", "bf16"]


@pytest.mark.parametrize("first", ["0x0", "0x37000000", "0x43700000", "0x7f7ff000", "0xff7ff000"])
def test_a_part_is_equal(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--formats", *exhaustive.FORMATS]
    assert exhaustive.main(["--first", first, "--count", "0x2000", *formats]) == 0
    assert capsys.readouterr().out.count("all equal") == len(exhaustive.FORMATS)


@pytest.mark.parametrize("function", ["quantize", "encode"])
@pytest.mark.parametrize("format", ["e4m3", "bf16"])
def test_one_wrong_bit_is_found(
    function: str,
    format: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right: Callable[..., torch.Tensor] = getattr(exhaustive, function)

    def wrong(x: torch.Tensor, name: str, *, out: torch.Tensor, **options: str) -> torch.Tensor:
        right(x, name, out=out, **options)
        if name == format:
            here = (x.view(torch.int32) == 0x3F800123).nonzero().item()
            bytes_each = out.numel() * out.element_size() // x.numel()
            out.view(torch.uint8)[here * bytes_each] ^= 1
        return out

    monkeypatch.setattr(exhaustive, function, wrong)
    assert exhaustive.main(AROUND_ONE) == 1
    printed = capsys.readouterr().out
    assert f"{format}: 1 differences" in printed
    assert f"{function}(0x3f800123 = " in printed
    assert printed.count("all equal") == 1


def test_a_lost_nan_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = exhaustive.quantize

    def wrong(x: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        return right(x, *given, **options).masked_fill_(x.isnan(), 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(exhaustive, "quantize", wrong)
    assert exhaustive.main(["--formats", "e5m2", *AROUND_NAN]) == 1
    assert "e5m2: 4,095 differences" in capsys.readouterr().out


def test_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = exhaustive.quantize
    calls: list[int] = []

    def interrupted(x: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        calls.append(len(x))
        if len(calls) == 10:
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)
        return right(x, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exhaustive, "quantize", interrupted)
    # What runs in the background may have been started with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert exhaustive.main(["--formats", "e5m2"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert sum(calls) < 1 << 31
    assert "Stopped" in capsys.readouterr().out
