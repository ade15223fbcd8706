"""Every one of the 2**32 float32 numbers, rounded and encoded, against ml_dtypes, bit for bit.

The other tests sample; this leaves nothing out and takes minutes, so it is a script of its own:

    make exhaustive
    make exhaustive ARGS="--formats e5m2 --backend x86-64-v3"

ml_dtypes (numpy itself for fp16) converts each number to a code. ``encode`` must give the same
code, ``quantize`` the same number as that code stands for. Only NaN is compared otherwise: where
``quantize`` must give a NaN, any float32 NaN will do; and a NaN given to ``encode`` must become the
format's one quiet NaN without sign, where ml_dtypes keeps the sign. (A NaN that stands for an
overflow, as in e4m3fn, has the number's sign in both.)

The exit status is 0 if all are equal, 1 if not (the first differences are printed), 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from narrowgauge import encode, kernels, quantize

# What ml_dtypes makes of a number beyond the largest: an infinity, else NaN.
FORMATS: dict[str, tuple[npt.DTypeLike, str]] = {
    "e5m2": (ml_dtypes.float8_e5m2, "infinity"),
    "e4m3": (ml_dtypes.float8_e4m3, "infinity"),
    "e3m4": (ml_dtypes.float8_e3m4, "infinity"),
    "e4m3fn": (ml_dtypes.float8_e4m3fn, "nan"),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, "nan"),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, "nan"),
    "bf16": (ml_dtypes.bfloat16, "infinity"),
    "fp16": (np.float16, "infinity"),
}
DEFAULT = [name for name in FORMATS if name != "fp16"]  # numpy takes longer than all the others
CHUNK = 1 << 20  # its buffers stay in the processor's caches
SHOWN = 10


class Difference(NamedTuple):
    """One number on which we and they differ."""

    function: str
    bits: int  # of the float32
    ours: int
    theirs: int

    def __str__(self) -> str:
        x = np.uint32(self.bits).view(np.float32)
        if self.function == "encode":
            return f"encode(0x{self.bits:08x} = {x}): {self.ours:#x}, they say {self.theirs:#x}"
        ours, theirs = (np.uint32(each).view(np.float32) for each in (self.ours, self.theirs))
        return f"quantize(0x{self.bits:08x} = {x}): {ours}, they say {theirs}"


def compare(
    name: str, ranges: Sequence[range], advance: Callable[[int], None], stop: threading.Event
) -> tuple[int, list[Difference]]:
    """How many results differ on numbers given by their bits, and the first of them.

    Args:
        name: of the format.
        ranges: of bits, each at most ``CHUNK`` long.
        advance: called with the number of numbers after each range.
        stop: when set, the rest is left out.
    """
    torch.set_num_threads(1)  # holds for the calling thread; the ranges are what is shared out
    dtype, overflow = FORMATS[name]
    code = np.dtype(f"u{np.dtype(dtype).itemsize}")
    values = np.arange(1 << 8 * code.itemsize).astype(code).view(dtype).astype(np.float32)
    quiet = np.array(np.nan, dtype).view(code)

    counting = np.arange(CHUNK, dtype=np.uint32)
    bits, their_bits = np.empty_like(counting), np.empty_like(counting)
    their_codes = np.empty(CHUNK, code)
    x = torch.from_numpy(bits.view(np.float32))
    rounded, packed = torch.empty(CHUNK), torch.empty(CHUNK * code.itemsize, dtype=torch.uint8)

    count, found = 0, []
    with np.errstate(all="ignore"):
        for each in ranges:
            if stop.is_set():
                break
            n = len(each)
            np.add(counting[:n], np.uint32(each.start), out=bits[:n])
            number = bits[:n].view(np.float32)
            np.copyto(their_codes[:n].view(dtype), number, casting="unsafe")
            np.take(values.view(np.uint32), their_codes[:n], out=their_bits[:n], mode="clip")
            their_codes[:n][np.isnan(number)] = quiet
            quantize(x[:n], name, overflow=overflow, out=rounded[:n])
            encode(x[:n], name, overflow=overflow, out=packed[: n * code.itemsize])
            for function, ours, expected in (
                ("quantize", rounded[:n].numpy().view(np.uint32), their_bits[:n]),
                ("encode", packed[: n * code.itemsize].numpy().view(code), their_codes[:n]),
            ):
                if np.array_equal(ours, expected):
                    continue
                different = ours != expected
                if function == "quantize":
                    both = np.isnan(ours.view(np.float32)) & np.isnan(expected.view(np.float32))
                    different &= ~both
                (where,) = different.nonzero()
                count += len(where)
                for i in where[:SHOWN]:
                    found.append(Difference(function, int(bits[i]), int(ours[i]), int(expected[i])))
                found = found[: 2 * SHOWN]
            advance(n)
    return count, found


def check(
    name: str, numbers: range, threads: int, advance: Callable[[int], None]
) -> tuple[int, list[Difference]]:
    """:func:`compare` on several threads; the kernels and the casts of ml_dtypes run in parallel.

    Raises:
        KeyboardInterrupt: after the threads have ended.
    """
    ranges = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    stop = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        try:
            parts = [
                pool.submit(compare, name, ranges[i::threads], advance, stop)
                for i in range(threads)
            ]
            results = [part.result() for part in parts]
        finally:  # Ctrl-C, or a thread failed: the others need not go on
            stop.set()
    differences = sorted(each for _, found in results for each in found)
    return sum(count for count, _ in results), differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every format; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=DEFAULT)
    parser.add_argument("--backend", choices=kernels.available_backends())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--first", type=lambda text: int(text, 0), default=0, help="float32's bits")
    parser.add_argument("--count", type=lambda text: int(text, 0), default=1 << 32)
    options = parser.parse_args(arguments)
    numbers = range(1 << 32)[options.first : options.first + options.count]
    before = kernels.backend()
    if options.backend:
        kernels.select(options.backend)
    console = Console(highlight=False)
    console.print(
        f"{len(numbers):,} float32 numbers, {options.threads} threads, {kernels.backend()}, "
        f"ml_dtypes {ml_dtypes.__version__}"
    )
    failed = False
    begin = time.perf_counter()
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    try:
        with Progress(*columns, console=console) as progress:
            for name in options.formats:
                task = progress.add_task(name.ljust(8), total=len(numbers))
                count, differences = check(
                    name, numbers, options.threads, lambda n, task=task: progress.advance(task, n)
                )
                failed |= count > 0
                console.print(f"{name}: {count:,} differences" if count else f"{name}: all equal")
                for each in differences[:SHOWN]:
                    console.print(f"  {each}")
    except KeyboardInterrupt:
        console.print("Stopped; what is not listed above was not checked.")
        return 130
    finally:
        kernels.select(before)
    console.print(f"{time.perf_counter() - begin:.0f} seconds")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
