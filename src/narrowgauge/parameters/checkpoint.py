"""Checkpoints in shards, to be read on any number of ranks.

Even shards are parts of flat tensors (DTensor), which ``torch.distributed.checkpoint`` cuts anew
for the ranks that read them. Whole parameters are saved by their owners, each under its name.
Replicas are saved beside the masters: without them the difference, and so what rounding still owes,
would be lost, and training would not go on bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.collectives.transport import Transport, members_of
from narrowgauge.parameters.space import Piece, Space


def saved(
    spaces: Sequence[Space],
    local: torch.optim.Optimizer,
    transport: Transport,
    group: dist.ProcessGroup | None,
    param_groups: Sequence[Mapping[str, Any]],
    steps: int,
) -> dict[str, Any]:
    """What ``state_dict`` gives; a collective of the transport.

    Raises:
        TypeError: the optimizer keeps something that is neither a tensor nor a number.
    """
    hidden = ("params", "param_names")
    state: dict[str, Any] = {
        "step": steps,
        "parameters": [[slot.name for slot in space.slots] for space in spaces],
        "sizes": [[list(slot.parameter.shape) for slot in space.slots] for space in spaces],
        "param_groups": [{k: v for k, v in g.items() if k not in hidden} for g in param_groups],
    }
    for number, space in enumerate(spaces):
        if space.whole:
            for piece in space.pieces:
                state[f"space {number} {piece.slot.name}"] = _whole(space, piece, local)
        else:
            mesh = DeviceMesh.from_group(members_of(group), "cpu")
            state[f"space {number}"] = _flat(space, local, transport, mesh)
    return state


def _kept(local: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a master; before its first step, what it would keep."""
    if master in local.state:
        return dict(local.state[master])
    return {
        key: torch.zeros_like(v) if isinstance(v, Tensor) else v * 0
        for key, v in sample_state(local, master).items()
    }


def sample_state(local: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a tensor like ``master`` after a step.

    Raises:
        TypeError: something that is neither a tensor nor a number.
    """
    group = next(g for g in local.param_groups if any(p is master for p in g["params"]))
    settings = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    trial = torch.nn.Parameter(torch.ones_like(master))
    optimizer = copy.copy(local)
    optimizer.state = type(local.state)(dict)
    optimizer.param_groups = [{**settings, "params": [trial]}]
    trial.grad = torch.zeros_like(trial)
    with torch.random.fork_rng(devices=[]):
        type(local).step(optimizer)
    kept = {key: value for key, value in optimizer.state[trial].items() if value is not None}
    for key, value in kept.items():
        if not isinstance(value, (Tensor, int, float)):
            raise TypeError(
                f"{type(local).__name__} keeps {key!r}, a {type(value).__name__}, for each "
                "parameter, which cannot be saved in shards; allowed: tensors and numbers"
            )
    return kept


def _is_number(value: Any, master: Tensor) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != master.shape)


def _whole(space: Space, piece: Piece, local: torch.optim.Optimizer) -> dict[str, Any]:
    kept = _kept(local, piece.master)
    return {
        "master": piece.master.detach(),
        "replica": space.replica[piece.begin : piece.end],
        "has_state": torch.tensor(float(piece.master in local.state), device="cpu"),
        "state": {
            key: value
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64, device="cpu")
            for key, value in kept.items()
            if value is not None
        },
    }


def _flat(
    space: Space, local: torch.optim.Optimizer, transport: Transport, mesh: DeviceMesh
) -> dict[str, Any]:
    """Masters, replicas and state of a space as flat tensors in shards; numbers per parameter."""

    def shard(own: Tensor) -> DTensor:
        shape = torch.Size([space.numel])
        return DTensor.from_local(own, mesh, [Shard(0)], shape=shape, stride=(1,))

    flat, numbers = _tables(space, local)
    names = sorted(numbers)
    table = torch.stack([numbers[name] for name in names])
    everybodys = torch.stack(transport.all_gather(table))
    known = everybodys.nan_to_num(-math.inf).amax(0)  # equal on all ranks that have a part
    return {
        "masters": shard(space.master),
        "replicas": shard(space.replica[space.own]),
        "state": {key: shard(values) for key, values in flat.items()},
        "numbers": dict(zip(names, known, strict=True)),
    }


def _tables(
    space: Space, local: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per key of the state this rank's flat part, or a number per parameter (NaN: unknown)."""
    flat: dict[str, Tensor] = {}
    numbers = {
        "has_state": torch.full((len(space.slots),), math.nan, dtype=torch.float64, device="cpu")
    }
    # Every rank names all keys, also if it has no part: they come from a trial.
    for slot in space.slots:
        for key, value in _trial(local, slot.group).items():
            if _is_number(value, torch.zeros(7, device="cpu")):
                numbers.setdefault(key, torch.full_like(numbers["has_state"], math.nan))
            else:
                flat.setdefault(
                    key, torch.zeros(len(space.master), dtype=value.dtype, device="cpu")
                )
    for piece in space.pieces:
        place, own = space.slots.index(piece.slot), _within(space, piece)
        numbers["has_state"][place] = float(piece.master in local.state)
        for key, value in local.state.get(piece.master, {}).items():
            if value is None:
                continue
            if key in flat:
                flat[key][own] = value
            else:
                numbers[key][place] = float(value)
    return flat, numbers


def _trial(local: torch.optim.Optimizer, group: int) -> dict[str, Any]:
    probe = torch.nn.Parameter(torch.ones(7, dtype=torch.float32, device="cpu"))
    local.param_groups[group]["params"].append(probe)
    try:
        return sample_state(local, probe)
    finally:
        del local.param_groups[group]["params"][-1]


def _within(space: Space, piece: Piece) -> slice:
    return slice(piece.begin - space.own.start, piece.end - space.own.start)


def load(
    state: Mapping[str, Any],
    spaces: Sequence[Space],
    local: torch.optim.Optimizer,
    param_groups: Sequence[dict[str, Any]],
) -> int:
    """Put a state in place, but for other ranks' parts of replicas; the number of steps.

    Raises:
        ValueError: it is of other parameters or param groups.
    """
    missing = [key for key in ("step", "parameters", "sizes", "param_groups") if key not in state]
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(map(repr, missing))}; pass what state_dict() of a "
            "ShardedOptimizer gave, after torch.distributed.checkpoint.load has filled it"
        )
    for number, space in enumerate(spaces):
        found = list(zip(state["parameters"][number], state["sizes"][number], strict=True))
        for slot, (name, shape) in zip(space.slots, found, strict=False):
            if (slot.name, list(slot.parameter.shape)) != (name, list(shape)):
                raise ValueError(
                    f"the state has parameter {name!r} of shape {tuple(shape)} where this "
                    f"optimizer has {slot.name!r} of {tuple(slot.parameter.shape)}; make it of the "
                    "same model"
                )
        if len(found) != len(space.slots):
            raise ValueError(
                f"the state has {len(found)} parameters, this optimizer {len(space.slots)}"
            )
    if len(state["param_groups"]) != len(param_groups):
        raise ValueError(
            f"the state has {len(state['param_groups'])} param groups, this optimizer "
            f"{len(param_groups)}"
        )
    for group, own, theirs in zip(
        param_groups, local.param_groups, state["param_groups"], strict=True
    ):
        group.update(theirs)
        own.update({key: value for key, value in theirs.items() if key in own})
    for number, space in enumerate(spaces):
        if space.whole:
            for piece in space.pieces:
                _load_whole(state[f"space {number} {piece.slot.name}"], space, piece, local)
        else:
            _load_flat(state[f"space {number}"], space, local)
    return int(state["step"])


def _load_flat(part: Mapping[str, Any], space: Space, local: torch.optim.Optimizer) -> None:
    space.master.copy_(part["masters"].to_local())
    space.replica[space.own] = part["replicas"].to_local()
    flat = {key: values.to_local() for key, values in part["state"].items()}
    for piece in space.pieces:
        place = space.slots.index(piece.slot)
        local.state.pop(piece.master, None)
        if not part["numbers"]["has_state"][place] > 0:
            continue
        kept = sample_state(local, piece.master)
        for key, value in kept.items():
            if key in flat:
                kept[key] = flat[key][_within(space, piece)].clone()
            else:
                kept[key] = _like(value, part["numbers"][key][place])
        local.state[piece.master] = kept


def _load_whole(
    part: Mapping[str, Any], space: Space, piece: Piece, local: torch.optim.Optimizer
) -> None:
    piece.master.copy_(part["master"])
    space.replica[piece.begin : piece.end] = part["replica"]
    local.state.pop(piece.master, None)
    if float(part["has_state"]) > 0:
        local.state[piece.master] = {
            key: _like(value, part["state"][key])
            for key, value in sample_state(local, piece.master).items()
        }


def _like(value: Any, number: Tensor) -> Any:
    if isinstance(value, Tensor):
        return number.to(value.dtype).clone()
    return type(value)(number)


def gather_replicas(spaces: Sequence[Space], transport: Transport) -> None:
    """Send every rank's part of the replicas to all, as it is."""
    for space in spaces:
        tag = transport.reserve(1)
        stretches = [
            space.replica[space.borders[rank] : space.borders[rank + 1]]
            for rank in range(transport.world_size)
        ]
        own = stretches[transport.rank]
        works = [
            (peer, transport.receive(stretches[peer], peer, tag))
            for peer in transport.peers
            if stretches[peer].numel()
        ]
        if own.numel():
            works += [(peer, transport.send(own, peer, tag)) for peer in transport.peers]
        transport.wait(works, "gathering replicas of")
