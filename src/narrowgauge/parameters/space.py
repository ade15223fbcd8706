"""Where parameters lie: side by side in one flat buffer, of which every rank owns a part.

The buffer is the model's own memory: parameters become views of it, so that a message is a stretch
of memory whatever parameters it covers. A *space* holds parameters of one dtype. Its order and its
length do not depend on the number of ranks, which only says where it is cut: evenly, through
parameters, or at the nearest border of a parameter, for optimizers that need whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.collectives.layout import shard_borders
from narrowgauge.kernels.operators import is_dense

_ALIGNMENT = 16  # elements; vector kernels start at the beginning of a cache line


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter's place: elements ``begin`` to ``end`` of its space, in the order of memory.

    Attributes:
        name: for messages and checkpoints.
        parameter: the model's own.
        group: number of its param group.
        begin, end: elements.
    """

    name: str
    parameter: Tensor
    group: int
    begin: int
    end: int

    def flat(self, tensor: Tensor) -> Tensor:
        """Numbers of the parameter's shape (its gradient) in its order; a view if they lie so."""
        strides = self.parameter.stride()
        if tensor.stride() != strides or not is_dense(tensor):
            tensor = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device="cpu"
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def shaped(self, flat: Tensor) -> Tensor:
        """The view of flat numbers (all of them) that has the parameter's shape."""
        shape, strides = self.parameter.shape, self.parameter.stride()
        return flat.as_strided(shape, strides, flat.storage_offset())


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank owns of a parameter: elements ``begin`` to ``end`` of its space.

    Attributes:
        slot: the parameter.
        begin, end: of the space.
        master: float32 leaf given to the wrapped optimizer: flat, or of the parameter's shape.
    """

    slot: Slot
    begin: int
    end: int
    master: torch.nn.Parameter

    def gradient(self, whole: bool) -> Tensor | None:
        """Of the master, in float32; ``None`` where the parameter has none."""
        gradient = self.slot.parameter.grad
        if gradient is None:
            return None
        if whole:
            return gradient.detach().float()
        flat = self.slot.flat(gradient.detach())
        return flat[self.begin - self.slot.begin : self.end - self.slot.begin].float()


class Space:
    """Parameters of one dtype in one buffer, and this rank's masters.

    Args:
        slots: parameters as ``(name, parameter, group)``; they move into the buffer.
        world_size: ranks among which it is cut.
        rank: the one whose masters are made.
        whole: cut at borders of parameters only.

    Attributes:
        replica: flat, the parameters' dtype: what all ranks hold.
        master: flat float32: elements ``borders[rank]`` to ``borders[rank + 1]``.
        borders: where the part of each rank begins, and the end.
        pieces: this rank's, in order.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor, int]],
        world_size: int,
        rank: int,
        whole: bool,
    ) -> None:
        self.slots: list[Slot] = []
        self.dtype = parameters[0][1].dtype
        self.whole = whole
        begin = 0
        for name, parameter, group in parameters:
            end = begin + parameter.numel()
            self.slots.append(Slot(name, parameter, group, begin, end))
            begin = end + -end % _ALIGNMENT
        self.numel = begin
        self.borders = shard_borders(self.numel, world_size)
        if whole:
            starts = [*(slot.begin for slot in self.slots), self.numel]
            self.borders = [min(starts, key=lambda s: abs(s - b)) for b in self.borders]
        self.replica = torch.zeros(self.numel, dtype=self.dtype, device="cpu")
        for slot in self.slots:
            _move(slot, self.replica)
        self.own = slice(self.borders[rank], self.borders[rank + 1])
        self.master = self.replica[self.own].float().clone()
        self.pieces = [
            self._piece(slot)
            for slot in self.slots
            if max(slot.begin, self.own.start) < min(slot.end, self.own.stop)
        ]
        self.remember()

    def _piece(self, slot: Slot) -> Piece:
        begin, end = max(slot.begin, self.own.start), min(slot.end, self.own.stop)
        master = self.master[begin - self.own.start : end - self.own.start]
        if self.whole:
            master = slot.shaped(master)
        return Piece(slot, begin, end, torch.nn.Parameter(master))

    def name_at(self, index: int) -> str:
        """The name of the parameter that holds an element."""
        return next(slot.name for slot in reversed(self.slots) if slot.begin <= index)

    def remember(self) -> None:
        """Take the parameters as they are now for those this library wrote."""
        self._versions = [slot.parameter._version for slot in self.slots]

    def changed(self) -> list[Slot]:
        """Parameters that something else wrote since :meth:`remember`, as far as torch can tell.

        Raises:
            RuntimeError: a parameter lies elsewhere now.
        """
        start, size = self.replica.data_ptr(), self.replica.element_size()
        for slot in self.slots:
            moved = slot.parameter.data_ptr() != start + slot.begin * size
            if moved and slot.parameter.numel():
                raise RuntimeError(
                    f"parameter {slot.name!r} no longer lies where ShardedOptimizer put it: "
                    "something set its .data (model.to(), half(), an exchange of weights). Do that "
                    "before you make the optimizer, and write into parameters with copy_()"
                )
        return [
            slot
            for slot, version in zip(self.slots, self._versions, strict=True)
            if slot.parameter._version != version
        ]

    def take_over(self, slots: Sequence[Slot]) -> None:
        """Make the masters of these parameters what the model holds."""
        for slot in slots:
            begin, end = max(slot.begin, self.own.start), min(slot.end, self.own.stop)
            if begin < end:
                own = self.master[begin - self.own.start : end - self.own.start]
                own.copy_(self.replica[begin:end])


def _move(slot: Slot, buffer: Tensor) -> None:
    """Give a parameter its place in the buffer, with its numbers and its strides."""
    parameter = slot.parameter
    place = buffer[slot.begin : slot.end]
    values = parameter.detach()
    if is_dense(values):
        view = place.as_strided(values.shape, values.stride(), place.storage_offset())
    else:
        view = place.view(values.shape)
    view.copy_(values)
    parameter.data = view
