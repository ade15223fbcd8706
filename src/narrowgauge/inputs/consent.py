"""All ranks go on together, or none: what they tell each other before every batch.

Before a rank hands out a batch it tells all others that it has it, and waits for their word. So a
rank that leaves the loop, meets an error or finds its source at the end takes the others with it at
the *same* batch, and nobody is left in a collective of the training step. The price is one small
message to each rank per batch, about 0.2 ms on a local network.

A rank that is busy elsewhere (writing a checkpoint, say) is no dead rank: a thread tells the others
every third of the timeout that this process lives.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from narrowgauge.collectives.transport import CollectiveError, Transport, tag_of

WORD_LANE, TEXT_LANE = 2040, 2041
_FIELDS = 8
_TEXT_BYTES = 8192
_AHEAD = 16
_LAST_WORDS_SECONDS = 3.0
_ARRIVED = timedelta(milliseconds=100)  # more than enough for what has arrived


class FeedError(RuntimeError):
    """Another rank's error: its rank, the type and text of the error, and its traceback."""


class Word(IntEnum):
    """What a rank says before a batch."""

    ALIVE = 0  # between the batches
    HAVE = 1
    END = 2
    STOP = 3
    ERROR = 4


@dataclass(frozen=True)
class Told:
    """What one rank said.

    Attributes:
        word: which of the words.
        numbers: five whole numbers beside it.
        text: the error, with ``ERROR``.
    """

    word: Word
    numbers: tuple[int, ...] = (0, 0, 0, 0, 0)
    text: str = ""


class Consent:
    """The words between all ranks of a feed.

    Args:
        transport: their messages; ``None`` for a single rank.
        patience: how long a rank that lives may take before the others give up.
    """

    def __init__(self, transport: Transport | None, patience: timedelta) -> None:
        self._transport = transport
        self._patience = patience.total_seconds()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._words = self._texts = 0  # to each of the others so far
        self._round = 0
        # A message whose work or memory is dropped before it has arrived is never sent.
        self._under_way: deque[tuple[int, list[tuple[dist.Work, torch.Tensor]]]] = deque()
        self._ears: dict[int, _Ear] = {}
        self._beats: threading.Thread | None = None
        if transport is not None:
            self._ears = {peer: _Ear(transport, peer) for peer in transport.peers}
            self._beats = threading.Thread(target=self._beat, daemon=True, name="feed-alive")
            self._beats.start()

    def close(self) -> None:
        """Say nothing any more, once the others have got what was said last."""
        self._over.set()
        if self._beats is not None and self._beats is not threading.current_thread():
            self._beats.join()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for _, sent in self._under_way:
            for work, _ in sent:
                with suppress(RuntimeError):  # a rank that is gone or busy; it will learn of us
                    work.wait(timedelta(seconds=max(1e-3, deadline - time.monotonic())))
        self._under_way.clear()

    def tell(self, session: int, told: Told) -> None:
        """Say a word to all other ranks; do not wait for theirs."""
        if self._transport is None or self._over.is_set():
            return
        text = _packed(told.text) if told.text else None
        word = torch.tensor(
            [told.word, session, text is not None, *told.numbers], dtype=torch.int64, device="cpu"
        )
        where = "telling about a batch: "
        with self._lock:
            sent: list[tuple[dist.Work, torch.Tensor]] = []
            for peer in self._transport.peers:
                tag = tag_of(self._words, WORD_LANE)
                sent.append((self._transport.send(word, peer, tag, where), word))
                if text is not None:
                    tag = tag_of(self._texts, TEXT_LANE)
                    sent.append((self._transport.send(text, peer, tag, where), text))
            self._words += 1
            self._texts += text is not None
            self._under_way.append((self._round, sent))

    def hear(self, session: int, batch: int) -> dict[int, Told]:
        """Wait for the word of every other rank about a batch; by rank.

        Raises:
            CollectiveError: a rank died, or was silent for longer than the timeout.
        """
        found = {peer: self._hear(ear, session, batch) for peer, ear in self._ears.items()}
        with self._lock:
            self._round += 1
            # Who has spoken in this round has heard everything said before the last one.
            while self._under_way and self._under_way[0][0] < self._round - 1:
                self._under_way.popleft()
        return found

    def last_errors(self, session: int) -> dict[int, Told]:
        """Errors that ranks told before the connection to them broke; by rank.

        They lie in what was received ahead. A rank that ends with its error may be gone before its
        other messages are.
        """
        found: dict[int, Told] = {}
        end = time.monotonic() + _LAST_WORDS_SECONDS  # one that lives goes on saying so
        for peer, ear in self._ears.items():
            with suppress(CollectiveError):  # nothing more has arrived
                while peer not in found and time.monotonic() < end:
                    word, of_session, numbers, text = ear.next(0, _ARRIVED)
                    if word == Word.ERROR and of_session == session:
                        found[peer] = Told(word, numbers, text)
        return found

    def _hear(self, ear: _Ear, session: int, batch: int) -> Told:
        assert self._transport is not None
        begin = time.monotonic()
        while True:
            word, of_session, numbers, text = ear.next(batch)
            if word != Word.ALIVE and of_session == session:
                return Told(word, numbers, text)
            if word == Word.ALIVE and time.monotonic() - begin > self._patience:
                raise CollectiveError(
                    f"{self._transport.named([self._transport.rank])} has batch {batch}, but "
                    f"{self._transport.named([ear.peer])} has not asked for it within "
                    f"{self._patience:g} s, although it lives. All ranks must ask for equally "
                    "many batches; look at what it does"
                )

    def _beat(self) -> None:
        assert self._transport is not None
        while not self._over.wait(self._transport.timeout.total_seconds() / 3):
            try:
                self.tell(0, Told(Word.ALIVE))
            except CollectiveError:
                return  # whoever waits for the others' words learns more


class _Ear:
    """Words of one rank, received ahead: they arrive though nobody listens, one way only."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self.peer = peer
        self._transport = transport
        self._words: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._posted = self._posted_texts = 0
        self._post_words()
        self._text = self._post_text()

    def next(
        self, batch: int, timeout: timedelta | None = None
    ) -> tuple[Word, int, tuple[int, ...], str]:
        """Wait for the next word: the word, its session, its numbers, its text."""
        if not self._words:
            self._post_words()
        message, work = self._words.popleft()
        where = f"before batch {batch} waiting for the word of"
        self._transport.wait([(self.peer, work)], where, timeout)
        if len(self._words) <= _AHEAD // 2:
            with suppress(CollectiveError):  # it is gone, but what it said before counts first
                self._post_words()  # several at once: seldom between a step and its batch
        word, session, has_text, *numbers = message.tolist()
        text = ""
        if has_text:
            packed, work = self._text
            self._transport.wait([(self.peer, work)], "waiting for the error of", timeout)
            text = bytes(packed.tolist()).rstrip(b"\0").decode(errors="replace")
            with suppress(CollectiveError):
                self._text = self._post_text()
        return Word(word), session, tuple(numbers), text

    def _post_words(self) -> None:
        while len(self._words) < _AHEAD:
            message = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
            tag = tag_of(self._posted, WORD_LANE)
            self._words.append((message, self._transport.receive(message, self.peer, tag)))
            self._posted += 1

    def _post_text(self) -> tuple[torch.Tensor, dist.Work]:
        packed = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        tag = tag_of(self._posted_texts, TEXT_LANE)
        self._posted_texts += 1
        return packed, self._transport.receive(packed, self.peer, tag)


def _packed(text: str) -> torch.Tensor:
    """A text in a message of fixed size; what is too long lacks its middle."""
    raw = text.encode(errors="backslashreplace")  # names of files may hold surrogates
    if len(raw) > _TEXT_BYTES:
        half = _TEXT_BYTES // 2 - 8
        raw = raw[:half] + b" [...] " + raw[-half:]
    return torch.tensor(list(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device="cpu")


def described(error: BaseException) -> str:
    """Type, text and traceback of an error, for other ranks."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    try:
        text = str(error)
    except Exception:  # the others must hear of it all the same
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}\n\n{''.join(lines)}"


def raise_told(told: dict[int, Told], cause: BaseException | None = None) -> None:
    """Raise the error that another rank told, if one did.

    Raises:
        FeedError: of the lowest such rank.
    """
    for other in sorted(told):
        if told[other].word == Word.ERROR:
            raise FeedError(f"rank {other} failed: {told[other].text}") from cause


def verdict(told: dict[int, Told], own: Told, rank: int, names: Sequence[str]) -> Word:
    """What all ranks do, by what all have said; equal on all ranks.

    Args:
        told: by the others, by rank.
        own: what this rank said.
        rank: this one.
        names: what the first numbers mean; these must be equal on all ranks.

    Raises:
        FeedError: a rank has an error, or ranks disagree about the batch.
    """
    raise_told(told)
    everybody = {**told, rank: own}
    ranks = sorted(everybody)
    if any(everybody[other].word == Word.STOP for other in ranks):
        return Word.STOP
    ended = [other for other in ranks if everybody[other].word == Word.END]
    if ended and len(ended) < len(ranks):
        others = [other for other in ranks if other not in ended]
        raise FeedError(
            f"the source of ranks {ended} is at its end, that of ranks {others} is not. With "
            "source='shard' every rank must read the same batches; use source='rank0' where they "
            "cannot"
        )
    if ended:
        return Word.END
    first = everybody[ranks[0]]
    for other in ranks:
        for name, here, there in zip(names, first.numbers, everybody[other].numbers, strict=False):
            if here != there:
                raise FeedError(
                    f"{name} is {there} on rank {other}, {here} on rank {ranks[0]}. All ranks must "
                    "read the same samples in the same order: load the same state on all, and with "
                    "source='shard' give all the same dataset and sampler"
                )
    return Word.HAVE
