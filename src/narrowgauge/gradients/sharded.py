"""FSDP2: the reduce-scatter of gradients in narrow formats.

``fully_shard`` hands over the gradients of all parameters of one of its modules in one flat buffer,
without their borders, and lets us replace the reduce-scatter. So one format serves a whole module,
and a scale per tensor would be shared by all its parameters: formats in blocks fit better. The
trade-off against FSDP2's own reduce-scatter: fewer bytes for some codec time and a rounding error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.collectives.layout import MESSAGE_BYTES, shard_borders
from narrowgauge.collectives.message import Op, Scale
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduce import check_scale
from narrowgauge.collectives.reduction import Reduction
from narrowgauge.collectives.transport import refuse
from narrowgauge.formats import Format, FormatLike
from narrowgauge.gradients.checks import check_state, check_timeout, checked_count
from narrowgauge.gradients.policy import FixedPolicy, FormatRule, Hybrid, Schedule, policy_of
from narrowgauge.gradients.steps import StepwiseCompression
from narrowgauge.ledger import Ledger


class ShardedGradientCompression(StepwiseCompression):
    """What :func:`compress_sharded` attached to a model.

    Attributes:
        ledger: one entry per backward pass that synchronises, movement ``"gradients"``.
    """

    def __init__(
        self, units: dict[str, list[str]], policy: FixedPolicy, ledger: Ledger, scale: Scale
    ) -> None:
        super().__init__(policy, ledger)
        self.scale = scale
        self._units = units

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each sharded module's gradients now, by name (``""``: the model itself)."""
        return {unit: self._policy.formats[names[0]] for unit, names in self._units.items()}

    def state_dict(self) -> dict[str, int]:
        """The step and the epoch; equal on all ranks."""
        return {"step": self._steps, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what ``state_dict`` gave."""
        check_state(state, ("step", "epoch"))
        self._steps = checked_count("step", state["step"])
        self._epoch = checked_count("epoch", state["epoch"])
        self._policy.begin_step(self._steps, self._epoch)

    def begin(self, unit: str) -> Format:
        """The format for a module whose gradients are complete; for its reduce-scatter only."""
        self._enter_backward()
        return self._policy.formats[self._units[unit][0]]

    def end(self, reduction: Reduction) -> None:
        """Count a reduction that is over; for the reduce-scatter only."""
        self._under_way.append(reduction)


class _ReduceScatter:
    """Takes the place of FSDP2's own for one module; its interface is FSDP2's ``ReduceScatter``."""

    def __init__(
        self, compression: ShardedGradientCompression, unit: str, reducer: Reducer
    ) -> None:
        self._compression = compression
        self._unit = unit
        self._reducer = reducer

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what comes in or goes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce this rank's shard of ``input_tensor``, which changes, into ``output_tensor``."""
        transport = self._reducer.transport
        flat = input_tensor.view(-1).float()  # itself, if it is float32
        reduction = self._reducer.start(
            flat,
            [output_tensor.numel()] * transport.world_size,
            [self._compression.begin(self._unit)] * transport.world_size,
            scale=self._compression.scale,
            op=_op_of(op),
            kind="reduce-scatter",
            name=f"the gradients of {self._unit or 'the model'}",
        )
        reduction.wait()
        begin, end = shard_borders(flat.numel(), transport.world_size)[transport.rank :][:2]
        output_tensor.copy_(flat[begin:end].view_as(output_tensor))
        self._compression.end(reduction)


def _op_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> Op:
    if op == dist.ReduceOp.AVG:
        return "mean"
    if op == dist.ReduceOp.SUM:
        return "sum"
    raise ValueError(
        f"FSDP2 asks for {op} of gradients; allowed: mean and sum (leave out "
        "set_gradient_divide_factor, and scale the loss instead)"
    )


def compress_sharded(
    model: nn.Module,
    format: FormatRule | Schedule = "int8@64",
    *,
    scale: Scale = "local",
    keep: Mapping[str, FormatLike] | None = None,
    ledger: Ledger | None = None,
    timeout: timedelta | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ShardedGradientCompression:
    """Send the gradients of a model under FSDP2 (``fully_shard``) in a narrow format from now on.

    Every rank calls this once, with the same arguments, after ``fully_shard``. Shards of gradients
    are summed in float32 and not rounded a second time. With a mesh of two dimensions (HSDP), the
    all-reduce between replicas stays FSDP2's own; to compress it as well, shard over the inner
    dimension only and pass ``set_all_reduce_hook`` a function that calls
    :func:`~narrowgauge.all_reduce` with the outer group.

    Args:
        model: the model, sharded, on the CPU.
        format: as in :func:`compress`, but for one thing: all parameters of one sharded module must
            have the same format. Blocks are the better choice, because their scales know no
            borders of parameters either.
        scale: as in :func:`compress`; formats without blocks get a scale per message.
        keep: parameters or modules that travel in another format.
        ledger: where to count bytes and seconds; a new one by default.
        timeout: how long one message may take; ``None``: as long as in the model's process group.
        message_bytes: size of the messages.

    Raises:
        TypeError: ``model`` has no sharded module, or ``format`` is a :class:`Hybrid`.
        ValueError: a wrong format, scale or pattern, or several formats in one sharded module.
        RuntimeError: the gradients of one of its modules are compressed already.
        CollectiveError: the ranks passed different arguments, or one refused its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: a module under fully_shard")
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and any(isinstance(p, DTensor) for p in _all_of(module))
    }
    if not modules:
        raise TypeError(
            f"model is a {type(model).__name__} without a sharded module; call "
            "torch.distributed.fsdp.fully_shard first (for DDP there is compress)"
        )
    groups = {name: _group_of(module) for name, module in modules.items()}
    first_group = next(iter(groups.values()))
    try:
        _refuse_compressed(modules)
        if isinstance(format, Hybrid):
            raise TypeError(
                "format is a Hybrid, which measures each parameter's gradient, but FSDP2 hands "
                "over those of a module in one buffer; pass formats or a Schedule"
            )
        check_scale(scale)
        check_timeout(timeout)
        checked_count("message_bytes", message_bytes)
        if not message_bytes:
            raise ValueError("message_bytes is 0; allowed: whole numbers from 1")
        if not isinstance(ledger, (Ledger, type(None))):
            raise TypeError(f"ledger is {ledger!r}; allowed: a Ledger, or None")
        units = _units_of(model, modules)
        policy = policy_of([name for names in units.values() for name in names], format, keep)
        check_scale(scale, policy.all_formats)
        _check_one_format_each(units, policy)
    except Exception as error:
        refuse(first_group, error)  # or the others would wait for this rank
        raise
    settings = {
        "use": "gradients.compress_sharded",
        "scale": repr(scale),
        "message_bytes": str(message_bytes),
        "format": str(format),
        "keep": str(keep),
        "formats": str({name: format.name for name, format in policy.formats.items()}),
    }
    reducers = {
        group: Reducer(group, timeout, message_bytes, settings=settings)
        for group in dict.fromkeys(groups.values())
    }
    compression = ShardedGradientCompression(
        units, policy, Ledger() if ledger is None else ledger, scale
    )
    for name in units:
        module = modules[name]
        replacement: Any = _ReduceScatter(compression, name, reducers[groups[name]])
        module.set_custom_reduce_scatter(replacement)
        _compressed.add(module)
    return compression


_compressed: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # all modules with a _ReduceScatter


def _refuse_compressed(modules: Mapping[str, FSDPModule]) -> None:
    twice = next((name for name, module in modules.items() if module in _compressed), None)
    if twice is not None:
        raise RuntimeError(
            f"the gradients of {twice or 'the model'!r} are compressed already; call "
            "compress_sharded once, with a policy for all parameters"
        )


def _units_of(model: nn.Module, modules: Mapping[str, FSDPModule]) -> dict[str, list[str]]:
    """The parameters whose gradients come in one buffer, by the first module that they are of.

    These are the parameters below a sharded module and below no other inside it; several modules
    that were sharded together, as a list, have one buffer.
    """
    first_of = {}
    for name, module in modules.items():
        first_of[name] = next(
            n for n, m in modules.items() if m._get_fsdp_state() is module._get_fsdp_state()
        )
    units: dict[str, list[str]] = {name: [] for name in modules}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; compressed gradients travel over "
                "Gloo from CPU memory: keep the model on the CPU"
            )
        owners = [m for m in modules if not m or name.startswith(f"{m}.")]
        if owners:
            units[first_of[max(owners, key=len)]].append(name)
    return {module: names for module, names in units.items() if names}


def _check_one_format_each(units: dict[str, list[str]], policy: FixedPolicy) -> None:
    for formats in policy.all_stages:
        for unit, names in units.items():
            different = next((n for n in names if formats[n] != formats[names[0]]), None)
            if different is not None:
                raise ValueError(
                    f"{names[0]!r} would travel in {formats[names[0]].name} and {different!r} in "
                    f"{formats[different].name}, but FSDP2 hands over the gradients of "
                    f"{unit or 'the model'!r} in one buffer; give them one format, or shard their "
                    "modules apart"
                )


def _group_of(module: FSDPModule) -> dist.ProcessGroup:
    """The ranks among which a module's parameters are sharded."""
    parameter = next(p for p in _all_of(module) if isinstance(p, DTensor))
    dimension = next(n for n, p in enumerate(parameter.placements) if isinstance(p, Shard))
    return parameter.device_mesh.get_group(dimension)


def _all_of(module: FSDPModule) -> Iterator[nn.Parameter]:
    assert isinstance(module, nn.Module)
    return module.parameters()
