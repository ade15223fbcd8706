"""The all-reduce over two kinds of links: wide inside a host or group, narrow between groups.

Inside, each rank sums its shard for its group (reduce-scatter); between, the ranks with the same
shard in every group make the compressed all-reduce; inside again, everybody gets all shards
(all-gather). All ranks of a group use its slow link, each for its own shard. The buffer goes
through these three in parts, one behind the other. The trade-off: two more movements over the fast
links, for bytes between groups that do not grow with the ranks inside.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from narrowgauge.collectives.layout import MESSAGE_BYTES, shard_borders
from narrowgauge.collectives.message import Op, Scale
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduction import Pending, Reduction
from narrowgauge.collectives.threads import Inbox, work_on
from narrowgauge.collectives.transport import CollectiveError, Transport, members_of
from narrowgauge.formats import Format

Inside: TypeAlias = int | Literal["host"] | DeviceMesh

_PART = 1 << 21
"""Elements that go through the three movements together: the fastest of four sizes tried."""

_INSIDE_MESSAGE_BYTES = 4 << 20  # as for any fast link


def inside_groups(inside: Inside, group: dist.ProcessGroup | None) -> list[list[int]]:
    """The ranks of each inner group, as numbers in ``group``; all of one size.

    Args:
        inside: how many consecutive ranks form a group; ``"host"``: as many as ``LOCAL_WORLD_SIZE``
            (torchrun sets it) says; or a DeviceMesh of two dimensions, of which the last is inside.
        group: the ranks to divide; ``None``: all.

    Raises:
        TypeError: ``inside`` is none of these.
        ValueError: the groups are not of one size, or a mesh is not over the ranks of ``group``.
        RuntimeError: ``"host"`` without ``LOCAL_WORLD_SIZE``.
    """
    world_size = dist.get_world_size(group)
    if isinstance(inside, DeviceMesh):
        return _groups_of_mesh(inside, group)
    if inside == "host":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdecimal():
            raise RuntimeError(
                f"inside is 'host', but LOCAL_WORLD_SIZE is {local!r}; start the program with "
                "torchrun, or pass the number of ranks per host"
            )
        inside = int(local)
    if isinstance(inside, bool) or not isinstance(inside, int):
        raise TypeError(f"inside is {inside!r}; allowed: a number of ranks, 'host', a DeviceMesh")
    if inside < 1 or world_size % inside:
        raise ValueError(
            f"inside is {inside}, but groups of that many cannot be made of {world_size} ranks; "
            f"allowed: {[n for n in range(1, world_size + 1) if world_size % n == 0]}"
        )
    return [list(range(first, first + inside)) for first in range(0, world_size, inside)]


def _groups_of_mesh(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> list[list[int]]:
    if mesh.ndim != 2:
        raise ValueError(
            f"inside is a DeviceMesh of {mesh.ndim} dimensions; allowed: two, between and inside"
        )
    number = {rank: n for n, rank in enumerate(dist.get_process_group_ranks(members_of(group)))}
    rows: list[list[int]] = mesh.mesh.tolist()
    if sorted(rank for row in rows for rank in row) != sorted(number):
        raise ValueError(
            f"inside is a DeviceMesh over ranks {rows}, but the group has {sorted(number)}; pass a "
            "mesh over the ranks that reduce"
        )
    return [[number[rank] for rank in row] for row in rows]


class TwoLevelReduction(Pending):
    """One reduction under way on both levels, with the counters of a :class:`Reduction`."""

    def __init__(
        self, flat: torch.Tensor, name: str, on_success: Callable[[], None] | None
    ) -> None:
        super().__init__(on_success)
        self.flat = flat
        self.name = name
        self.inside: list[Reduction] = []
        self.between: list[Reduction] = []

    @property
    def bytes_sent(self) -> int:
        """Payload this rank sent, on both levels."""
        return sum(reduction.bytes_sent for reduction in [*self.inside, *self.between])

    @property
    def codec_seconds(self) -> float:
        """Time in kernels."""
        return sum(reduction.codec_seconds for reduction in [*self.inside, *self.between])

    @property
    def wire_seconds(self) -> float:
        """Time the stages waited for messages."""
        return sum(reduction.wire_seconds for reduction in [*self.inside, *self.between])

    @property
    def levels(self) -> dict[str, dict[str, int]]:
        """Per level: steps, one after the other, that messages take, and bytes this rank sent."""
        return {
            level: {
                "steps": max((r.plan.layout.steps for r in reductions), default=0) * times,
                "bytes_sent": sum(reduction.bytes_sent for reduction in reductions),
            }
            for level, reductions, times in (
                ("inside", self.inside, 2),
                ("between", self.between, 1),
            )
        }


class TwoLevelReducer:
    """Runs two-level all-reduces in the order in which they are started; see :class:`Reducer`.

    Args:
        groups: the ranks of each inner group, as :func:`inside_groups` gives them.
        inside_format: what travels inside: fp32, or bf16.
        group, timeout, settings: as in :class:`Reducer`.
        message_bytes: size of messages between groups.
    """

    def __init__(
        self,
        groups: list[list[int]],
        inside_format: Format,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        message_bytes: int = MESSAGE_BYTES,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        rank = dist.get_rank(group)
        inner = next(ranks for ranks in groups if rank in ranks)
        outer = [ranks[inner.index(rank)] for ranks in groups]
        # Of all ranks, for what is not reduced.
        self.transport = Transport(
            group,
            timeout,
            settings={
                "inside": str(groups),
                "inside_format": inside_format.name,
                **(settings or {}),
            },
        )
        self._inside_format = inside_format
        # Each is started by one thread, so that all ranks start its reductions in one order.
        self._scatter = Reducer(group, timeout, _INSIDE_MESSAGE_BYTES, inner)
        self._between = Reducer(group, timeout, message_bytes, outer)
        self._gather = Reducer(group, timeout, _INSIDE_MESSAGE_BYTES, inner)
        self._to_between: Inbox = queue.SimpleQueue()
        self._to_gather: Inbox = queue.SimpleQueue()
        for inbox in (self._to_between, self._to_gather):
            work_on(inbox, self)

    def start(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        formats: Sequence[Format],
        *,
        scale: Scale = "local",
        op: Op = "mean",
        on_success: Callable[[], None] | None = None,
        name: str = "",
        at_once: bool = False,
    ) -> TwoLevelReduction:
        """Start reducing ``flat`` in place; arguments as in :meth:`Reducer.start`.

        ``at_once`` changes nothing here: parts overlap only if they go through the threads.
        """
        reduction = TwoLevelReduction(flat, name, on_success)
        inner = self._scatter.transport
        for offset in range(0, max(flat.numel(), 1), _PART):
            values = flat[offset : offset + _PART]
            begin, end = shard_borders(values.numel(), inner.world_size)[inner.rank :][:2]
            part = _Part(values, values[begin:end], offset + _PART >= flat.numel())
            part.cut = _overlaps(sizes, formats, offset + begin, offset + end)
            part.scattered = self._scatter.start(
                values,
                [values.numel()],
                [self._inside_format],
                op=op,
                kind="reduce-scatter",
                name=name,
            )
            reduction.inside.append(part.scattered)
            reduce_between = partial(self._reduce_between, reduction, part, scale, op)
            self._to_between.put(partial(self._do, reduction, reduce_between, self._refuse_between))
        return reduction

    def refuse(self) -> None:
        """Make the ranks that start the next reduction raise, because this one will not."""
        self._scatter.refuse()
        self._to_between.put(self._refuse_between)

    def _refuse_between(self) -> None:
        with suppress(CollectiveError):  # to peers that are gone
            self._between.refuse()
        self._to_gather.put(self._refuse_gather)

    def _refuse_gather(self) -> None:
        with suppress(CollectiveError):
            self._gather.refuse()

    def _do(
        self, reduction: TwoLevelReduction, stage: Callable[[], None], refuse: Callable[[], None]
    ) -> None:
        """One stage; if it fails, those who wait for this rank in the next are told by ``refuse``.

        So an error in one group reaches the ranks of all others.
        """
        try:
            stage()
        except BaseException as error:
            reduction.finish(error)
            refuse()

    def _reduce_between(
        self, reduction: TwoLevelReduction, part: _Part, scale: Scale, op: Op
    ) -> None:
        assert part.scattered is not None
        part.scattered.wait()
        part.reduced = self._between.start(
            part.shard,
            [size for size, _ in part.cut],
            [format for _, format in part.cut],
            scale=scale,
            op=op,
            name=reduction.name,
        )
        reduction.between.append(part.reduced)
        send = partial(self._send, reduction, part)
        self._to_gather.put(partial(self._do, reduction, send, self._refuse_gather))

    def _send(self, reduction: TwoLevelReduction, part: _Part) -> None:
        assert part.reduced is not None
        part.reduced.wait()
        gathered = self._gather.start(
            part.values,
            [part.values.numel()],
            [self._inside_format],
            kind="all-gather",
            name=reduction.name,
        )
        reduction.inside.append(gathered)
        if part.is_last:  # reductions of one reducer end in the order in which they were started
            gathered.wait()
            reduction.finish()


@dataclass
class _Part:
    """A part of the buffer on its way through the three movements."""

    values: torch.Tensor
    shard: torch.Tensor
    is_last: bool
    cut: list[tuple[int, Format]] = field(default_factory=list)
    scattered: Reduction | None = None
    reduced: Reduction | None = None


def _overlaps(
    sizes: Sequence[int], formats: Sequence[Format], begin: int, end: int
) -> list[tuple[int, Format]]:
    """Size and format of the parts of tensors that lie between two elements of the buffer."""
    borders = [0]
    for size in sizes:
        borders.append(borders[-1] + size)
    return [
        (min(last, end) - max(first, begin), format)
        for (first, last), format in zip(pairwise(borders), formats, strict=True)
        if min(last, end) > max(first, begin)
    ]
