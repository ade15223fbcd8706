"""Run a function on real Gloo ranks, each a process of its own, with a deadline.

Ranks are forked from a server that has imported torch already, so that starting four of them takes
a fraction of a second. A rank that raises, dies or hangs fails the test with the output of all.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "narrowgauge"])


class Raised:
    """What a rank raised, when the test expects that."""

    def __init__(self, error: BaseException) -> None:
        self.type_name = type(error).__name__
        self.message = str(error)
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"{self.type_name}: {self.message}"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 60.0,
    catch: bool = False,
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank and return the results in rank order.

    With ``catch``, an exception becomes a :class:`Raised` and a dead rank becomes ``None``.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        processes = [
            _context.Process(
                target=_rank_main,
                args=(function, arguments, rank, world_size, directory, catch),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        results: list[Any] = []
        for rank in range(world_size):
            path = folder / f"result-{rank}"
            results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        assert not hung, f"ranks {hung} did not end within {timeout} s; results: {results}"
        if not catch:
            for rank, (process, result) in enumerate(zip(processes, results, strict=True)):
                assert process.exitcode == 0, f"rank {rank} died with code {process.exitcode}"
                assert not isinstance(result, Raised), f"rank {rank}: {result}"
        return results


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    directory: str,
    catch: bool,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    begin = time.monotonic()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        begin = time.monotonic()
        result = function(*arguments)
        if not catch:
            dist.barrier()  # nobody leaves while others still need its messages
    except Exception as error:
        raised = Raised(error)
        raised.message += "\n" + traceback.format_exc()
        raised.seconds = time.monotonic() - begin
        result = raised
    (Path(directory) / f"result-{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)  # a peer may be dead: destroying the groups could wait for it
