"""Feed: batches from one source to all ranks, split, ahead of use, in the dtype they are stored in.

Rank 0 reading for everybody usually means that the whole batch goes to every rank, in float32,
while all wait. Here each rank gets its own part only, as it is stored, while the step before is
computed. Where every rank can read the data, ``source="shard"`` sends nothing at all and is the
better choice; either way the same samples arrive at the same ranks in the same order.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from narrowgauge.collectives.transport import (
    Transport,
    members_of,
    refuse,
    timeout_of,
)
from narrowgauge.inputs.budget import Budget
from narrowgauge.inputs.consent import Consent
from narrowgauge.inputs.iteration import BatchInfo, FeedIterator, Parts, Progress
from narrowgauge.inputs.pipeline import Pipeline
from narrowgauge.inputs.resume import check_arguments, check_state, saved_state
from narrowgauge.inputs.source import (
    Position,
    Source,
    check_loader,
    draw_seed,
    is_indexed,
    source_of,
)
from narrowgauge.inputs.split import Share, Tail, shares
from narrowgauge.inputs.staging import Stage
from narrowgauge.inputs.stalls import StallReport, Stalls
from narrowgauge.inputs.wire import Receiver, Sender
from narrowgauge.ledger import Ledger

_JOIN_SECONDS = 5.0


class Feed:
    """Batches for every rank, from one loader; iterate it as you would the loader.

    All ranks create it at the same point of the program and iterate it equally often. The loader's
    batch is the *global* one: each rank gets its part of the samples, neighbours in the batch, in
    rank order. :attr:`batch` says how many are whose.

    Before each batch all ranks agree: an error in the source of one, its end, or a ``break`` on one
    rank ends the iteration on all at the same batch. The tensors of a batch stay as they are as
    long as somebody holds them; their memory is used again only after the next batch was asked for
    and when nobody does.

    Args:
        loader: a DataLoader, a StatefulDataLoader, or any iterable of nested batches (dicts,
            tuples, named tuples, dataclasses) of tensors of any dense dtype. The first dimension of
            every tensor counts samples; 0-d tensors and what is no tensor go to all ranks; a list
            with one element per sample is split too. With ``source="rank0"`` only rank 0's is used.
        device: where to; ``None``: the CPU.
        source: ``"shard"``: every rank reads its own samples (of a stream: everything, and keeps
            its own); ``"rank0"``: rank 0 reads and sends each rank its part.
        depth: batches ahead of use, at most.
        max_bytes: bytes of tensors held on one rank, at most; fewer batches are ahead then. It must
            have room for two batches: on rank 0, global ones.
        on_device: is called with each part on its device, ahead of use, without gradients, and
            returns what to deliver, e.g. floats made of uint8.
        tail: what to do with a batch that does not divide evenly: ``"exact"`` every sample once (a
            part may be empty: tensors of 0 rows), ``"drop"`` leave smaller batches out, ``"pad"``
            repeat samples behind the counted ones.
        timeout: seconds (or a timedelta) that a source may take for one batch, and that a rank may
            be silent, before every rank raises.
        seed: of the order of all epochs, where the loader shuffles; ``None``: drawn on rank 0 from
            the loader's generator or torch's.
        group: the ranks; ``None``: the default group, or this process alone.
        ledger: where to count bytes and seconds, one entry per batch, movement ``"inputs"``.

    Attributes:
        ledger: as given, or a new one.

    Raises:
        TypeError: an argument is of a wrong type, or a dataset of single samples.
        ValueError: a wrong argument, or a loader that is split among ranks already.
        CollectiveError: ranks passed different arguments, or one refused its own.
        RuntimeError: this rank is not in ``group``.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        device: torch.device | str | None = None,
        *,
        source: Literal["shard", "rank0"] = "shard",
        depth: int = 2,
        max_bytes: int = 1 << 30,
        on_device: Callable[[Any], Any] | None = None,
        tail: Tail = "exact",
        timeout: float | timedelta = 60.0,
        seed: int | None = None,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        alone = group is None and not dist.is_initialized()
        self._rank = 0 if alone else dist.get_rank(group)
        if self._rank < 0:
            raise RuntimeError("this rank is not a member of the given process group")
        reads = source == "shard" or self._rank == 0
        try:
            limit = check_arguments(
                source, depth, max_bytes, on_device, tail, timeout, seed, ledger
            )
            target = torch.device("cpu" if device is None else device)
            if reads:
                check_loader(loader)
                if seed is None:
                    seed = draw_seed(loader) if is_indexed(loader) else 0
            stage = Stage(target, on_device)
            self._world_size = 1 if alone else dist.get_world_size(group)
            divide = partial(_divide, self._world_size, tail)
            self._source: Source | None = None
            if reads:
                alone_here = source == "rank0" or self._world_size == 1
                own_part = None if alone_here else partial(_own, divide, self._rank)
                self._source = source_of(loader, seed or 0, own_part)
            own_facts = _facts(self._source)
        except Exception as error:
            if not alone:
                refuse(group, error)  # or the others would wait for this rank
            raise
        self._transport: Transport | None = None
        patience = limit
        if self._world_size > 1:
            settings = {
                "use": "inputs.Feed",
                "source": repr(source),
                "depth": str(depth),
                "tail": repr(tail),
                "timeout": str(limit),
            }
            self._transport = Transport(group, limit, settings=settings)
            patience = max(limit, timeout_of(members_of(group)))
        self._timeout = limit.total_seconds()
        self._tail: Tail = tail
        self._depth, self._max_bytes = depth, max_bytes
        self._budget = Budget(depth, max_bytes)
        self._seed = seed or 0
        self._length, self._batches, self._full = self._share_facts(*own_facts)
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        if self._transport is not None and source == "rank0":
            if self._rank == 0:
                self._sender = Sender(self._transport)
            else:
                self._receiver = Receiver(self._transport)
        self.ledger = Ledger() if ledger is None else ledger
        self._parts = Parts(
            rank=self._rank,
            reads=reads,
            timeout=self._timeout,
            patience=patience.total_seconds(),
            shares=divide,
            consent=Consent(self._transport, patience),
            stage=stage,
            stalls=Stalls(),
            ledger=self.ledger,
        )
        self._progress = Progress()
        self._session = 0
        self._active: weakref.ref[FeedIterator] | None = None
        self._pipelines: list[Pipeline] = []  # the last one; a list, for who ends it at the end
        self._closed = False
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._parts.consent, self._pipelines
        )

    def __iter__(self) -> FeedIterator:
        """Begin reading ahead.

        Raises:
            RuntimeError: the feed is closed, or is being iterated already.
        """
        if self._closed:
            raise RuntimeError("this feed is closed; make a new one")
        if self._under_way is not None:
            raise RuntimeError(
                "this feed is being iterated already; finish that, or close() its iterator. For "
                "two readers of the same data, make two feeds"
            )
        if self._pipelines and not self._pipelines[-1].join(self._timeout):
            raise RuntimeError(
                f"the source has been reading for {self._timeout:g} s since the last iteration "
                "ended; see why it hangs, or pass a longer timeout"
            )
        progress = self._progress
        if not progress.resumes:
            progress.position = Position(progress.position.epoch + 1)
        progress.resumes, progress.ended_by = False, ()
        self._session += 1
        before, self._budget = self._budget, Budget(self._depth, self._max_bytes)
        self._budget.most, self._budget.high_water = before.most, before.high_water
        pipeline = Pipeline(
            self._rank,
            progress.position,
            self._parts.shares,
            self._source,
            self._sender,
            self._receiver,
            self._parts.stage,
            self._budget,
            self._timeout / 3,
        )
        self._pipelines[:] = [pipeline]
        iterator = FeedIterator(self, self._parts, progress, self._budget, pipeline, self._session)
        self._active = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches in a whole epoch.

        Raises:
            TypeError: the source does not know.
        """
        if self._batches is None:
            raise TypeError("the source of this feed does not know how many batches it has")
        if self._tail == "drop" and self._length is not None and self._full:
            return self._length // self._full
        return self._batches

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its threads and loader workers; an iteration under way ends on all ranks."""
        if (active := self._under_way) is not None:
            active.close()
        self._closed = True
        self._finalizer()

    def stalls(self) -> StallReport:
        """How long this rank waited for its inputs so far, and why."""
        return self._parts.stalls.report(self._budget.high_water)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch given last, however much was read ahead of it.

        It is plain numbers and text, equal on all ranks, but for the state of a stream (a
        StatefulDataLoader over an iterable dataset), which only ranks that read have: save rank
        0's.
        """
        return saved_state(self._progress.position, self._seed, self._length)

    def load_state_dict(self, state: Mapping[str, Any], *, skip: bool = False) -> None:
        """Go on behind a saved position; every rank loads the same, on any number of ranks.

        Nothing is read again: a source with indices begins at the next sample. That the samples
        before it are still the same is checked by their digest when the iteration begins.

        Args:
            state: what :meth:`state_dict` gave.
            skip: for streams without a state of their own: read what was delivered again, and
                throw it away.

        Raises:
            ValueError: not such a state, one of another source, or a source that cannot go on.
            RuntimeError: the feed is being iterated.
        """
        if self._under_way is not None:
            raise RuntimeError("this feed is being iterated; load the state before that")
        position, seed = check_state(state, self._source, self._length, skip)
        self._progress.position, self._seed = position, seed
        if self._source is not None:
            self._source.seed = seed
        self._progress.resumes = True

    @property
    def batch(self) -> BatchInfo | None:
        """About the batch given last; ``None`` before the first."""
        return self._progress.batch

    @property
    def ended_by(self) -> tuple[int, ...]:
        """Ranks that left the last iteration before its end."""
        return self._progress.ended_by

    @property
    def _under_way(self) -> FeedIterator | None:
        active = None if self._active is None else self._active()
        return None if active is None or active.over else active

    def _share_facts(
        self, length: int, batches: int, full: int
    ) -> tuple[int | None, int | None, int]:
        """Samples, batches of an epoch and samples of a batch (and the seed), as rank 0 says."""
        if self._transport is not None:
            own = [self._seed, length, batches, full]
            facts = torch.tensor(own, dtype=torch.int64, device="cpu")
            self._seed, length, batches, full = self._transport.all_gather(facts)[0].tolist()
        if self._source is not None:
            self._source.seed = self._seed
        return (None if length < 0 else length), (None if batches < 0 else batches), full


# Functions, not methods: what holds a method holds the feed, which then ends late or never.


def _facts(source: Source | None) -> tuple[int, int, int]:
    """Samples and batches of an epoch, -1 where unknown, and samples of a full batch."""
    length = -1 if source is None or source.length is None else source.length
    batches = -1 if source is None or source.batches is None else source.batches
    return length, batches, 0 if source is None else source.full


def _divide(world_size: int, tail: Tail, total: int, full: int) -> list[Share] | None:
    return shares(total, world_size, tail, full)


def _own(
    divide: Callable[[int, int], list[Share] | None], rank: int, total: int, full: int
) -> Share | None:
    found = divide(total, full)
    return None if found is None else found[rank]


def _end(process: int, consent: Consent, pipelines: list[Pipeline]) -> None:
    """End all threads; at the interpreter's exit too, where C++ code could be cut short."""
    if os.getpid() != process:  # forked: threads and connections are the parent's
        return
    for pipeline in pipelines:
        pipeline.close()
    consent.close()
    for pipeline in pipelines:
        pipeline.join(_JOIN_SECONDS)
