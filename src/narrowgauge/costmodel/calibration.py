"""Measure the link between ranks, and keep it in a file for predictions."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from narrowgauge.collectives.link import Link, measure_link
from narrowgauge.collectives.transport import Transport


class CalibrationError(Exception):
    """The link cannot be measured, or a file holds no calibration; the message says why."""


@dataclass(frozen=True)
class Calibration:
    """A measured link, and where it was measured.

    Attributes:
        link: see :class:`~narrowgauge.collectives.link.Link`.
        ranks: how many took part.
        machine: of rank 0: processor, cores, system, versions.
    """

    link: Link
    ranks: int
    machine: dict[str, str]

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Reads what :meth:`save` wrote.

        Raises:
            CalibrationError: the file is not there, or no calibration.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return Calibration(Link(**content["link"]), content["ranks"], content["machine"])
        except OSError as error:
            raise CalibrationError(
                f"{path} cannot be read ({error.strerror}); narrowgauge calibrate writes such files"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise CalibrationError(
                f"{path} holds no calibration ({error}); narrowgauge calibrate writes files that do"
            ) from error


def calibrate(nproc: int | None = None, repeats: int = 5) -> Calibration | None:
    """Measure the link ``repeats`` times and take the median of every number.

    Args:
        nproc: ranks to start on this machine; ``None`` where torchrun has started this process.
        repeats: measurements, of about a second each.

    Returns:
        The calibration; ``None`` on all ranks of torchrun but the first.

    Raises:
        CalibrationError: fewer than two ranks, neither ``nproc`` nor torchrun (or both), or a rank
            failed.
    """
    if repeats < 1:
        raise CalibrationError(f"repeats is {repeats}; at least 1 is needed")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else nproc
    if launched and nproc is not None:
        raise CalibrationError(
            f"nproc is {nproc}, but torchrun has started {ranks} ranks; pass one or the other"
        )
    if ranks is None:
        raise CalibrationError(
            "there are no ranks; pass --nproc 2, or start it on every node with torchrun: "
            "torchrun --nnodes … --nproc-per-node 1 -m narrowgauge.cli calibrate"
        )
    if ranks < 2:
        raise CalibrationError(f"{ranks} rank has no link to measure; at least 2 are needed")
    if launched:
        return _measure(repeats)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_local_rank, (ranks, repeats, folder), nprocs=ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise CalibrationError(f"a rank failed: {last_line}") from None
        return Calibration.load(Path(folder) / "calibration.json")


def _local_rank(rank: int, ranks: int, repeats: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    calibration = _measure(repeats)
    if calibration is not None:
        calibration.save(Path(folder) / "calibration.json")


def _measure(repeats: int) -> Calibration | None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    transport = Transport(None, timedelta(minutes=2))
    ranks, first = transport.world_size, transport.rank == 0
    turns = track(
        range(repeats),
        f"measuring the link of {ranks} ranks",
        console=Console(stderr=True),
        disable=not first,
    )
    links = [dataclasses.astuple(measure_link(transport)) for _ in turns]
    transport.barrier()  # nobody leaves while others still need its messages
    dist.destroy_process_group()
    link = Link(*(statistics.median(values) for values in zip(*links, strict=True)))
    return Calibration(link, ranks, _machine()) if first else None


def _machine() -> dict[str, str]:
    return {
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "narrowgauge": version("narrowgauge"),
    }
