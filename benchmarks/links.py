"""What the benchmarks share: ranks behind links of a known rate, a clock and a byte counter."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

HERE = Path(__file__).resolve().parent
BITS_PER_SECOND = {"10gbit": 1e10, "1gbit": 1e9, "100mbit": 1e8}


def wide_console() -> Console:
    """A console whose tables are not squeezed into 80 columns when the output goes to a file."""
    return Console(width=max(120, Console().width))


def possible(rates: list[str], console: Console) -> list[str]:
    """Those of ``rates`` that can be had here; it says so if these are not all."""
    if os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip"):
        return rates
    console.print("Limited links need root and iproute2; only the loopback is measured.")
    return [rate for rate in rates if rate == "loopback"]


def run_ranks(script: str, ranks: str, rate: str, *arguments: str) -> dict[str, Any]:
    """Run ``script --worker`` on ranks (as network.sh takes them); what rank 0 hands in."""
    command = [
        *("bash", str(HERE / "network.sh"), ranks, rate),
        *(sys.executable, script, "--worker", *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the ranks failed with code {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def hand_in(result: dict[str, Any]) -> NoReturn:
    """End this rank; ``run_ranks`` returns the result of rank 0."""
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


def ends() -> int:
    """Ends of the network: hosts; on the loopback ranks."""
    ranks = dist.get_world_size()
    return ranks if on_loopback() else ranks // int(os.environ["LOCAL_WORLD_SIZE"])


def on_loopback() -> bool:
    """Whether the link is not limited."""
    return os.environ["LINK_RATE"] == "loopback"


def sent_bytes() -> int:
    """Bytes the interface of this host has sent so far, by its own counter."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def timed(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the slowest rank, all having begun together; bytes that this end sent meanwhile.

    Among the bytes are those of this function's own messages: about 1 KB.
    """
    dist.barrier()
    bytes_before = sent_bytes()
    dist.barrier()  # nobody sends before everybody has read the counter
    begin = time.perf_counter()
    run()
    elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    # Behind the data in the link's queue: when it is through, so are the bytes to count.
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    sent = sent_bytes() - bytes_before
    # The loopback's counter sees what all ranks send.
    return elapsed.item(), sent // dist.get_world_size() if on_loopback() else sent


def compute(kind: str, seconds: float) -> None:
    """Take that long, ``"sleeping"`` or busy (in processor time of this thread)."""
    if kind == "sleeping":
        time.sleep(seconds)
        return
    matrix = torch.ones(256, 256)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(matrix, matrix)


def say_kept(promises: dict[str, bool], console: Console) -> None:
    """Print which promises a run kept."""
    for promise, kept in promises.items():
        console.print(f"{'held' if kept else 'NOT HELD'}: {promise}")


def raw_bits_per_second(seconds: float = 1.0) -> float:
    """What one plain TCP connection from the last rank gets through to rank 0 (0.0 elsewhere)."""
    server = socket.create_server((os.environ["MASTER_ADDR"], 0)) if dist.get_rank() == 0 else None
    port = torch.tensor(server.getsockname()[1] if server else 0)
    dist.broadcast(port, 0)
    rate, piece = 0.0, bytearray(1 << 20)
    if server:
        with server, server.accept()[0] as connection:
            connection.recv_into(piece)
            begin, received = time.perf_counter(), 0
            while count := connection.recv_into(piece):
                received += count
            rate = received * 8 / (time.perf_counter() - begin)
    elif dist.get_rank() == dist.get_world_size() - 1:
        address = os.environ["MASTER_ADDR"], int(port)
        with socket.create_connection(address) as connection:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                connection.sendall(piece)
    dist.barrier()
    return rate
