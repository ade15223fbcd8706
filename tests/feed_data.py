"""Data sets for the tests of feeds."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info


class Numbers(Dataset[Any]):
    """Samples that are their own numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index


class Images(Numbers):
    """Images full of their number, the number, and its name."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index % 256, dtype=torch.uint8), index, f"image {index}"


class Broken(Numbers):
    """One of the samples cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == self.count // 2:
            raise ValueError(f"sample {index} is torn")
        return torch.full((4,), index)


class Killed(Numbers):
    """The worker that reads one of the samples is killed."""

    def __getitem__(self, index: int) -> Any:
        if index == self.count // 2 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index)


class Slow(Numbers):
    """Every sample takes some time."""

    def __init__(self, count: int, seconds: float, size: int = 4) -> None:
        super().__init__(count)
        self.seconds = seconds
        self.size = size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((self.size,), index)
