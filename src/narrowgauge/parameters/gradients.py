"""Gradients that this room reduces itself: each rank gets the mean of the part it owns, no more.

An all-reduce would decode every gradient on every rank, of which a sharded optimizer needs a part:
the reduce-scatter half of it moves half of the bytes. In return it begins when the backward pass
is over, while a hook of DDP works during it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduction import Reduction
from narrowgauge.formats import Format
from narrowgauge.parameters.space import Space


class GradientReducer:
    """Averages gradients over the ranks, in a narrow format, into each rank's own part.

    Args:
        group: the ranks.
        format: gradients travel in it, scaled per parameter.
        timeout: of one message.
        message_bytes: size of the messages.
        settings: what must be equal on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        format: Format,
        timeout: timedelta | None,
        message_bytes: int,
        settings: Mapping[str, str],
    ) -> None:
        self._format = format
        self._reducer = Reducer(group, timeout, message_bytes, settings=settings)
        self._buffers: dict[int, Tensor] = {}

    def refuse(self) -> None:
        """Make the ranks that come to the next reduction raise."""
        self._reducer.refuse()

    def reduce(self, space: Space) -> tuple[Tensor, list[bool], Reduction]:
        """The mean over all ranks of this rank's part of a space.

        Returns:
            The part's gradients, flat float32; per slot, whether any rank has a gradient (a rank
            that has none counts as zero then); and what it took.

        Raises:
            CollectiveError: a rank died, did not come, or refused.
        """
        transport = self._reducer.transport
        present = torch.tensor(
            [slot.parameter.grad is not None for slot in space.slots],
            dtype=torch.uint8,
            device="cpu",
        )
        flat = self._buffers.setdefault(
            id(space), torch.zeros(space.numel, dtype=torch.float32, device="cpu")
        )
        for slot in space.slots:
            gradient = slot.parameter.grad
            place = flat[slot.begin : slot.end]
            if gradient is None:
                place.zero_()
            else:
                place.copy_(slot.flat(gradient.detach()))
        everybodys = transport.all_gather(present)
        begins = [slot.begin for slot in space.slots] + [space.numel]
        sizes = [after - begin for begin, after in pairwise(begins)]
        reduction = self._reducer.start(
            flat, sizes, [self._format] * len(sizes), kind="reduce-scatter", name="the gradients"
        )
        reduction.wait()
        anywhere = torch.stack(everybodys).any(0).tolist()
        return flat[space.own], anywhere, reduction
