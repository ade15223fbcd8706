"""One reduction under way: what it reduces, its message buffers, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from narrowgauge.collectives.greeting import FINGERPRINT_BYTES, headed
from narrowgauge.collectives.layout import Layout
from narrowgauge.collectives.message import Arithmetic
from narrowgauge.collectives.transport import tag_of


class Pending:
    """Something under way, to be waited for like a ``torch.distributed.Work``."""

    def __init__(self, on_success: Callable[[], None] | None = None) -> None:
        self.on_success = on_success
        self._on_finish: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        """Whether it is over, with success or not."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Block until the result is in place.

        Raises:
            CollectiveError: a rank died, did not answer in time, or this rank failed.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it is over (at once if it is), from whatever thread ends it."""
        with self._lock:
            if not self._finished.is_set():
                self._on_finish.append(callback)
                return
        callback()

    def finish(self, error: BaseException | None = None) -> None:
        """End it: for those who make it only. The first call counts."""
        with self._lock:
            if self._finished.is_set():
                return
            self._error = error
            if error is None and self.on_success is not None:
                try:
                    self.on_success()
                except BaseException as own_error:  # concerns this reduction, not the group
                    self._error = own_error
            self._finished.set()
        for callback in self._on_finish:
            callback()


class Reduction(Pending):
    """One reduction under way on one group of ranks.

    Attributes:
        residual: what rounding withheld so far, or ``None`` without error feedback.
        name: what it reduces, for messages.
        at_once: whether the calling thread does all the stages, because it would wait anyway.
        bytes_sent: payload this rank hands to the transport, headers included.
        codec_seconds: time in kernels, summed over the stages.
        wire_seconds: time the stages waited for messages.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        plan: Plan,
        arithmetic: Arithmetic,
        on_success: Callable[[], None] | None = None,
        name: str = "",
        at_once: bool = False,
    ) -> None:
        super().__init__(on_success)
        self.flat = flat
        self.plan = plan
        self.arithmetic = arithmetic
        self.residual: torch.Tensor | None = None
        self.name = name
        self.at_once = at_once
        self.bytes_sent = 0
        self.codec_seconds = 0.0
        self.wire_seconds = 0.0
        self.messages: Messages | None = None
        self.first_number = 0
        self.greeting_receives: list[tuple[int, dist.Work]] = []
        self.first_receives: list[list[tuple[int, dist.Work]]] = []
        self.second_receives: list[list[tuple[int, dist.Work]]] = []
        self.sends: list[tuple[int, dist.Work]] = []
        self.inference = torch.is_inference_mode_enabled()

    @property
    def where(self) -> str:
        """How messages about a phase begin: ``"in bucket 3 "``."""
        return f"in {self.name} " if self.name else ""

    @property
    def greeting_tag(self) -> int:
        """Tag of the greetings, in a lane that all plans share."""
        return tag_of(self.first_number, 0)

    def tag(self, chunk: int) -> int:
        """Tag of a chunk's codes; its sums have the next one."""
        return tag_of(self.first_number + 1 + 2 * chunk, self.plan.lane)

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count the time inside as codec time."""
        begin = time.perf_counter()
        yield
        with self._lock:
            self.codec_seconds += time.perf_counter() - begin

    @contextmanager
    def wire(self) -> Iterator[None]:
        """Count the time inside as waiting for the wire."""
        begin = time.perf_counter()
        yield
        with self._lock:
            self.wire_seconds += time.perf_counter() - begin

    def sent(self, peer: int, work: dist.Work, size: int) -> None:
        """Count a message of ``size`` bytes; two stages send, so sums are made under a lock."""
        with self._lock:
            self.sends.append((peer, work))
            self.bytes_sent += size


class Messages:
    """The buffers of one reduction: per chunk, what comes in, goes out, and is summed.

    One-shot: ``incoming[chunk][rank]`` is every rank's message, our own included. Two-shot:
    ``incoming`` holds everybody's codes of *our* piece, ``outgoing`` our codes of everybody's, and
    ``reduced`` the sums of every piece. Of these, a reduce-scatter has the first two, an all-gather
    the last, and a small float32 reduction the first, with all numbers in one message.

    ``heads[peer]`` is what we send first, and ``greetings[peer]`` where theirs arrives, while a
    reduction is under way; if they carry more than a fingerprint, the buffers of the first chunk
    are parts of them.
    """

    def __init__(self, plan: Plan, rank: int, world_size: int) -> None:
        layout, peers = plan.layout, [peer for peer in range(world_size) if peer != rank]
        self.greetings: dict[int, torch.Tensor] = {}
        self.heads = dict.fromkeys(peers, plan.fingerprint)
        self.incoming: list[list[torch.Tensor]] = []
        self.outgoing: list[list[torch.Tensor]] = []
        self.reduced: list[list[torch.Tensor]] = []

        def message(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8, device="cpu")

        chunks = layout.chunks
        if layout.kind in ("two-shot", "all-gather"):
            self.reduced = [[message(piece.size) for piece in chunk] for chunk in chunks]
        if layout.kind in ("two-shot", "reduce-scatter"):
            self.incoming = [[message(c[rank].size) for _ in range(world_size)] for c in chunks]
            self.outgoing = [[message(piece.size) for piece in chunk] for chunk in chunks]
            if plan.carries:
                for peer in peers:
                    self.heads[peer] = headed(plan.fingerprint, chunks[0][peer].size)
                    self.outgoing[0][peer] = self.heads[peer][FINGERPRINT_BYTES:]
            for incoming, outgoing in zip(self.incoming, self.outgoing, strict=True):
                incoming[rank] = outgoing[rank]
        elif layout.kind != "all-gather":
            if layout.kind == "one-shot":
                sizes = [chunk[0].size for chunk in chunks]
            else:
                sizes = [4 * layout.numel] if plan.carries else []
            self.incoming = [[message(size) for _ in range(world_size)] for size in sizes]
            if plan.carries:
                own = headed(plan.fingerprint, sizes[0])
                self.heads = dict.fromkeys(peers, own)
                self.incoming[0][rank] = own[FINGERPRINT_BYTES:]

    def greet_into(self, greetings: dict[int, torch.Tensor], carries: bool) -> None:
        """Let the greetings of the next reduction, and what they carry, arrive in these."""
        self.greetings = greetings
        if carries:
            for peer, greeting in greetings.items():
                size = self.incoming[0][peer].numel()
                self.incoming[0][peer] = greeting[FINGERPRINT_BYTES : FINGERPRINT_BYTES + size]


class Plan:
    """A layout, what identifies it among ranks, and the buffers left by finished reductions.

    ``carries``: whether the first messages travel with the greetings.
    """

    def __init__(
        self, layout: Layout, description: str, fingerprint: torch.Tensor, carries: bool
    ) -> None:
        self.layout = layout
        self.description = description
        self.fingerprint = fingerprint
        self.carries = carries
        self.lane = 1 + int.from_bytes(bytes(fingerprint.tolist()), "little") % 2047
        self.free: list[Messages] = []
