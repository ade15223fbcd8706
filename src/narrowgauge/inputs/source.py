"""What is read: batches in an order that can be repeated, from any sample on.

A DataLoader over a dataset with indices is rebuilt around our own order: the order of an epoch
follows from a seed and the epoch's number, so it is the same on every rank, and reading can begin
at any sample without reading those before it. Everything else (iterable datasets, generators, other
loaders) is a stream: it is read as it comes, and goes on from a position only if it can say and
restore its own state, as torchdata's StatefulDataLoader does.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from narrowgauge.inputs.split import Share, batches, rows_of
from narrowgauge.inputs.structure import samples_in


@dataclass
class Position:
    """How far an epoch was delivered.

    Attributes:
        epoch: its number, from 0.
        samples: samples of it that were delivered, on all ranks together.
        digest: a hash of their indices in order, in hexadecimal (of their number, in a stream).
        full: samples in a full batch, where known.
        state: the stream's own state behind these samples, where it has one.
    """

    epoch: int = 0
    samples: int = 0
    digest: str = ""
    full: int = 0
    state: Any = None


@dataclass
class Read:
    """A batch as it was read.

    Attributes:
        batch: what the source gave.
        total: samples in the global batch.
        rows: samples in ``batch``, which may hold one rank's only.
        share: that rank's share, or ``None``: ``batch`` is the global one.
        position: the position behind it.
        seconds: how long reading it took.
        held: bytes of its tensors.
    """

    batch: Any
    total: int
    rows: int
    share: Share | None
    position: Position
    seconds: float
    held: int = 0


class Digest:
    """A running hash of sample indices."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, indices: Sequence[Any]) -> None:
        """Append the indices of samples."""
        try:
            numbers = numpy.asarray(indices, dtype=numpy.int64).tobytes()
        except (TypeError, ValueError, OverflowError):  # keys of another kind
            numbers = repr(list(indices)).encode()
        self._hash.update(numbers)

    @property
    def text(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


Choose = Callable[[int, int], "Share | None"]
"""The share of this rank in a batch of so many samples, of which a full one has so many; ``None``:
the batch is left out."""


class IndexedSource:
    """A DataLoader over a dataset with indices, read in our order.

    Args:
        loader: the user's.
        seed: decides the order of every epoch, and what loader workers draw.
        choose: which share to read of each batch; ``None``: all of it.
    """

    seekable = True

    def __init__(self, loader: DataLoader[Any], seed: int, choose: Choose | None) -> None:
        self._loader = loader
        self.seed = seed
        self._choose = choose
        self._plan = _Plan()
        self._generator = torch.Generator()
        self._inner = _rebuilt(loader, self._plan, self._generator)
        self.length: int | None = _length(loader.sampler)
        self.full = loader.batch_size or 0

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, if that is known."""
        return _length(self._loader)

    def read(self, start: Position) -> Generator[Read, None, None]:
        """The batches of an epoch behind a position, one by one.

        Raises:
            ValueError: the samples before the position are others than when it was saved.
        """
        digest, full, samples = Digest(), start.full or self.full, start.samples
        lists = self._lists(start, digest)
        if start.samples and digest.text != start.digest:
            raise ValueError(
                f"the first {start.samples} samples of epoch {start.epoch} are others than when "
                f"the state was saved (digest {digest.text}, saved {start.digest}): the dataset, "
                "the sampler or the seed changed. Use those of the saved run"
            )
        self._generator.manual_seed(_mixed(self.seed, start.epoch, "workers"))
        self._plan.begin(lists, self._choose, full)
        for batch, seconds in _timed(self._inner):
            left_out, indices, share = self._plan.drawn.popleft()
            full = full or len(indices)
            digest.add(left_out + indices)
            samples += len(left_out) + len(indices)
            rows = len(indices) if share is None else max(share.rows, 1)
            position = Position(start.epoch, samples, digest.text, full)
            yield Read(batch, len(indices), rows, share, position, seconds)
        if self._plan.drawn:
            raise RuntimeError(
                f"reading ended behind sample {samples} of epoch {start.epoch}, although there are "
                "more: the dataset, its transform or collate_fn raised StopIteration (a next() "
                "without a default, often). Let it raise another error, or none"
            )

    def _lists(self, start: Position, digest: Digest) -> Iterator[list[Any]]:
        """Indices of the batches behind ``start``; those before go into ``digest``."""
        batch_sampler = self._loader.batch_sampler
        if type(batch_sampler).__name__ == "BatchSampler" and self._loader.batch_size is not None:
            order = iter(_order(self._loader.sampler, self.seed, start.epoch))
            digest.add(list(islice(order, start.samples)))
            return batches(order, self._loader.batch_size, self._loader.drop_last)
        assert batch_sampler is not None
        _set_epoch(batch_sampler, start.epoch)
        lists = (list(batch) for batch in batch_sampler)
        skipped: list[Any] = []
        while len(skipped) < start.samples:
            skipped += next(lists, [None])
        digest.add(skipped)
        return lists


class _Plan(Sampler[list[Any]]):
    """The inner loader's batch sampler; remembers what it gave until the data has come."""

    def __init__(self) -> None:
        self.drawn: deque[tuple[list[Any], list[Any], Share | None]] = deque()

    def begin(self, lists: Iterator[list[Any]], choose: Choose | None, full: int) -> None:
        self.drawn.clear()
        self._lists, self._choose, self._full = lists, choose, full

    def __iter__(self) -> Iterator[list[Any]]:
        left_out: list[Any] = []
        for indices in self._lists:
            self._full = self._full or len(indices)
            share = None if self._choose is None else self._choose(len(indices), self._full)
            if self._choose is not None and share is None:
                left_out += indices
                continue
            self.drawn.append((left_out, indices, share))
            left_out = []
            if share is None:
                yield indices
            else:
                # Without a sample of its own a rank reads one, to know what a batch looks like.
                yield rows_of(indices, share) or indices[:1]


class StreamSource:
    """Any other iterable of batches, read as it comes.

    Args:
        loader: gives batches whenever it is iterated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._once = iter(loader) is loader if isinstance(loader, Iterator) else False
        self._begun = False
        self.length: int | None = None
        self.full = getattr(loader, "batch_size", None) or 0
        self.seed = 0  # it has an order of its own

    @property
    def seekable(self) -> bool:
        """Whether it can go on from a state of its own."""
        return all(
            callable(getattr(self._loader, name, None))
            for name in ("state_dict", "load_state_dict")
        )

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, if that is known."""
        return _length(self._loader)

    def read(self, start: Position) -> Generator[Read, None, None]:
        """As :meth:`IndexedSource.read`."""
        if self._once and self._begun:
            raise ValueError(
                f"the source is {_kind(self._loader)}, which can be read only once, and it was "
                "begun already; pass something that can be iterated again, such as a DataLoader "
                "or a list"
            )
        self._begun = True
        for part in (self._loader, *_parts(self._loader)):
            _set_epoch(part, start.epoch)
        samples, full = 0, start.full or self.full
        if start.state is not None:
            self._loader.load_state_dict(start.state)  # type: ignore[attr-defined]
            samples = start.samples
        for batch, seconds in _timed(self._loader):
            total = samples_in(batch)
            if total == 0:
                continue
            samples += total
            if samples <= start.samples:
                continue  # skipped, as was asked for
            if samples - total < start.samples:
                raise ValueError(
                    f"skipping {start.samples} samples ends inside of a batch of {total}; skip "
                    "with the batch size the state was saved with"
                )
            full = full or total
            state = self._loader.state_dict() if self.seekable else None  # type: ignore[attr-defined]
            position = Position(start.epoch, samples, _count_digest(samples), full, state)
            yield Read(batch, total, total, None, position, seconds)
        if samples < start.samples:
            raise ValueError(
                f"the source ended after {samples} samples, but {start.samples} of it were "
                "delivered when the state was saved; it is another source"
            )


def _timed(loader: Iterable[Any]) -> Generator[tuple[Any, float], None, None]:
    """What a loader gives, with the seconds it took; its workers end with it."""
    iterator = iter(loader)
    try:
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch, time.perf_counter() - begin
    except Exception as error:
        _explain_dead_workers(iterator, error)
        raise
    finally:
        # An error's traceback holds the iterator, so its workers would live as long as the error.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None and not getattr(loader, "persistent_workers", False):
            shut_down()


def _explain_dead_workers(iterator: Any, error: Exception) -> None:
    """Raise an error that says so if a worker was killed: torch may only miss its connection."""
    for worker in getattr(iterator, "_workers", ()):
        if isinstance(error, OSError):
            worker.join(0.2)  # its end is seen a moment after that of its connection
        if worker.exitcode is not None and worker.exitcode < 0:
            raise RuntimeError(
                f"DataLoader worker (pid {worker.pid}) was killed by signal {-worker.exitcode}; if "
                "nobody did it, memory ran out: use fewer num_workers or a smaller prefetch_factor"
            ) from error


Source = IndexedSource | StreamSource


def source_of(loader: Any, seed: int, choose: Choose | None) -> Source:
    """How to read what the user gave.

    Args:
        loader: a DataLoader, or any iterable of batches.
        seed: see :class:`IndexedSource`.
        choose: see :class:`IndexedSource`; a stream is read as a whole.

    Raises:
        TypeError: it is no iterable of batches.
        ValueError: it is split among ranks already.
    """
    check_loader(loader)
    if is_indexed(loader):
        return IndexedSource(loader, seed, choose)
    return StreamSource(loader)


def check_loader(loader: Any) -> None:
    """Raise TypeError or ValueError unless ``loader`` can be a source."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"loader is {_kind(loader)}, a dataset of single samples; wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=..., shuffle=True), with the batch "
            "size of all ranks together"
        )
    if isinstance(loader, IterableDataset) or inspect.isgeneratorfunction(loader):
        raise TypeError(
            f"loader is {_kind(loader)}; pass DataLoader(dataset, batch_size=...), or an iterable "
            "of batches (for a generator function: what it returns when called)"
        )
    if isinstance(loader, (str, bytes, dict, torch.Tensor)) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader is {_kind(loader)}; allowed: a torch.utils.data.DataLoader, or any iterable "
            "of batches"
        )
    sampler = getattr(loader, "sampler", None)
    for found in (sampler, getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(found, DistributedSampler):
            raise ValueError(
                "the loader has a DistributedSampler, but the feed splits batches among the ranks "
                "itself; leave it out (shuffle=True instead), and give the batch size of all ranks "
                "together"
            )


def is_indexed(loader: Any) -> bool:
    """Whether its dataset has indices, so that any sample can be read without those before it."""
    plain = type(loader) is DataLoader
    if type(loader).__name__ == "StatefulDataLoader" and isinstance(loader, DataLoader):
        plain = isinstance(loader.sampler, SequentialSampler) or _is_random(loader.sampler)
    return (
        plain
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and getattr(loader, "in_order", True)
    )


def draw_seed(loader: Any) -> int:
    """A seed from where the loader would draw it: its generator, or torch's global one."""
    generator = getattr(getattr(loader, "sampler", None), "generator", None)
    generator = generator or getattr(loader, "generator", None)
    empty = torch.empty((), dtype=torch.int64, device="cpu")
    return int(empty.random_(generator=generator).item())


def empty_digest() -> str:
    """The digest of no samples."""
    return Digest().text


def _count_digest(samples: int) -> str:
    """A stream has no indices: its digest says only how many samples there were."""
    return hashlib.blake2b(f"{samples} samples".encode(), digest_size=16).hexdigest()


def _order(sampler: Any, seed: int, epoch: int) -> Iterable[Any]:
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if _is_random(sampler):
        generator = torch.Generator().manual_seed(_mixed(seed, epoch, "order"))
        return RandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler.num_samples,
            generator=generator,
        )
    if type(sampler) in (WeightedRandomSampler, SubsetRandomSampler):
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator().manual_seed(_mixed(seed, epoch, "order"))
    _set_epoch(sampler, epoch)
    found: Iterable[Any] = iter(sampler)
    return found


def _is_random(sampler: Any) -> bool:
    """Torch's RandomSampler or torchdata's, which has the same arguments."""
    kind = type(sampler)
    return kind is RandomSampler or (
        kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata.")
    )


def _rebuilt(
    loader: DataLoader[Any], plan: Sampler[list[Any]], generator: torch.Generator
) -> DataLoader[Any]:
    """A loader as the user's, but for the order."""
    return DataLoader(
        loader.dataset,
        batch_sampler=plan,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,  # of its own: reading ahead must not draw from the user's
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _mixed(seed: int, epoch: int, use: str) -> int:
    digest = hashlib.blake2b(f"{use} {seed} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _set_epoch(thing: Any, epoch: int) -> None:
    """As every training loop does it, for those whose order depends on the epoch."""
    method = getattr(thing, "set_epoch", None)
    if callable(method):
        method(epoch)


def _parts(loader: Any) -> list[Any]:
    return [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _kind(thing: Any) -> str:
    return f"a {type(thing).__name__}"
