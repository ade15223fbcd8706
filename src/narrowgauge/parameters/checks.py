"""What is checked of arguments, and of the ranks' replicas while training goes on."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from narrowgauge.collectives.link import Link
from narrowgauge.collectives.transport import Transport
from narrowgauge.ledger import Ledger
from narrowgauge.parameters.space import Space

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    optimizer_class: Any, tolerance: Any, check_every: Any, message_bytes: Any, timeout: Any
) -> None:
    """Raise TypeError or ValueError for arguments that are not what they should be."""
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"optimizer_class is {optimizer_class!r}; allowed: a subclass of "
            "torch.optim.Optimizer, such as torch.optim.AdamW, not an instance"
        )
    if not isinstance(tolerance, (int, float)) or isinstance(tolerance, bool) or not tolerance >= 0:
        raise ValueError(
            f"tolerance is {tolerance!r}; allowed: numbers from 0, or infinity for none"
        )
    for name, number, least in (
        ("check_every", check_every, 0),
        ("message_bytes", 1 if message_bytes is None else message_bytes, 1),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} is {number!r}; allowed: whole numbers from {least}")
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise ValueError(f"timeout is {timeout!r}; allowed: a datetime.timedelta above 0, or None")


def check_kinds(whole_parameters: Any, adapt: Any, link: Any, ledger: Any) -> None:
    """Raise TypeError for arguments of a wrong type."""
    for name, flag in (("whole_parameters", whole_parameters), ("adapt", adapt)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}; allowed: True or False")
    for name, value, kind in (("link", link, Link), ("ledger", ledger, Ledger)):
        if not isinstance(value, (kind, type(None))):
            raise TypeError(f"{name} is {value!r}; allowed: a {kind.__name__}, or None")


def check_parameters(parameters: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise TypeError or ValueError for parameters that cannot be sharded."""
    for name, parameter, _ in parameters:
        if isinstance(parameter, DTensor):
            raise TypeError(
                f"parameter {name!r} is a DTensor, which is sharded already; use the optimizer "
                "itself under fully_shard (and compress_sharded for the gradients)"
            )
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; allowed: float32, bfloat16 and float16 "
                "(masters are float32)"
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; parameters travel over Gloo from "
                "CPU memory: keep the model on the CPU"
            )
    ends = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p, _ in parameters
        if p.numel()
    )
    for (_, end, name), (begin, _, other) in pairwise(ends):
        if begin < end:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory without being the same parameter; "
                "tie them by using one nn.Parameter twice"
            )


def described(value: Any) -> str:
    """An argument as text that is equal on all ranks if the argument is."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(each)}' for key, each in value.items())}}}"
    return type(value).__name__


def description_of(parameters: Sequence[tuple[str, Tensor, int]]) -> dict[str, str]:
    """What ranks must agree on of each parameter."""
    return {
        f"parameter {name}": f"{tuple(p.shape)} {p.dtype} strides {p.stride()} group {group}"
        for name, p, group in parameters
    }


def differing(transport: Transport, spaces: Sequence[Space]) -> dict[str, list[int]]:
    """Parameters that have other bits on some ranks than on rank 0, with these ranks."""
    slots = [slot for space in spaces for slot in space.slots]
    digests = [_digest(slot.flat(slot.parameter.detach())) for slot in slots]
    everybodys = transport.all_gather(torch.tensor(digests, dtype=torch.int64, device="cpu"))
    found = {}
    for number, slot in enumerate(slots):
        first = int(everybodys[0][number])
        ranks = [rank for rank, theirs in enumerate(everybodys) if int(theirs[number]) != first]
        if ranks:
            found[slot.name] = ranks
    return found


def _digest(values: Tensor) -> int:
    size = values.numel() * values.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(values.data_ptr())) if size else 0
