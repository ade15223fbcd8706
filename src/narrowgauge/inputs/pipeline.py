"""The threads of one iteration: reading, sending, receiving, staging, each ahead of use.

Where a rank reads for itself, one thread reads, cuts and stages. Rank 0 reads in one thread and
sends in another, so that reading goes on while a batch travels. The other ranks receive and stage
in one. What is ready lies in a queue; a thread ends with the data, with an error, or when it is
told to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from narrowgauge.collectives.transport import CollectiveError
from narrowgauge.inputs.budget import Budget, Closed, Horizon
from narrowgauge.inputs.source import Position, Read, Source
from narrowgauge.inputs.split import Share
from narrowgauge.inputs.staging import Stage, Staged
from narrowgauge.inputs.structure import Habits, byte_count, cut
from narrowgauge.inputs.wire import Header, Kind, Receiver, Sender


@dataclass
class Delivery:
    """A batch that is ready.

    Attributes:
        staged: this rank's part.
        position: behind it.
        total: samples in the global batch.
        held: bytes it holds on this rank.
        read_seconds: that reading it took, where it was read.
        wire_seconds: that this rank sent or received it.
        copy_seconds: that cutting and staging took.
        bytes_sent: by this rank.
    """

    staged: Staged
    position: Position
    total: int
    held: int
    read_seconds: float = 0.0
    wire_seconds: float = 0.0
    copy_seconds: float = 0.0
    bytes_sent: int = 0


@dataclass
class Failure:
    """An error of a thread."""

    error: BaseException


class Over:
    """There is nothing more."""


Item = Delivery | Failure | Over
Shares = Callable[[int, int], "list[Share] | None"]
"""The shares of all ranks in a batch of so many samples, of which a full one has so many."""


class Pipeline:
    """One iteration on one rank.

    Args:
        rank: of this one.
        start: the position behind which the iteration begins.
        shares: how batches are split.
        source: what is read here, if anything.
        sender: on rank 0, where it reads for others.
        receiver: on ranks that do not read.
        stage: brings parts to the device.
        budget: bytes held on this rank.
        beat: seconds after which others hear from rank 0, if there is nothing else.

    Attributes:
        ready: what can be used, in order.
        here: how far this rank may read.
        everywhere: how far rank 0 may send.
    """

    def __init__(
        self,
        rank: int,
        start: Position,
        shares: Shares,
        source: Source | None,
        sender: Sender | None,
        receiver: Receiver | None,
        stage: Stage,
        budget: Budget,
        beat: float,
    ) -> None:
        self._rank = rank
        self._start = start
        self._shares = shares
        self._source = source
        self._sender = sender
        self._receiver = receiver
        self._stage = stage
        self._budget = budget
        self._beat = beat
        self._habits = Habits()
        self._inbox: queue.SimpleQueue[Read | Failure | Over] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.here = Horizon()
        self.everywhere = Horizon()
        if receiver is not None:
            works = {"feed-receive": self._receive_all}
        elif sender is not None:
            works = {"feed-read": self._read_for_all, "feed-send": self._send_all}
        else:
            works = {"feed-read": self._read_here}
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell the threads to end; do not wait."""
        self.here.close()
        self.everywhere.close()
        self._inbox.put(Over())

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end; whether they did."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _reads(self) -> Any:
        """What is read, with the shares in it; no further than allowed."""
        assert self._source is not None
        number = 0
        self.here.allows(number)
        reads = self._source.read(self._start)
        try:
            for read in reads:
                shares = self._shares(read.total, read.position.full)
                if shares is None:
                    continue
                if self.here.closed:
                    return
                read.held = byte_count(read.batch)
                self._budget.hold(read.held)
                yield number, read, shares
                number += 1
                del read
                self.here.allows(number)
        finally:
            reads.close()  # ends a loader's workers

    def _read_here(self) -> None:
        try:
            for number, read, shares in self._reads():
                del number
                self._put_own(read, shares, 0)
            self.ready.put(Over())
        except Closed:
            pass
        except BaseException as error:
            self.ready.put(Failure(error))

    def _put_own(self, read: Read, shares: list[Share], bytes_sent: int) -> Delivery:
        """Cut and stage this rank's part, and put it where it can be used."""
        begin = time.perf_counter()
        share = shares[self._rank]
        if read.share is not None:  # it was read alone
            share = Share(0, read.share.rows, read.share.rows, read.rows)
        skeleton, tensors = cut(read.batch, read.rows, share, self._habits)
        staged = self._stage.bring(skeleton, tensors, None, self._budget.room + 1)
        self._budget.hold(staged.new_bytes, read.held + staged.new_bytes)
        delivery = Delivery(
            staged,
            read.position,
            read.total,
            read.held + staged.new_bytes,
            read_seconds=read.seconds,
            copy_seconds=time.perf_counter() - begin,
            bytes_sent=bytes_sent,
        )
        self.ready.put(delivery)
        return delivery

    def _read_for_all(self) -> None:
        try:
            for number, read, _ in self._reads():
                del number
                self._inbox.put(read)
                del read
            self._inbox.put(Over())
        except Closed:
            self._inbox.put(Over())
        except BaseException as error:
            self._inbox.put(Failure(error))

    def _send_all(self) -> None:
        assert self._sender is not None
        number = 0
        try:
            while isinstance(read := self._next_read(number), Read):
                self._send(number, read)
                number += 1
                del read
            self.ready.put(read)
        except Closed:
            pass
        except BaseException as error:
            self.ready.put(Failure(error))
        finally:
            with suppress(CollectiveError):  # whoever is gone needs to hear nothing
                self._sender.announce(Kind.OVER)

    def _next_read(self, number: int) -> Read | Failure | Over:
        """The next batch, once all ranks have room for it; the others hear that we live."""
        assert self._sender is not None
        while True:
            try:
                read = self._inbox.get(timeout=self._beat)
                break
            except queue.Empty:
                self._sender.announce(Kind.WAIT)
        if isinstance(read, Read):
            while not self.everywhere.allows(number, self._beat):
                self._sender.announce(Kind.WAIT)
        return read

    def _send(self, number: int, read: Read) -> None:
        assert self._sender is not None
        begin = time.perf_counter()
        shares = self._shares(read.total, read.position.full)
        assert shares is not None
        parts, headers = {}, {}
        position = read.position
        for rank, share in enumerate(shares):
            if rank == self._rank:
                continue
            parts[rank] = cut(read.batch, read.total, share, self._habits)
            headers[rank] = Header(
                Kind.BATCH,
                number,
                position.epoch,
                position.samples,
                read.total,
                position.full,
                share.rows,
                position.digest,
                round(read.seconds * 1e6),
            )
        cutting = time.perf_counter() - begin
        before = self._sender.bytes_sent
        begin = time.perf_counter()
        sent = self._sender.send(headers, parts)
        del parts
        try:
            delivery = self._put_own(read, shares, self._sender.bytes_sent - before)
        finally:  # what was begun must arrive, or the others wait for it
            self._sender.wait(sent, f"sending batch {number} to")
        delivery.wire_seconds = time.perf_counter() - begin
        delivery.copy_seconds += cutting

    def _receive_all(self) -> None:
        number, failed = 0, False
        try:
            while (header := self._next_header(number)).kind == Kind.BATCH:
                received = self._receive(header)
                number += 1
                if failed or self.here.closed:  # only taken off the wire
                    _discard(received)
                    continue
                try:
                    self._put_received(header, *received)
                except Exception as error:
                    failed = True
                    self.ready.put(Failure(error))
                del received
            if not failed:
                self.ready.put(Over())
        except BaseException as error:
            self.ready.put(Failure(error))

    def _next_header(self, number: int) -> Header:
        assert self._receiver is not None
        header = self._receiver.header(number)
        while header.kind == Kind.WAIT:
            header = self._receiver.header(number)
        return header

    def _receive(self, header: Header) -> Any:
        assert self._receiver is not None
        begin = time.perf_counter()
        slots, leaves = self._stage.slots, self._receiver.leaves
        slot = slots.take(self._budget.room + 1)
        memory = slot.memory([leaf.byte_count(header.rows) for leaf in leaves], slots.pinned)
        self._receiver.tensors(memory, header.number)
        tensors = [
            leaf.tensor(place, header.rows) for leaf, place in zip(leaves, memory, strict=True)
        ]
        return self._receiver.skeleton, tensors, slot, time.perf_counter() - begin

    def _put_received(
        self, header: Header, skeleton: Any, tensors: Any, slot: Any, seconds: float
    ) -> None:
        begin = time.perf_counter()
        if header.number == 0:
            self._check_start(header)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._budget.hold(size)
        staged = self._stage.bring(skeleton, tensors, slot, self._budget.room + 1)
        self._budget.hold(staged.new_bytes, size + staged.new_bytes)
        self.ready.put(
            Delivery(
                staged,
                Position(header.epoch, header.samples, header.digest, header.full),
                header.total,
                size + staged.new_bytes,
                read_seconds=header.microseconds / 1e6,
                wire_seconds=seconds,
                copy_seconds=time.perf_counter() - begin,
            )
        )

    def _check_start(self, header: Header) -> None:
        here = self._start.epoch, self._start.samples
        there = header.epoch, header.samples - header.total
        if here != there and (here[0] != there[0] or here[1] > there[1]):
            raise ValueError(
                f"this rank would go on in epoch {here[0]} behind sample {here[1]}, rank 0 goes on "
                f"in epoch {there[0]} behind sample {there[1]}. Load the same state on all ranks"
            )


def _discard(received: Any) -> None:
    received[2].busy = False
