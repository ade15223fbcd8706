"""From the host's memory to the device, ahead of use.

On the CPU a part is handed on as it lies. On CUDA it goes through page-locked slots and a stream of
its own, with an event per slot: the copy runs while the model computes, the model's stream waits
for the event only, and a slot is not written again before its copy is done. ``on_device`` runs
behind the copy, so that what travels can be narrower than what the model sees.

The part for CUDA was written without a GPU at hand: it has never run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.inputs.slots import Slot, Slots
from narrowgauge.inputs.structure import bytes_of, fill, tensors_of


@dataclass
class Staged:
    """A part, ready for use.

    Attributes:
        batch: nested, on the device.
        new_bytes: of tensors that ``on_device`` or the copy made.
        slot: the memory it lies in, or was copied from.
        event: on CUDA: when it is there.
    """

    batch: Any
    new_bytes: int
    slot: Slot | None
    event: Any


class Stage:
    """Brings parts to a device; used by one thread, but for :meth:`hand_over`.

    Args:
        device: where to.
        on_device: what to make of a part there.
    """

    def __init__(self, device: torch.device, on_device: Callable[[Any], Any] | None) -> None:
        self.device = device
        self._on_device = on_device
        self.slots = Slots(pinned=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(
        self, skeleton: Any, tensors: list[torch.Tensor], slot: Slot | None, count: int
    ) -> Staged:
        """Start bringing a part to the device.

        Args:
            skeleton: its structure.
            tensors: its tensors, in a slot or anywhere in the host's memory.
            slot: where they lie, if in a slot.
            count: how many slots there are in turn.
        """
        if self._stream is None:
            there = tensors
            if self.device.type != "cpu":
                there = [tensor.to(self.device) for tensor in tensors]
            return self._finish(skeleton, tensors, there, slot, None)
        if slot is None:
            slot, tensors = self._pinned(tensors, count)
        with torch.cuda.stream(self._stream):
            there = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            slot.event = torch.cuda.Event()
            slot.event.record(self._stream)
            staged = self._finish(skeleton, tensors, there, slot, None)
            staged.event = torch.cuda.Event()
            staged.event.record(self._stream)
        return staged

    def hand_over(self, staged: Staged) -> Any:
        """The part for use on the caller's stream."""
        if staged.event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(staged.event)
            for tensor in tensors_of(staged.batch):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return staged.batch

    def _finish(
        self,
        skeleton: Any,
        tensors: list[torch.Tensor],
        there: list[torch.Tensor],
        slot: Slot | None,
        event: Any,
    ) -> Staged:
        batch = fill(skeleton, there)
        if self._on_device is not None:
            with torch.no_grad():
                batch = self._on_device(batch)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        new = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_of(batch)
        }
        made = sum(size for pointer, size in new.items() if pointer not in known)
        return Staged(batch, made, slot, event)

    def _pinned(self, tensors: list[torch.Tensor], count: int) -> tuple[Slot, list[torch.Tensor]]:
        slot = self.slots.take(count)
        raw = [bytes_of(tensor) for tensor in tensors]
        memory = slot.memory([piece.numel() for piece in raw], pinned=True)
        pinned = []
        for tensor, piece, place in zip(tensors, raw, memory, strict=True):
            place.copy_(piece)
            typed = torch.empty(0, dtype=tensor.dtype)
            pinned.append(typed.set_(place.untyped_storage(), 0, tensor.shape, tensor.stride()))
        return slot, pinned
