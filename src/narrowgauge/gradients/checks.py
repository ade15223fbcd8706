"""What is checked around the steps: arguments, states of checkpoints, and the ranks' parameters."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from narrowgauge.collectives.transport import CollectiveError, Transport


def checked_count(name: str, number: Any) -> int:
    """``number``, or ValueError unless it is a whole number from 0."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} is {number!r}; allowed: whole numbers from 0")
    return number


def check_state(state: Any, keys: tuple[str, ...]) -> None:
    """Raise ValueError unless ``state`` is a dict with these keys."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(map(repr, missing))}; pass what state_dict() gave"
        )


def check_timeout(timeout: Any) -> None:
    """Raise TypeError or ValueError unless ``timeout`` is a positive timedelta, or ``None``."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout is {timeout!r}; allowed: a datetime.timedelta, such as timedelta(seconds=60)"
        )
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}; it must be longer than 0")


def check_same_parameters(transport: Transport, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise on every rank unless all have the same bits in all parameters.

    Raises:
        CollectiveError: naming the first parameter that differs, and the ranks.
    """
    digests = torch.tensor([_digest(p) for p in parameters.values()], device="cpu")
    everybodys = transport.all_gather(digests)
    for number, name in enumerate(parameters):
        own = [int(theirs[number]) for theirs in everybodys]
        different = [rank for rank, digest in enumerate(own) if digest != own[0]]
        if different:
            raise CollectiveError(
                f"parameter {name!r} has other bits on {transport.named(different)} than on "
                f"{transport.named([0])}; something but averaged gradients changed it: look at the "
                "optimizer's settings, and at code that only some ranks run"
            )


def _digest(tensor: torch.Tensor) -> int:
    values = tensor.detach().contiguous()
    size = values.numel() * values.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(values.data_ptr())) if size else 0
