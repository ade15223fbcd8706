"""Feeds whose source, ranks or user fail: all ranks raise, say why, and leave nothing behind."""

from __future__ import annotations

import _thread
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from narrowgauge import Feed
from narrowgauge.inputs import FeedError
from tests.feed_data import Broken, Killed, Numbers
from tests.ranks import Raised, run_ranks
from tests.test_feed import feed_threads

ROOT = Path(__file__).parent.parent
CAN_LIMIT = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
Source = Literal["shard", "rank0"]


def children() -> list[str]:
    """Processes of loaders that are left behind, after a moment to end."""
    deadline = time.monotonic() + 8
    while True:
        found = [child.name for child in multiprocessing.active_children()]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def shared_memory() -> set[str]:
    """Pieces of shared memory that torch made and nobody removed yet."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def forked(workers: int) -> dict[str, Any]:
    """Arguments of a loader with workers as they start by default before Python 3.14."""
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def caught_from(loader: Any, timeout: float = 20.0, **arguments: Any) -> dict[str, Any]:
    """What a loop over a feed raises here, when, and what it leaves behind."""
    before = shared_memory()
    feed = Feed(loader, timeout=timeout, **arguments)
    seen: list[int] = []
    result: dict[str, Any] = {"type": None, "text": "", "seconds": 0.0}
    begin = time.monotonic()
    try:
        for batch in feed:
            seen += batch.flatten().tolist()
    except Exception as error:
        result |= {"type": type(error).__name__, "text": str(error)}
    result["seconds"] = time.monotonic() - begin
    feed.close()
    result |= {"seen": seen, "threads": feed_threads(), "children": children()}
    return result | {"shared": sorted(shared_memory() - before)}


def read_broken(source: Source, workers: int) -> dict[str, Any]:
    loader = DataLoader(Broken(40), batch_size=6, **forked(workers))
    return caught_from(loader, source=source)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", ["rank0", "shard"])
def test_an_error_in_the_data_is_raised_everywhere_in_its_own_words(
    source: Source, workers: int
) -> None:
    results = run_ranks(read_broken, 3, source, workers)
    reader = 0 if source == "rank0" else 1  # who reads sample 20 of the fourth batch
    for rank, result in enumerate(results):
        assert "sample 20 is torn" in result["text"]
        if rank == reader:
            assert result["type"] == "ValueError"
        else:
            assert result["type"] == "FeedError"
            assert f"rank {reader} failed: ValueError: " in result["text"]
            assert 'feed_data.py", line' in result["text"]  # the traceback
            assert "in __getitem__" in result["text"]
        assert result["seen"] == [n for n in range(18) if n % 6 // 2 == rank for _ in range(4)]
        if not workers:
            assert result["seconds"] < 1
        assert result["threads"] == result["children"] == result["shared"] == []


def read_killed(source: Source) -> dict[str, Any]:
    return caught_from(DataLoader(Killed(40), batch_size=4, **forked(2)), source=source)


@pytest.mark.parametrize("source", ["rank0", "shard"])
def test_a_killed_loader_worker_is_an_error_on_all_ranks(source: Source) -> None:
    for result in run_ranks(read_killed, 2, source):
        assert "DataLoader worker" in result["text"]
        assert result["seconds"] < 20
        assert result["threads"] == result["children"] == result["shared"] == []


def die(source: Source, victim: int, blow: int, timeout: float = 4) -> None:
    feed = Feed(DataLoader(Numbers(400), batch_size=4), source=source, timeout=timeout)
    for _ in feed:
        assert feed.batch is not None
        if feed.batch.number == 5 and dist.get_rank() == victim:
            os.kill(os.getpid(), blow)


@pytest.mark.parametrize(("source", "victim"), [("rank0", 0), ("rank0", 2), ("shard", 1)])
def test_a_killed_rank_is_an_error_on_all_others(source: Source, victim: int) -> None:
    results = run_ranks(die, 3, source, victim, signal.SIGKILL, catch=True)
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            assert isinstance(result, Raised)
            assert result.type_name in ("CollectiveError", "FeedError")
            assert result.seconds < 4
    named = [f"rank {victim}" in result.message for result in results if result is not None]
    assert any(named)  # a third rank may see first that the second one gave up


def stop_process(victim: int) -> None:
    if dist.get_rank() == victim:
        pid = os.getpid()
        waker = multiprocessing.get_context("fork").Process(target=_wake, args=(pid,))
        waker.start()
    die("rank0", victim, signal.SIGSTOP, timeout=1)


def _wake(pid: int) -> None:
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_an_error_within_the_timeout(victim: int) -> None:
    results = run_ranks(stop_process, 2, victim, catch=True)
    other = results[1 - victim]
    assert isinstance(other, Raised)
    assert f"rank {victim}" in other.message
    assert 0.9 < other.seconds < 2.9


class Hanging(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 20:
            time.sleep(2.5)
        return index


def read_hanging(source: Source) -> dict[str, Any]:
    return caught_from(DataLoader(Hanging(40), batch_size=4), timeout=1, source=source)


@pytest.mark.parametrize("source", ["rank0", "shard"])
def test_a_source_that_hangs_is_an_error_on_all_ranks(source: Source) -> None:
    for result in run_ranks(read_hanging, 2, source):
        assert "the source gave no batch 5 within 1 s" in result["text"]
        assert 0.9 < result["seconds"] < 2.4


def settings_differ(name: str) -> None:
    values: dict[str, Any] = {"depth": 3, "tail": "pad", "source": "rank0", "timeout": 9}
    own = {name: values[name]} if dist.get_rank() == 1 else {}
    Feed(DataLoader(Numbers(40), batch_size=4), **{"timeout": 8, **own})


@pytest.mark.parametrize("name", ["depth", "tail", "source", "timeout"])
def test_ranks_with_other_settings_all_raise(name: str) -> None:
    for result in run_ranks(settings_differ, 2, name, catch=True):
        assert isinstance(result, Raised)
        assert result.type_name == "CollectiveError"
        assert f"{name} is " in result.message
        assert "All ranks must use the same settings" in result.message


def one_refuses() -> None:
    Feed(DataLoader(Numbers(40), batch_size=4), depth=dist.get_rank(), timeout=8)


def test_arguments_that_one_rank_refuses_are_an_error_on_all() -> None:
    for result in run_ranks(one_refuses, 2, catch=True):
        assert isinstance(result, Raised)
        assert "depth is 0; allowed: whole numbers from 1" in result.message


def read_differently(what: str) -> dict[str, Any]:
    mine = dist.get_rank() == 1
    if what == "order":
        order = reversed(range(40)) if mine else range(40)
        loader = DataLoader(Numbers(40), batch_size=4, sampler=list(order))
    elif what == "length":
        loader = DataLoader(Numbers(36 if mine else 40), batch_size=4)
    else:
        loader = DataLoader(Numbers(40), batch_size=8 if mine else 4)
    return caught_from(loader, timeout=8, source="shard")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "the digest of the samples so far is "),
        ("length", "the source of ranks [1] is at its end, that of ranks [0] is not"),
        ("batch", "the number of samples so far is 8 on rank 1, 4 on rank 0"),
    ],
)
def test_ranks_that_read_different_data_all_raise(what: str, words: str) -> None:
    for result in run_ranks(read_differently, 2, what):
        assert result["type"] == "FeedError"
        assert words in result["text"]
        assert result["threads"] == []


def fail_on_device(rank: int) -> dict[str, Any]:
    def brittle(batch: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == rank and int(batch.max()) > 16:
            raise ArithmeticError("the device is full")
        return batch

    loader = DataLoader(Numbers(80), batch_size=4)
    return caught_from(loader, source="rank0", on_device=brittle, timeout=8)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_the_device_of_one_rank_is_raised_on_all(rank: int) -> None:
    for number, result in enumerate(run_ranks(fail_on_device, 2, rank)):
        assert result["type"] == ("ArithmeticError" if number == rank else "FeedError")
        assert "the device is full" in result["text"]
        assert len(result["seen"]) == 8
        assert result["seconds"] < 2
        assert result["threads"] == []


class Liar(Numbers):
    def __len__(self) -> int:
        return self.count + 10

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(f"sample {index} does not exist")
        return index


def uneven() -> Iterator[Any]:
    yield torch.ones(4, 2), torch.ones(4)
    yield torch.ones(4, 2), torch.ones(5)


def nothing() -> Iterator[Any]:
    yield 0.5


def bad_source(kind: str) -> dict[str, Any]:
    loader: Any = {
        "liar": lambda: DataLoader(Liar(10), batch_size=4),
        "uneven": uneven,
        "nothing": nothing,
        "sparse": lambda: iter([torch.eye(4).to_sparse()]),
        "lock": lambda: iter([(torch.ones(2), threading.Lock())]),
    }[kind]()
    if kind == "uneven":
        loader = (x if len(x) == 4 and len(y) == 4 else (x, y) for x, y in loader)
    return caught_from(loader, timeout=8, source="rank0")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("liar", "sample 10 does not exist"),
        ("uneven", "batch[1] has shape (5,), but the batch holds 4 samples"),
        ("nothing", "the source gave a float, which has no tensor with a dimension"),
        ("sparse", "batch is a tensor (torch.sparse_coo"),
        ("lock", "cannot pickle"),
    ],
)
def test_what_a_source_gives_wrongly_is_an_error_on_all_ranks(kind: str, words: str) -> None:
    for result in run_ranks(bad_source, 2, kind):
        assert words in result["text"]
        assert result["seconds"] < 2
        assert result["threads"] == []


def endless() -> tuple[int, list[str]]:
    def numbers() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(6)

    count = 0
    feed = Feed(numbers(), source="rank0", timeout=8)
    for _ in feed:
        count += 1
        if count == 7:
            break
    feed.close()
    return count, feed_threads()


def test_a_generator_that_never_ends_ends_with_the_loop() -> None:
    assert run_ranks(endless, 2) == [(7, [])] * 2


def interrupt(rank: int) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    feed = Feed(DataLoader(Hanging(40), batch_size=4), source="rank0", timeout=30)
    begin = time.monotonic()
    if dist.get_rank() == rank:
        threading.Timer(0.5, _thread.interrupt_main).start()
    text = ""
    try:
        for _ in feed:
            pass
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    except FeedError as error:
        text = str(error)
    seconds = time.monotonic() - begin
    feed.close()
    return {"text": text, "seconds": seconds}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_rank_ends_all(rank: int) -> None:
    for number, result in enumerate(run_ranks(interrupt, 2, rank)):
        if number == rank:
            assert result["text"] == "KeyboardInterrupt"
        else:
            assert f"rank {rank} failed: KeyboardInterrupt" in result["text"]
        assert result["seconds"] < 8


def fail_in_the_loop() -> tuple[int, str]:
    feed = Feed(DataLoader(Numbers(80), batch_size=4), source="rank0", timeout=8)
    count, text = 0, ""
    try:
        for _ in feed:
            count += 1
            if count == 3 and dist.get_rank() == 1:
                raise OSError("disk full")
    except OSError as error:
        text = str(error)
    again = len(list(feed))  # and the feed can be used again
    return count + again, text


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_the_loop_of_one_rank_leaves_nobody_waiting() -> None:
    assert run_ranks(fail_in_the_loop, 2) == [(23, ""), (23, "disk full")]


def iterate_after_an_error() -> tuple[str, int]:
    feed = Feed(DataLoader(Broken(8), batch_size=4, sampler=Sometimes()), source="rank0", timeout=8)
    try:
        list(feed)
    except (ValueError, FeedError) as error:
        text = str(error)
    return text, len(list(feed))


class Sometimes(torch.utils.data.Sampler[int]):
    """Gives the broken sample in the first epoch only."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([n for n in range(8) if n != 4 or self.epoch == 0])


def test_a_feed_can_be_iterated_after_an_error() -> None:
    for text, batches in run_ranks(iterate_after_an_error, 2):
        assert "sample 4 is torn" in text
        assert batches == 2


def leave_without_closing(kind: str) -> None:
    feed = Feed(DataLoader(Numbers(4000), batch_size=4, num_workers=1), source="rank0", timeout=8)
    iterator = iter(feed)
    for _ in range(3):
        next(iterator)
    if kind == "exception":
        raise RuntimeError("over")


@pytest.mark.parametrize("kind", ["end", "exception"])
def test_a_program_that_ends_amid_an_iteration_ends(kind: str) -> None:
    script = (
        "import sys; from tests import test_feed_faults\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0?rank=0&world_size=1')\n"
        f"test_feed_faults.leave_without_closing({kind!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if kind == "exception" else 0), done.stderr
    assert ("RuntimeError: over" in done.stderr) == (kind == "exception")


CUT_OFF = """
import json, os, subprocess, time
import torch.distributed as dist
from torch.utils.data import DataLoader
from narrowgauge import Feed
from tests.feed_data import Numbers

dist.init_process_group("gloo")
rank = dist.get_rank()
begin = error = None
feed = Feed(DataLoader(Numbers(4000), batch_size=6), source="rank0", timeout=2)
try:
    for part in feed:
        if feed.batch.number == 4:
            begin = time.monotonic()
            if rank == 1:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        if feed.batch.number > 4:
            time.sleep(0.1)
except RuntimeError as raised:
    error = f"{type(raised).__name__}: {raised}"
line = {"rank": rank, "error": error, "seconds": time.monotonic() - begin}
os.write(1, (json.dumps(line) + "\\n").encode())  # in one piece
os._exit(0)
"""


@pytest.mark.skipif(not CAN_LIMIT, reason="network namespaces need root and iproute2 (ip and tc)")
def test_a_rank_that_is_cut_off_is_an_error_on_all_ranks() -> None:
    network = ["bash", str(ROOT / "benchmarks" / "network.sh"), "3", "1gbit"]
    done = subprocess.run(
        [*network, sys.executable, "-c", CUT_OFF],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 3, done.stderr[-2000:]
    for line in lines:
        assert line["error"] is not None
        assert line["seconds"] < 10
    assert any("rank 1: no answer within 2 s" in line["error"] for line in lines)
