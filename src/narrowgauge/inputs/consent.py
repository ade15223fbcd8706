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
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.collectives.transport import CollectiveError, Transport, tag_of

WORD_LANE, TEXT_LANE = 2040, 2041
_FIELDS = 8


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
        self._sent = 0  # words to each peer so far
        self._round = 0
        # Kept until the peers must have got them: only then may their memory go.
        self._under_way: deque[tuple[int, list[Any]]] = deque()
        self._received: dict[int, int] = {}
        self._posted: dict[int, tuple[torch.Tensor, dist.Work]] = {}
        self._beats: threading.Thread | None = None
        if transport is not None:
            for peer in transport.peers:
                self._received[peer] = 0
                self._post(peer)
            self._beats = threading.Thread(target=self._beat, daemon=True, name="feed-alive")
            self._beats.start()

    def close(self) -> None:
        """Say nothing any more."""
        self._over.set()
        if self._beats is not None and self._beats is not threading.current_thread():
            self._beats.join()

    def tell(self, session: int, told: Told) -> None:
        """Say a word to all other ranks; do not wait for theirs."""
        if self._transport is None:
            return
        text = (
            torch.frombuffer(bytearray(told.text.encode()), dtype=torch.uint8)
            if told.text
            else None
        )
        message = torch.tensor(
            [told.word, session, 0 if text is None else len(text), *told.numbers],
            dtype=torch.int64,
            device="cpu",
        )
        with self._lock:
            works: list[Any] = [message, text]
            for peer in self._transport.peers:
                where = "telling others about a batch: "
                works.append(
                    self._transport.send(message, peer, tag_of(self._sent, WORD_LANE), where)
                )
                if text is not None:
                    works.append(
                        self._transport.send(text, peer, tag_of(self._sent, TEXT_LANE), where)
                    )
            self._sent += 1
            self._under_way.append((self._round, works))

    def hear(self, session: int, batch: int) -> dict[int, Told]:
        """Wait for the word of every other rank about a batch; by rank.

        Raises:
            CollectiveError: a rank died, or was silent for longer than the timeout.
        """
        found = (
            {}
            if self._transport is None
            else {peer: self._hear(peer, session, batch) for peer in self._transport.peers}
        )
        with self._lock:
            self._round += 1
            # Who has spoken in this round has heard everything said before the last one.
            while self._under_way and self._under_way[0][0] < self._round - 1:
                self._under_way.popleft()
        return found

    def _hear(self, peer: int, session: int, batch: int) -> Told:
        assert self._transport is not None
        begin = time.monotonic()
        while True:
            message, work = self._posted[peer]
            self._transport.wait([(peer, work)], f"before batch {batch} waiting for the word of")
            word, of_session, size, *numbers = message.tolist()
            text = ""
            if size:
                text = self._text(peer, size)
            self._received[peer] += 1
            self._post(peer)
            if word != Word.ALIVE and of_session == session:
                return Told(Word(word), tuple(numbers), text)
            if word == Word.ALIVE and time.monotonic() - begin > self._patience:
                raise CollectiveError(
                    f"{self._transport.named([self._transport.rank])} has batch {batch}, but "
                    f"{self._transport.named([peer])} has not asked for it within "
                    f"{self._patience:g} s, although it lives. All ranks must ask for equally "
                    "many batches; look at what it does"
                )

    def _text(self, peer: int, size: int) -> str:
        assert self._transport is not None
        text = torch.empty(size, dtype=torch.uint8, device="cpu")
        work = self._transport.receive(text, peer, tag_of(self._received[peer], TEXT_LANE))
        self._transport.wait([(peer, work)], "waiting for an error's text from")
        return bytes(text.tolist()).decode(errors="replace")

    def _post(self, peer: int) -> None:
        """Begin receiving the next word early: its journey is then one way only."""
        assert self._transport is not None
        message = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
        work = self._transport.receive(message, peer, tag_of(self._received[peer], WORD_LANE))
        self._posted[peer] = message, work

    def _beat(self) -> None:
        assert self._transport is not None
        while not self._over.wait(self._transport.timeout.total_seconds() / 3):
            try:
                self.tell(0, Told(Word.ALIVE))
            except CollectiveError:
                return  # whoever waits for the others' words learns more


def described(error: BaseException) -> str:
    """Type, text and traceback of an error, for other ranks."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return f"{type(error).__name__}: {error}\n\n{''.join(lines)}"


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
    everybody = {**told, rank: own}
    ranks = sorted(everybody)
    for other in ranks:
        if everybody[other].word == Word.ERROR and other != rank:
            raise FeedError(f"rank {other} failed: {everybody[other].text}")
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
