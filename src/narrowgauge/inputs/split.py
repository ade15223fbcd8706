"""Which samples of a batch belong to which rank: arithmetic only, no tensors.

A batch is always the *global* one, whoever reads it; each rank gets neighbouring samples of it, in
rank order. What to do when it does not divide evenly is the ``tail``:

* ``"exact"``: every sample once; the first ranks get one more, a rank may get none. * ``"drop"``:
all ranks get equally many in every batch; a batch smaller than a full one is left out. * ``"pad"``:
all ranks get equally many rows in every batch; missing ones repeat samples of the
  batch, are not counted, and come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Tail = Literal["exact", "drop", "pad"]
TAILS: tuple[str, ...] = get_args(Tail)


@dataclass(frozen=True)
class Share:
    """What one rank gets of a batch.

    Attributes:
        start: its first sample, counted in the batch.
        count: how many samples are its own.
        rows: how many rows it gets; those above ``count`` repeat samples of the batch.
        total: samples in the batch.
    """

    start: int
    count: int
    rows: int
    total: int

    @property
    def indices(self) -> list[int]:
        """The sample of each row, counted in the batch."""
        own = list(range(self.start, self.start + self.count))
        repeated = range(self.start + self.count, self.start + self.rows)
        return own + [number % self.total for number in repeated]


def shares(total: int, world_size: int, tail: Tail, full: int) -> list[Share] | None:
    """The shares of all ranks in a batch of ``total`` samples, or ``None``: it is left out.

    Args:
        total: samples in this batch.
        world_size: number of ranks.
        tail: see the module.
        full: samples in a full batch.

    Raises:
        ValueError: with ``tail="drop"``, a batch that is not left out does not divide evenly.
    """
    if total == 0 or (tail == "drop" and total < full):
        return None
    if tail == "drop" and total % world_size:
        raise ValueError(
            f"a batch of {total} samples does not divide evenly among {world_size} ranks, so "
            f"tail='drop' would lose {total % world_size} of each; use a batch size that divides, "
            "tail='exact' or tail='pad'"
        )
    each, more = divmod(total, world_size)
    counts = [each + (rank < more) for rank in range(world_size)]
    padded = -(-max(total, full) // world_size)
    found, start = [], 0
    for count in counts:
        found.append(Share(start, count, padded if tail == "pad" else count, total))
        start += count
    return found


def batches(order: Iterable[Any], batch_size: int, drop_last: bool = False) -> Iterator[list[Any]]:
    """Cut what an order gives into batches of ``batch_size``; the last one may be smaller."""
    batch: list[Any] = []
    for index in order:
        batch.append(index)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch


def rows_of(batch: Sequence[Any], share: Share) -> list[Any]:
    """The elements of ``batch`` (one per sample) that a share's rows hold."""
    return [batch[index] for index in share.indices]
