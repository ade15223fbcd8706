"""Memory that batches are received into, used again and again.

Fresh memory costs page faults, as much as copying it several times. So a buffer is used again,
under one rule: **not before the next batch was asked for, and not while anybody still holds a
tensor that lies in it** (a view, a numpy array). Who keeps a batch, as ``list(feed)`` does, keeps
it; the feed takes fresh memory then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

_use_count = getattr(torch._C, "_storage_Use_Count", None)
_PATIENCE = 0.02


@dataclass(eq=False)
class Slot:
    """Memory for the tensors of one batch.

    Attributes:
        buffers: uint8, one per tensor.
        busy: whether the feed itself still needs what lies in it.
        event: on CUDA: when the copy out of it is done.
    """

    buffers: list[torch.Tensor] = field(default_factory=list)
    busy: bool = False
    event: Any = None

    def memory(self, sizes: list[int], pinned: bool) -> list[torch.Tensor]:
        """Buffers of these sizes in bytes; those that are large enough stay."""
        while len(self.buffers) < len(sizes):
            self.buffers.append(_bytes(0, pinned))
        found = []
        for number, size in enumerate(sizes):
            if self.buffers[number].numel() < size:
                self.buffers[number] = _bytes(size, pinned)
            found.append(self.buffers[number][:size])
        return found

    @property
    def held(self) -> bool:
        """Whether somebody outside holds a tensor that lies in it."""
        return any(_is_held(buffer) for buffer in self.buffers if buffer.numel())


class Slots:
    """The slots of one rank; used by one thread, but for ``busy``.

    Args:
        pinned: whether to take page-locked memory, from which CUDA copies in the background.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._slots: list[Slot] = []

    def take(self, count: int) -> Slot:
        """A slot that nobody uses; there are about ``count`` in turn."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            for slot in self._slots:
                if not slot.busy and not slot.held:
                    self._slots.remove(slot)
                    return self._taken(slot)
            if len(self._slots) < count:
                return self._taken(Slot())
            # The loop's own variables hold the last batch for a moment after it asked for the next.
            if time.monotonic() > deadline:
                break
            time.sleep(1e-3)
        for slot in self._slots:
            if not slot.busy:
                self._slots.remove(slot)  # its memory belongs to who holds it
                break
        return self._taken(Slot())

    def _taken(self, slot: Slot) -> Slot:
        if slot.event is not None:
            slot.event.synchronize()
            slot.event = None
        slot.busy = True
        self._slots.append(slot)
        return slot


def _bytes(size: int, pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _is_held(buffer: torch.Tensor) -> bool:
    """Whether another tensor than ``buffer`` shares its memory."""
    if _use_count is None:
        return True
    # The buffer itself, and the storage object that is asked.
    storage = buffer.untyped_storage()
    count: int = _use_count(storage._cdata)
    return count > _own_uses()


def _own_uses() -> int:
    """What the count is when nobody else holds the memory; it depends on torch's version."""
    global _uses_alone
    if _uses_alone is None:
        assert _use_count is not None
        alone = torch.empty(1, dtype=torch.uint8, device="cpu")
        storage = alone.untyped_storage()
        _uses_alone = int(_use_count(storage._cdata))
    return _uses_alone


_uses_alone: int | None = None
