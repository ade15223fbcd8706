"""The all-gather of what masters are ahead of replicas: encode, send, receive, add.

Every rank codes the difference of its own part, and everybody, the owner included, adds the same
bytes to its replica. So replicas stay bit-identical, and what rounding withheld is still in the
next difference. The parts are cut into chunks; while one is on the wire the next is coded by the
calling thread and the last is added by another, neither holding the GIL. Blocks that cannot be
coded follow their chunk as float32.
"""

from __future__ import annotations

import queue
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge import kernels
from narrowgauge.collectives.reduction import Pending
from narrowgauge.collectives.threads import Inbox, work_on
from narrowgauge.collectives.transport import CollectiveError, Transport, tag_of
from narrowgauge.kernels.differences import (
    ESCAPED,
    apply_difference,
    difference_sizes,
    encode_difference,
)
from narrowgauge.kernels.grid import DifferenceBlocks
from narrowgauge.parameters.space import Space

_GREETING_BYTES = 256
_READY = b"ready "
_INFINITY = 0x7F800000
_LANE = 1


@dataclass
class Chunk:
    """A stretch of each rank's part of a space, as ``(begin, end)`` per rank, and its messages."""

    space: Space
    stretches: list[tuple[int, int]]
    messages: list[Tensor]
    receives: list[tuple[int, dist.Work]] = field(default_factory=list)
    ahead: list[Tensor] = field(default_factory=list)  # float32 of our blocks that escaped


@dataclass(eq=False)
class Exchanged(Pending):
    """One exchange under way; afterwards, what it took.

    Attributes:
        bytes_sent: payload this rank handed to the transport.
        encode_seconds, decode_seconds: time in kernels of the calling and of the other thread.
        wire_seconds: time in which the other thread waited for messages.
        escaped: blocks of this rank that travelled as float32.
        not_finite: where masters hold NaN or infinity, as (space, element), on all ranks alike.
    """

    bytes_sent: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wire_seconds: float = 0.0
    escaped: int = 0
    not_finite: list[tuple[Space, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()


class Exchange:
    """Exchanges differences on one transport, one after another.

    Args:
        transport: of the ranks.
        blocks: how differences are coded; ``None``: masters travel as they are.
        message_bytes: size of the messages.
        tolerance: see :func:`~narrowgauge.kernels.differences.encode_difference`.
    """

    def __init__(
        self,
        transport: Transport,
        blocks: DifferenceBlocks | None,
        message_bytes: int,
        tolerance: float,
    ) -> None:
        self.transport = transport
        self.blocks = blocks
        self.message_bytes = message_bytes
        self.tolerance = tolerance
        self._chunks: dict[tuple[int, bool], list[Chunk]] = {}
        self._failure: BaseException | None = None
        self._refusals: list[tuple[Tensor, dist.Work]] = []
        self._inbox: Inbox = queue.SimpleQueue()
        if transport.world_size > 1:
            work_on(self._inbox, self)

    def refuse(self, text: str) -> None:
        """Make the ranks that come to the next exchange raise ``text``, for we will not come."""
        self._failure = self._failure or CollectiveError(text)
        number = self.transport.reserve(1)
        for peer in self.transport.peers:
            greeting = _greeting(text.encode(errors="backslashreplace"))
            work = self.transport.send(greeting, peer, tag_of(number, 0))
            self._refusals.append((greeting, work))

    def run(
        self, spaces: Sequence[Space], step: int, plain: bool = False, settings: str = ""
    ) -> Exchanged:
        """Bring the replicas of all ranks to what masters are.

        Args:
            spaces: all of them, equal on every rank.
            step: its number, equal on every rank.
            plain: masters as they are, whatever the format.
            settings: of the param groups, as text equal on every rank.

        Raises:
            CollectiveError: a rank died, did not come, refused, or is at another step.
        """
        if self._failure is not None:
            raise CollectiveError(
                "an earlier exchange of parameters on this group failed; restart the ranks "
                f"(torchrun does). First failure: {self._failure}"
            ) from self._failure
        result, transport = Exchanged(), self.transport
        blocks = None if plain else self.blocks
        if transport.world_size == 1:
            for space in spaces:
                _check_finite(space, result)
                if not result.not_finite:
                    space.replica.copy_(space.master)
            return result
        chunks = [chunk for space in spaces for chunk in self._chunks_of(space, blocks)]
        first = transport.reserve(1 + 2 * len(chunks))
        greetings = {
            peer: torch.zeros(_GREETING_BYTES, dtype=torch.uint8, device="cpu")
            for peer in transport.peers
        }
        greeted = [
            (peer, transport.receive(greetings[peer], peer, tag_of(first, 0), "greeting "))
            for peer in transport.peers
        ]
        tags = [tag_of(first + 1 + 2 * number, _LANE) for number in range(len(chunks))]
        sends: list[tuple[int, dist.Work]] = []

        def send(message: Tensor, tag: int) -> None:
            for peer in transport.peers if message.numel() else ():
                sends.append((peer, transport.send(message, peer, tag, "with parameters ")))
                result.bytes_sent += message.numel() * message.element_size()

        try:
            if blocks is None:
                for space in spaces:
                    _check_finite(space, result)
            own = f"{step} {plain} {zlib.crc32(settings.encode())}"
            status = _READY + f"{own} ".encode()
            if result.not_finite:
                space, index = result.not_finite[0]
                status += f"nan {spaces.index(space)} {index} ".encode()
            send(_greeting(status), tag_of(first, 0))
            if blocks is None:  # masters arrive in the parameters themselves: not before all agree
                self._agree(greeted, greetings, result, own, spaces)
                if result.not_finite:
                    transport.wait(sends, "sending parameters to")
                    return result
            for chunk, tag in zip(chunks, tags, strict=True):
                chunk.receives = [
                    (peer, transport.receive(chunk.messages[peer], peer, tag, "parameters "))
                    for peer in transport.peers
                    if chunk.messages[peer].numel()
                ]
            if blocks is not None:
                agree = partial(self._agree, greeted, greetings, result, own, spaces)
                self._inbox.put(partial(self._do, result, agree))
            for chunk, tag in zip(chunks, tags, strict=True):
                if blocks is not None:
                    begin = time.perf_counter()
                    self._encode(chunk, blocks, result)
                    result.encode_seconds += time.perf_counter() - begin
                send(chunk.messages[transport.rank], tag)
                for ahead in chunk.ahead:
                    send(ahead, tag + 1)
                self._inbox.put(
                    partial(self._do, result, partial(self._decode, chunk, tag, blocks, result))
                )
            self._inbox.put(partial(self._do, result, result.finish))
            result.wait()
            transport.wait(sends, "sending parameters to")
        except BaseException as error:
            self._failure = self._failure or error
            raise
        return result

    def _do(self, result: Exchanged, stage: Callable[[], None]) -> None:
        if result.is_completed():
            return
        try:
            with torch.no_grad():
                stage()
        except BaseException as error:
            self._failure = self._failure or error
            result.finish(error)

    def _agree(
        self,
        greeted: list[tuple[int, dist.Work]],
        greetings: dict[int, Tensor],
        result: Exchanged,
        own: str,
        spaces: Sequence[Space],
    ) -> None:
        """Wait until all ranks are here, at this step; raise what one of them could not do."""
        begin = time.perf_counter()
        self.transport.wait(greeted, "before exchanging parameters, waiting for")
        result.wire_seconds += time.perf_counter() - begin
        step, how, settings = own.split()
        for peer in sorted(greetings):
            text = bytes(greetings[peer].tolist()).rstrip(b"\0")
            name = self.transport.named([peer])
            if not text.startswith(_READY):
                raise CollectiveError(f"{name} did not step: {text.decode(errors='replace')}")
            number, its_how, its_settings, *found = text.removeprefix(_READY).decode().split()
            if (number, its_how) != (step, how):
                raise CollectiveError(
                    f"{name} is at step {number} of its ShardedOptimizer, "
                    f"{self.transport.named([self.transport.rank])} at {step}: all ranks must step "
                    "equally often. A GradScaler skips steps where it finds infinities, on each "
                    "rank by itself; torch.distributed.fsdp.ShardedGradScaler skips on all"
                )
            if its_settings != settings:
                raise CollectiveError(
                    f"{name} has other settings in its param groups (lr, weight_decay) at step "
                    f"{step} than {self.transport.named([self.transport.rank])}: each would train "
                    "its part in another way. A scheduler that follows a loss must follow one that "
                    "is equal on all ranks"
                )
            if found:
                result.not_finite.append((spaces[int(found[1])], int(found[2])))
        result.not_finite.sort(key=lambda place: (spaces.index(place[0]), place[1]))

    def _encode(self, chunk: Chunk, blocks: DifferenceBlocks, result: Exchanged) -> None:
        space, rank = chunk.space, self.transport.rank
        begin, end = chunk.stretches[rank]
        master = space.master[begin - space.own.start : end - space.own.start]
        replica = space.replica[begin:end].float()  # itself, if it is float32
        message = chunk.messages[rank]
        chunk.ahead = []
        count = encode_difference(master, replica, blocks, message, tolerance=self.tolerance)
        if count:
            escaped = _escaped(message, end - begin, blocks)
            padded = torch.nn.functional.pad(master, (0, -len(master) % blocks.size))
            chunk.ahead = [padded.view(-1, blocks.size)[escaped].flatten()]
            result.escaped += count

    def _decode(
        self, chunk: Chunk, tag: int, blocks: DifferenceBlocks | None, result: Exchanged
    ) -> None:
        space, transport = chunk.space, self.transport
        own = transport.rank
        for peer in [own, *transport.peers]:
            begin, end = chunk.stretches[peer]
            if begin == end:
                continue
            message = chunk.messages[peer]
            if peer != own:
                receives = [each for each in chunk.receives if each[0] == peer]
                self._wait(receives, "waiting for parameters of", result)
            started = time.perf_counter()
            replica = space.replica[begin:end]
            if blocks is None:
                if peer == own or message.data_ptr() != replica.data_ptr():
                    replica.copy_(message)
                result.decode_seconds += time.perf_counter() - started
                continue
            wide = replica.float()
            apply_difference(message, blocks, wide)
            if wide is not replica:
                replica.copy_(wide)
            escaped = _escaped(message, end - begin, blocks)
            result.decode_seconds += time.perf_counter() - started
            if escaped.numel():
                if peer == own:
                    ahead = chunk.ahead[0]
                else:
                    ahead = torch.empty(
                        escaped.numel() * blocks.size, dtype=torch.float32, device="cpu"
                    )
                    work = transport.receive(ahead, peer, tag + 1, "parameters ")
                    self._wait([(peer, work)], "waiting for parameters of", result)
                found = _overwrite(replica, escaped, ahead.view(-1, blocks.size))
                result.not_finite += [(space, begin + index) for index in found]

    def _wait(self, works: list[tuple[int, dist.Work]], phase: str, result: Exchanged) -> None:
        begin = time.perf_counter()
        self.transport.wait(works, phase)
        result.wire_seconds += time.perf_counter() - begin

    def _chunks_of(self, space: Space, blocks: DifferenceBlocks | None) -> list[Chunk]:
        key = id(space), blocks is None
        if key not in self._chunks:
            self._chunks[key] = list(self._cut(space, blocks))
        return self._chunks[key]

    def _cut(self, space: Space, blocks: DifferenceBlocks | None) -> list[Chunk]:
        bits = 32 if blocks is None else blocks.grid.bits
        step = max(1, round(self.message_bytes * 8 / bits / 1024)) * 1024
        borders, ranks = space.borders, range(self.transport.world_size)
        longest = max(borders[rank + 1] - borders[rank] for rank in ranks)
        chunks = []
        for offset in range(0, longest, step):
            stretches = [
                (
                    min(borders[rank] + offset, borders[rank + 1]),
                    min(borders[rank] + offset + step, borders[rank + 1]),
                )
                for rank in ranks
            ]
            chunks.append(Chunk(space, stretches, self._messages(space, stretches, blocks)))
        return chunks

    def _messages(
        self, space: Space, stretches: list[tuple[int, int]], blocks: DifferenceBlocks | None
    ) -> list[Tensor]:
        if blocks is not None:
            return [
                torch.zeros(
                    sum(difference_sizes(end - begin, blocks)), dtype=torch.uint8, device="cpu"
                )
                for begin, end in stretches
            ]
        messages = []
        for rank, (begin, end) in enumerate(stretches):
            if rank == self.transport.rank:
                messages.append(space.master[begin - space.own.start : end - space.own.start])
            elif space.dtype == torch.float32:
                messages.append(space.replica[begin:end])
            else:
                messages.append(torch.zeros(end - begin, dtype=torch.float32, device="cpu"))
        return messages


def _greeting(text: bytes) -> Tensor:
    padded = text[: _GREETING_BYTES - 1].ljust(_GREETING_BYTES, b"\0")
    return torch.tensor(list(padded), dtype=torch.uint8, device="cpu")


def _check_finite(space: Space, result: Exchanged) -> None:
    """Note the first master that is not finite."""
    master = space.master
    if int(kernels.largest_magnitudes(master, threads=1)) >= _INFINITY:
        index = int((~master.isfinite()).nonzero()[0])
        result.not_finite.append((space, space.own.start + index))


def _escaped(message: Tensor, numel: int, blocks: DifferenceBlocks) -> Tensor:
    """Numbers of the blocks that escaped."""
    scales = message[: difference_sizes(numel, blocks)[0]]
    return (scales == ESCAPED).nonzero().flatten()


def _overwrite(replica: Tensor, escaped: Tensor, rows: Tensor) -> list[int]:
    """Put float32 rows in place of the blocks that escaped, but for those that are not finite.

    Returns:
        Where in ``replica`` the first number lies that is not finite, if there is one.
    """
    size = rows.shape[1]
    finite = rows.isfinite()
    usable = finite.all(1)
    places = (escaped[:, None] * size + torch.arange(size, device="cpu"))[usable].flatten()
    values = rows[usable].flatten()
    inside = places < replica.numel()
    replica[places[inside]] = values[inside].to(replica.dtype)
    if bool(usable.all()):
        return []
    row, column = (~finite).nonzero()[0].tolist()
    return [int(escaped[row]) * size + column]
