"""Whether an optimizer may be cut: it is tried out on a few numbers, whole and in pieces.

There is no list of good optimizers to keep: whatever updates every element by its own gradient and
state alone gives the same numbers either way. What does not (norms of layers, factored or
orthogonalised moments, line searches) is refused before training, not found out after it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_STEPS = 3


def check_divisible(
    optimizer_class: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    whole: bool,
) -> None:
    """Raise unless an optimizer gives the same numbers for parts as for all parameters together.

    Args:
        optimizer_class: the optimizer.
        settings: its arguments.
        group: what a param group says instead.
        whole: the parts are whole parameters; else they are cut anywhere.

    Raises:
        ValueError: it does not, or it needs a closure or sparse gradients.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    starts = [random(6, 8), random(4, 5)]
    gradients = [[random(6, 8), random(4, 5)] for _ in range(_STEPS)]
    parts = [[start] for start in starts]
    cut = [[[g] for g in step] for step in gradients]
    if not whole:
        places = ((0, 13, 48), (0, 2, 20))
        parts = [_cut(start, p) for start, p in zip(starts, places, strict=True)]
        cut = [[_cut(g, p) for g, p in zip(step, places, strict=True)] for step in gradients]
    with torch.random.fork_rng(devices=[]):
        try:
            together = _updated(optimizer_class, settings, group, starts, gradients)
            if whole:
                apart = [
                    _updated(optimizer_class, settings, group, part, [step[n] for step in cut])
                    for n, part in enumerate(parts)
                ]
            else:
                flat = [piece for part in parts for piece in part]
                steps = [[piece for part in step for piece in part] for step in cut]
                pieces = _updated(optimizer_class, settings, group, flat, steps)
                apart = [pieces[:2], pieces[2:]]
        except Exception as error:
            raise ValueError(
                f"{optimizer_class.__name__} cannot be sharded{_way_out(whole)}: tried on "
                f"{'matrices' if whole else 'pieces of matrices'}, it raised {error!r}"
            ) from error
    for result, parts_of_it in zip(together, apart, strict=True):
        if not torch.allclose(
            result.flatten(), torch.cat([part.flatten() for part in parts_of_it]), 1e-5, 1e-6
        ):
            what = "parameter" if whole else "element"
            raise ValueError(
                f"{optimizer_class.__name__} cannot be sharded{_way_out(whole)}: its update of one "
                f"{what} depends on others (or on chance), so that shards would train otherwise "
                "than all parameters together"
            )


def _way_out(whole: bool) -> str:
    return "" if whole else " by element (whole_parameters=True gives each rank whole parameters)"


def _cut(tensor: Tensor, places: Sequence[int]) -> list[Tensor]:
    flat = tensor.flatten()
    return [flat[a:b].clone() for a, b in pairwise(places)]


def _updated(
    optimizer_class: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """The tensors after a few steps with these gradients."""
    tensors = [torch.nn.Parameter(start.clone()) for start in starts]
    groups = [{**copy.deepcopy(dict(group)), "params": tensors}]
    optimizer = optimizer_class(groups, **copy.deepcopy(dict(settings)))
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
    return [tensor.detach() for tensor in tensors]
