"""The compressed all-reduce of tensors: their checks, and the way in and out of one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from narrowgauge.collectives.message import Op, Scale
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduction import Pending
from narrowgauge.collectives.transport import members_of, refuse
from narrowgauge.collectives.two_level import Inside, TwoLevelReducer, inside_groups
from narrowgauge.formats import BlockFormat, Format, FormatLike, format_of

_reducers: dict[tuple[dist.ProcessGroup, bool], Reducer] = {}  # by group and whether it adapts
_two_level_reducers: dict[
    tuple[dist.ProcessGroup, tuple[tuple[int, ...], ...], Format], TwoLevelReducer
] = {}


def _reducer_of(group: dist.ProcessGroup | None, adapt: bool) -> Reducer:
    key = members_of(group), adapt
    if key not in _reducers:
        _forget_destroyed_groups()
        reducer = Reducer(group)
        if adapt:
            reducer.adapt()
        _reducers[key] = reducer
    return _reducers[key]


def _two_level_of(
    group: dist.ProcessGroup | None, groups: list[list[int]], inside_format: Format
) -> TwoLevelReducer:
    members = members_of(group)
    key = members, tuple(map(tuple, groups)), inside_format
    if key not in _two_level_reducers:
        _forget_destroyed_groups()
        _two_level_reducers[key] = TwoLevelReducer(groups, inside_format, group)
    return _two_level_reducers[key]


def _forget_destroyed_groups() -> None:
    alive = dist.distributed_c10d._world.pg_map.keys()
    for reducers in (_reducers, _two_level_reducers):
        for key in [key for key in reducers if key[0] not in alive]:
            del reducers[key]  # type: ignore[arg-type]


def check_inside_format(format: FormatLike) -> Format:
    """The format inside groups: one that needs no scale.

    Raises:
        ValueError: it is another than fp32 or bf16.
    """
    parsed = format_of(format)
    if parsed.name not in ("fp32", "bf16"):
        raise ValueError(f"inside_format is {parsed.name!r}; allowed: 'fp32', 'bf16'")
    return parsed


def wire_format(format: FormatLike) -> Format:
    """``format`` as one that can travel: fp32, blocks, or signed and of at most 16 bits.

    Raises:
        ValueError: it is unsigned, or wider than 16 bits and not fp32.
    """
    parsed = format_of(format)
    fits = parsed.bits <= 16 or parsed.name == "fp32"
    if not isinstance(parsed, BlockFormat) and not (fits and parsed.signed):
        raise ValueError(
            f"format {parsed.name!r} cannot travel between ranks; allowed: fp32, block formats, or "
            "signed formats of at most 16 bits such as e5m2, e4m3, int8, bf16"
        )
    return parsed


def check_scale(scale: object, formats: Iterable[Format] = ()) -> None:
    """Raise ValueError unless ``scale`` is known, and one that all of these formats can have."""
    if scale not in ("local", "shared", None):
        raise ValueError(f"scale is {scale!r}; allowed: 'local', 'shared' (APS as published), None")
    for format in formats:
        if isinstance(format, BlockFormat) and scale != "local":
            raise ValueError(
                f"scale is {scale!r}, but {format.name} brings a scale per block, each rank's own; "
                f"leave scale='local', or use its elements' format {format.element.name}"
            )


def _checked_format(format: FormatLike, op: object, scale: object) -> Format:
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; allowed: 'mean', 'sum'")
    parsed = wire_format(format)
    check_scale(scale, [parsed])
    return parsed


def _checked_targets(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors is {type(tensors).__name__}; allowed: a tensor, or several")
    targets = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in targets:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors holds a {type(tensor).__name__}; allowed: tensors")
        if isinstance(tensor, DTensor):
            raise TypeError(
                "a tensor is a DTensor, whose placements an all-reduce would contradict; pass "
                "tensor.to_local(), the part that this rank has, and the group of its mesh "
                "(mesh.get_group())"
            )
        if not tensor.is_floating_point() or tensor.device.type != "cpu":
            raise TypeError(
                f"a tensor is {tensor.dtype} on {tensor.device}; allowed: floating dtypes on the "
                "CPU (copy it there first: messages travel over Gloo)"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(
                f"a tensor is {'nested' if tensor.is_nested else tensor.layout}; allowed: dense "
                "ones (pass its values)"
            )
        if _may_overlap(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is "
                "expanded: elements share memory and cannot be reduced in place; pass "
                "tensor.clone()"
            )
    return targets


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements could share memory: a step in one dimension is within the smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _refuse(group: dist.ProcessGroup | None, inside: object, adapt: bool, error: Exception) -> None:
    """Let the other ranks raise as well, now or when they come."""
    if not dist.is_initialized() or not isinstance(group, (dist.ProcessGroup, type(None))):
        return
    members = members_of(group)
    reducers: list[Reducer | TwoLevelReducer]
    if inside is None:
        reducers = [reducer for key, reducer in _reducers.items() if key == (members, adapt)]
    else:  # which of them the others use, is not known if ``inside`` is what is refused
        reducers = [reducer for key, reducer in _two_level_reducers.items() if key[0] is members]
    for reducer in reducers:
        reducer.refuse()
    if not reducers:
        refuse(group, error)


def _is_flat_float32(tensor: torch.Tensor) -> bool:
    # The memory of a negative view holds the numbers with the other sign.
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg()


def all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    format: FormatLike,
    *,
    op: Op = "mean",
    scale: Scale = "local",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    inside: Inside | None = None,
    inside_format: FormatLike = "fp32",
    adapt: bool = False,
) -> Pending | None:
    """All-reduce tensors in place, sent between ranks in ``format``; every rank gets the same bits.

    Codes are summed in float32. A tensor with a NaN or infinity on any rank becomes non-finite on
    every rank (in block formats NaN, in that block); one that is zero everywhere stays zero. With
    one rank nothing moves or changes.

    Args:
        tensors: one tensor or several, on the CPU, of a floating dtype, any shape and strides. All
            ranks must pass the same shapes in the same order. Other dtypes than float32 are
            converted to float32 and back.
        format: the format on the wire: fp32, any signed format of at most 16 bits, or a block
            format. Blocks are cut from each flattened tensor (and from the parts of it that travel
            in messages of their own); a second level of scales is that of such a part.
        op: ``"mean"`` or ``"sum"`` over the ranks.
        scale: ``"local"``: each rank scales each tensor by its own largest magnitude and sends the
            exponent along. ``"shared"``: APS as published (arXiv 1911.08907, section 3): ranks
            first agree on one exponent per tensor with room for the sum. ``None``: no scaling.
            Block formats scale themselves: with them, only ``"local"``.
        group: the process group; ``None`` is the default one. The messages travel on a Gloo group
            of our own over the same ranks, made at the first call, which all of them must make.
        async_op: return at once with something to wait for, like a ``torch.distributed.Work``.
        inside: reduce on two levels: ``format`` travels only between groups of ranks, which are so
            many consecutive ranks, those of one ``"host"`` (as ``LOCAL_WORLD_SIZE`` says), or the
            last dimension of a DeviceMesh of two. ``None``: all ranks are alike.
        inside_format: what travels inside a group: fp32, or bf16.
        adapt: measure the link at the first call, and send in float32 what arrives sooner so; on
            one level.

    Raises:
        TypeError: a tensor that is not floating or not on the CPU.
        ValueError: an unknown ``format``, ``op`` or ``scale``, or a ``scale`` for blocks.
        CollectiveError: a rank died or did not answer, or the ranks' arguments differ.
    """
    try:
        parsed = _checked_format(format, op, scale)
        wide = check_inside_format(inside_format)
        targets = _checked_targets(tensors)
        groups = None if inside is None else inside_groups(inside, members_of(group))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        _refuse(group, inside, adapt, error)
        raise
    with torch.no_grad():
        reducer = (
            _reducer_of(group, adapt) if groups is None else _two_level_of(group, groups, wide)
        )
        single = targets[0].detach() if len(targets) == 1 else None
        in_place = single is not None and _is_flat_float32(single)
        if single is not None and in_place:
            flat = single.view(-1)
        else:
            flat = torch.cat(
                [tensor.reshape(-1).float() for tensor in targets] or [torch.empty(0, device="cpu")]
            )
        sizes = [tensor.numel() for tensor in targets]

        def copy_back() -> None:
            for target, part in zip(targets, flat.split(sizes), strict=True):
                target.detach().copy_(part.view(target.shape))

        reduction = reducer.start(
            flat,
            sizes,
            [parsed] * len(sizes),
            scale=scale,
            op=op,
            on_success=None if in_place else copy_back,
            at_once=not async_op,
        )
    if async_op:
        return reduction
    reduction.wait()
    return None
