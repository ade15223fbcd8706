"""All ranks of a search decide alike: what they measured is compared, and rank 0 has the last word."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """The ranks that train a model together: those of its DistributedDataParallel, or one.

    Args:
        model: the model as it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        together = isinstance(model, DistributedDataParallel)
        self._group = model.process_group if together else None
        self.count = dist.get_world_size(self._group) if together else 1
        self.first = not together or dist.get_rank(self._group) == 0

    def all(self, value: Any) -> list[Any]:
        """What every rank passes, in rank order; each must call this."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def of_first(self, value: Any) -> Any:
        """What rank 0 passes, on all ranks."""
        return self.all(value if self.first else None)[0]
