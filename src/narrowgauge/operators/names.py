"""Stable names for operator instances: ``layers.0.attn::softmax#0``.

A name is the path of the module whose forward calls the operator, the operator, and how many calls
of it came before from that module in the same forward of the model. So a change in one module
leaves the names in all others as they are. What is called outside the model, such as the loss, has
an empty path: ``::cross_entropy#0``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Wrappers that hold the module under this name and compute nothing themselves.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel`` and ``torch.compile``, whose paths names use."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def module_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each module in the model whose operators have names, the model first.

    A module that is in two places has the first path. Wrappers that only hold another module (of
    ``torch.compile``, activation checkpointing, ``DistributedDataParallel``) are left out of paths,
    so that a plan fits with and without them.
    """
    found = list(model.named_modules())
    hidden = {id(m.module) for _, m in found if isinstance(m, DistributedDataParallel)}
    skipped = set()  # full paths that end in a wrapper's name
    for path, module in found:
        if id(module) in hidden or path.rpartition(".")[2] in _WRAPPERS:
            skipped.add(path)
    for path, module in found:
        yield (path if not skipped else _shortened(path, skipped)), module


def _shortened(path: str, skipped: set[str]) -> str:
    parts = path.split(".")
    return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in skipped)


def operator_name(path: str, operator: str, call: int) -> str:
    """``path::operator#call``."""
    return f"{path}::{operator}#{call}"


def split_name(name: str) -> tuple[str, str, int]:
    """Path, operator and call of a name.

    Raises:
        ValueError: not a name of an operator.
    """
    path, colons, rest = name.rpartition("::") if isinstance(name, str) else ("", "", "")
    operator, sign, call = rest.partition("#")
    plain = call.isascii() and call.isdigit() and len(call) <= 7 and (call == "0" or call[0] != "0")
    if not colons or not sign or not operator or not plain:
        raise ValueError(
            f"{name!r} is no name of an operator; one reads module.path::operator#call, such as "
            "'layers.0.attn::softmax#0', or '::cross_entropy#0' outside of the model's modules"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the name {name!r} holds half of a surrogate pair, which no file can; rename the "
            "module"
        ) from None
    return path, operator, int(call)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'a' or 'b'?)``, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
