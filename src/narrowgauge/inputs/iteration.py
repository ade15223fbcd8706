"""One iteration over a feed on one rank: take a batch, agree with the other ranks, hand it over."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from narrowgauge.collectives.transport import CollectiveError
from narrowgauge.inputs.budget import Budget
from narrowgauge.inputs.consent import (
    Consent,
    FeedError,
    Told,
    Word,
    described,
    raise_told,
    verdict,
)
from narrowgauge.inputs.pipeline import Delivery, Failure, Over, Pipeline
from narrowgauge.inputs.source import Position
from narrowgauge.inputs.split import Share
from narrowgauge.inputs.staging import Stage
from narrowgauge.inputs.stalls import Stalls, Step
from narrowgauge.ledger import Ledger

_COMPARED = (
    "the epoch",
    "the number of samples so far",
    "the digest of the samples so far",
    "the size of the batch",
)


@dataclass(frozen=True)
class BatchInfo:
    """What a feed says about the batch it gave last.

    Attributes:
        epoch: its epoch, from 0.
        number: of the batch in this iteration, from 0.
        samples: of the epoch that were delivered with it, on all ranks together.
        counts: samples of each rank in it, padding left out.
        rank: this one.
    """

    epoch: int
    number: int
    samples: int
    counts: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """Samples of this rank; they are the first rows of its part."""
        return self.counts[self.rank]

    @property
    def total(self) -> int:
        """Samples of all ranks."""
        return sum(self.counts)

    @property
    def weight(self) -> float:
        """By what to multiply this rank's *mean* loss, so that DDP's mean is that of all samples.

        It is 1.0 where all ranks have equally many samples, and 0.0 for an empty part, whose mean
        is NaN: use a sum there, or ``torch.nan_to_num``.
        """
        return self.count * len(self.counts) / self.total


@dataclass(frozen=True)
class Parts:
    """What all iterations of a feed share.

    Attributes:
        rank: this one.
        reads: whether it reads the source.
        timeout: seconds the source may take for a batch.
        patience: seconds that ranks which live may take before others give up.
        shares: how a batch of so many samples, of which a full one has so many, is split.
        consent: the words between the ranks.
        stage: brings parts to the device.
        stalls: where waiting is counted.
        ledger: where bytes and seconds are.
    """

    rank: int
    reads: bool
    timeout: float
    patience: float
    shares: Callable[[int, int], list[Share] | None]
    consent: Consent
    stage: Stage
    stalls: Stalls
    ledger: Ledger


@dataclass
class Progress:
    """How far the user of a feed is.

    Attributes:
        position: behind the batch given last.
        resumes: whether the next iteration begins there, not at a new epoch.
        batch: about the batch given last.
        ended_by: ranks that left the last iteration before its end.
    """

    position: Position = field(default_factory=Position)
    resumes: bool = True
    batch: BatchInfo | None = None
    ended_by: tuple[int, ...] = ()


class FeedIterator:
    """One iteration over a :class:`Feed`, on this rank.

    Attributes:
        over: whether it is at its end.
    """

    def __init__(
        self,
        feed: object,
        parts: Parts,
        progress: Progress,
        budget: Budget,
        pipeline: Pipeline,
        session: int,
    ) -> None:
        self.over = False
        self._feed = feed  # which ends its threads when nobody holds it any more
        self._parts = parts
        self._progress = progress
        self._budget = budget
        self._pipeline = pipeline
        self._session = session
        self._number = 0
        self._used: Delivery | None = None
        self._delivered_at = 0.0
        self._process = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: no rank has one, or a rank left its loop.
            FeedError: another rank has an error.
            CollectiveError: a rank died.
            Exception: whatever the source of this rank raised.
        """
        if self.over:
            raise StopIteration
        if self._is_copy:
            raise RuntimeError(
                "this iteration over a feed was begun before this process was forked; its threads "
                "and connections belong to the parent process. Iterate there"
            )
        parts, begin = self._parts, time.perf_counter()
        try:
            self._release()
            item = self._take()
            if isinstance(item, Failure):
                error = item.error
                del item  # or error, traceback and this frame would hold each other
                if isinstance(error, StopIteration):  # which would end the loop as if all were read
                    raise RuntimeError("on_device raised StopIteration") from error
                raise error
            own = Told(Word.END) if isinstance(item, Over) else self._have(item)
            waited = time.perf_counter()
            parts.consent.tell(self._session, own)
            told = parts.consent.hear(self._session, self._number)
            word = verdict(told, own, parts.rank, _COMPARED)
        except FeedError:
            self._end()
            raise
        except BaseException as error:
            self._tell_others(Told(Word.ERROR, text=described(error)))
            self._end()
            if isinstance(error, CollectiveError):  # perhaps because a rank ended with its error
                raise_told(parts.consent.last_errors(self._session), error)
            raise
        if word == Word.HAVE and isinstance(item, Delivery):
            now = time.perf_counter()
            self._count(item, begin, waited, now)
            batch = self._hand_over(item)
            # Last of all: the threads it wakes compete with this one for the interpreter.
            self._allow_more([own, *told.values()])
            return batch
        if word == Word.STOP:
            left = sorted(rank for rank, said in told.items() if said.word == Word.STOP)
            self._progress.ended_by = tuple(left)
            warnings.warn(
                f"rank {left[0]} left the loop over the feed before batch {self._number}, so it "
                "ends here on all ranks",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._progress.position = Position(self._progress.position.epoch + 1)
            self._progress.resumes = True
        self._end()
        raise StopIteration

    def close(self) -> None:
        """Leave the iteration: it ends on all ranks, before the batch not yet asked for."""
        if not self.over and not self._is_copy:
            self._tell_others(Told(Word.STOP))
            self._progress.ended_by = (self._parts.rank,)
            self._end()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    @property
    def _is_copy(self) -> bool:
        """Whether this is the copy in a forked process, which must not speak for its parent."""
        return os.getpid() != self._process

    def _take(self) -> Delivery | Failure | Over:
        parts = self._parts
        # Who receives hears from rank 0 in time, or its thread raises.
        limit = parts.timeout if parts.reads else parts.patience
        try:
            return self._pipeline.ready.get(timeout=limit)
        except Empty:
            if not parts.reads:
                raise TimeoutError(
                    f"rank 0 lives, but batch {self._number} was not ready here within "
                    f"{limit:g} s; see whether on_device hangs"
                ) from None
            raise TimeoutError(
                f"the source gave no batch {self._number} within {parts.timeout:g} s. If reading "
                "takes that long, pass a longer timeout; a DataLoader with num_workers and a "
                "timeout of its own says which worker hangs"
            ) from None

    def _have(self, item: Delivery) -> Told:
        position = item.position
        digest = int.from_bytes(bytes.fromhex(position.digest)[:8], "little", signed=True)
        room = self._budget.room
        return Told(Word.HAVE, (position.epoch, position.samples, digest, item.total, room))

    def _allow_more(self, told: list[Told]) -> None:
        self._pipeline.here.advance(self._number + self._budget.room)
        self._pipeline.everywhere.advance(self._number + min(said.numbers[4] for said in told))
        self._number += 1

    def _hand_over(self, item: Delivery) -> Any:
        parts, progress = self._parts, self._progress
        progress.position = item.position
        found = parts.shares(item.total, item.position.full)
        assert found is not None
        progress.batch = BatchInfo(
            item.position.epoch,
            self._number,
            item.position.samples,
            tuple(share.count for share in found),
            parts.rank,
        )
        batch = parts.stage.hand_over(item.staged)
        item.staged.batch = None  # only the user holds it now
        self._used = item
        return batch

    def _count(self, item: Delivery, begin: float, waited: float, now: float) -> None:
        seconds = now - self._delivered_at if self._number else 0.0
        self._delivered_at = now
        times = item.read_seconds, item.wire_seconds, item.copy_seconds
        self._parts.stalls.add(Step(seconds, waited - begin, now - waited, *times))
        self._parts.ledger.record(
            "inputs",
            bytes_sent=item.bytes_sent,
            codec_seconds=item.copy_seconds,
            wire_seconds=item.wire_seconds,
            read_seconds=item.read_seconds,
            wait_seconds=waited - begin,
        )

    def _release(self) -> None:
        """The next batch is asked for: the memory of the last one may be used again."""
        used, self._used = self._used, None
        if used is not None:
            self._budget.release(used.held)
            if used.staged.slot is not None:
                used.staged.slot.busy = False

    def _tell_others(self, told: Told) -> None:
        with suppress(CollectiveError):  # they know already, or are no more
            self._parts.consent.tell(self._session, told)

    def _end(self) -> None:
        self.over = True
        self._pipeline.close()
