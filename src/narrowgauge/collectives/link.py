"""What sending costs between these ranks, measured, and what an all-reduce then takes.

The classic model of a message is latency + bytes / bandwidth (R. Hockney, "The communication
challenge for MPP", Parallel Computing 20, 1994); beside it stands the time to encode and decode.
The numbers are measured once per group, with the messages and kernels that a reduction uses, on all
ranks at once, so that what ranks on one machine take from each other is in them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from narrowgauge.collectives.layout import MESSAGE_BYTES, cut
from narrowgauge.collectives.message import Arithmetic, pack, unpack
from narrowgauge.collectives.transport import Transport, tag_of
from narrowgauge.formats import format_of

_Message: TypeAlias = tuple[int, torch.Tensor, int]  # peer, bytes, tag

_MESSAGE_SECONDS = 4e-3
_SMALL_BYTES = 256
_FIRST_BYTES = 1 << 17  # what is sent first to find out how much fits into the time
_LARGEST_BYTES = 1 << 22
_LARGEST_FLOAT32_BYTES = 1 << 25  # which no cache holds, as in use
_ENOUGH_SECONDS = 0.1  # shorter transfers end before TCP has found the rate of a slow link
_SMALL_REPEATS = 11
_LARGE_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """What a message costs between these ranks, measured once per group and equal on every rank.

    Attributes:
        latency: seconds from the call that starts an exchange of small messages, of all ranks with
            all, until its caller goes on; our threads included.
        bytes_per_second: what one rank can send while it receives as much.
        codec_bytes_per_second: bytes of float32 that one rank encodes *and* decodes in a second,
            in one thread, in e5m2, while the other ranks do the same.
        float32_latency: seconds per step of torch's own all-reduce (Gloo), which makes 2(p-1).
        float32_bytes_per_second: what one rank sends per second in a large one, the division by
            the number of ranks included.
        wire_overlap: share of the time on the wire that hides behind other work of the rank: 1 on a
            link slower than its processors, towards 0 where sending is their work (loopback).
        codec_overlap: share of the codec's time that hides behind other work of the rank: 1 with a
            processor to spare, 0 without.

    Raises:
        ValueError: a number is not positive and finite, or an overlap not within 0 to 1.
    """

    latency: float
    bytes_per_second: float
    codec_bytes_per_second: float
    float32_latency: float
    float32_bytes_per_second: float
    wire_overlap: float = 1.0
    codec_overlap: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("overlap"):
                if not 0 <= value <= 1:
                    raise ValueError(f"{field.name} is {value}; allowed: 0 to 1")
            elif not 0 < value < math.inf:
                raise ValueError(
                    f"{field.name} is {value}; it must be positive and finite, in seconds or in "
                    "bytes per second"
                )


def measure_link(transport: Transport) -> Link:
    """Measure the link; all ranks of ``transport`` call it at one point, with nothing under way.

    With 2 to 4 ranks it took 0.3 to 0.8 s on a loopback and at 10 Gbit/s, 1.1 s at 1 Gbit/s and
    2.7 s at 100 Mbit/s, and each sent up to 1.3, 0.3, 0.1 and 0.03 GB. Each number is a median, of
    the slowest rank in each repetition; overlaps are the best seen, for they are differences, from
    which whatever else runs here only takes away.

    Raises:
        ValueError: there is one rank only, so there is no link.
        CollectiveError: a rank died or did not answer.
    """
    ranks = transport.world_size
    if ranks == 1:
        raise ValueError("the group has one rank, which sends nothing; there is no link to measure")
    steps, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    slowest = partial(_slowest, transport)
    encode_decode, another = _codec(), _codec()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(time.sleep, [1e-3] * 3))  # starts all three
        latency = slowest(lambda: _small_exchange(transport, threads), _SMALL_REPEATS)
        bandwidth, size, wire = _bandwidth(transport, partial(_exchange, transport))
        codec = slowest(encode_decode, _SMALL_REPEATS)
        two_codecs = slowest(
            lambda: _at_once(threads, encode_decode, another), _SMALL_REPEATS, take=min
        )
        passes = max(1, round(wire / codec))

        def encode_decode_long() -> None:
            for _ in range(passes):
                encode_decode()

        exchange = _exchange(transport, size)
        both = slowest(
            lambda: _at_once(threads, exchange, encode_decode_long), _LARGE_REPEATS, take=min
        )
    all_reduce = partial(_float32_all_reduce, transport)
    small = slowest(all_reduce(_SMALL_BYTES), _SMALL_REPEATS)
    float32_bandwidth, _, _ = _bandwidth(transport, all_reduce, _LARGEST_FLOAT32_BYTES)
    return Link(
        latency=latency,
        bytes_per_second=bandwidth,
        codec_bytes_per_second=4 * MESSAGE_BYTES / codec,
        float32_latency=small / steps,
        float32_bytes_per_second=share * float32_bandwidth,
        wire_overlap=_hidden_share(wire, passes * codec, both),
        codec_overlap=_hidden_share(codec, codec, two_codecs),
    )


def message_bytes_for(link: Link) -> int:
    """The size of messages for which sending one takes some milliseconds; a power of two.

    Smaller ones let the codec start and end nearer to the wire's own start and end; every message
    also costs some 0.1 ms of calls and threads, which must not come to count. On a loopback 2 MB
    bring a tenth over 0.5 MB, and 4 MB no more. At 100 Mbit/s 128 KB brought 4 to 8 % to single
    reductions among four ranks, and cost 20 % of a DDP step: receives are posted three messages
    ahead, and Gloo's request to send more waits behind all that is under way.
    """
    wanted = _MESSAGE_SECONDS * link.bytes_per_second
    return 1 << round(math.log2(min(max(wanted, MESSAGE_BYTES), 1 << 21)))


def all_reduce_seconds(link: Link, numel: int, bits_per_number: float, world_size: int) -> float:
    """Seconds of a compressed all-reduce of ``numel`` numbers over ``world_size`` ranks.

    One exchange for two ranks, two for more, each with the link's latency; 2(p-1)/p of the packed
    numbers on the wire. Messages pass codec and wire one behind the other: the shorter of the two
    hides behind the longer, but for the first message and what the link's overlap leaves.

    Args:
        link: what messages cost.
        numel: numbers to reduce.
        bits_per_number: bits each takes on the wire.
        world_size: ranks; 1 takes no time.

    Raises:
        ValueError: an argument is negative, or there is no rank.
    """
    _check(numel, bits_per_number, world_size)
    if world_size == 1 or not numel:
        return 0.0
    packed = numel * bits_per_number / 8
    pieces = 1 if world_size == 2 else world_size
    messages = max(1, round(packed / (MESSAGE_BYTES * pieces)))
    exchanges = 1 if world_size == 2 else 2
    wire = 2 * (world_size - 1) / world_size * packed / link.bytes_per_second
    codec = codec_seconds(link, numel, world_size)
    hidden = link.wire_overlap * min(wire, codec) * (1 - 1 / messages)
    return exchanges * link.latency + wire + codec - hidden


def expected_seconds(
    link: Link, numel: int, bits_per_number: float, world_size: int, waiting: bool
) -> float:
    """What a compressed all-reduce costs a rank: :func:`all_reduce_seconds`, and what that omits.

    Once more the latency, for threads and calls; and what the codec takes from other work of the
    processors, unless the rank is ``waiting`` for the result and has none.
    """
    taken = 0.0 if waiting else 1 - link.codec_overlap
    seconds = all_reduce_seconds(link, numel, bits_per_number, world_size)
    return seconds + link.latency + taken * codec_seconds(link, numel, world_size)


def codec_seconds(link: Link, numel: int, world_size: int) -> float:
    """Seconds in which one rank encodes and decodes for an all-reduce of ``numel`` numbers.

    Two ranks encode their own numbers and decode both. More encode all numbers, decode p times a
    p-th of them for the sum, encode that, and decode the result. Encoding and decoding count half a
    pass each.
    """
    passes = 1.5 if world_size == 2 else 1.5 + 0.5 / world_size
    return passes * 4 * numel / link.codec_bytes_per_second


def float32_seconds(link: Link, numel: int, world_size: int, bytes_per_number: int = 4) -> float:
    """Seconds of torch's own all-reduce (Gloo's ring) of ``numel`` numbers.

    2(p-1) steps with a latency each, 2(p-1)/p of the numbers on the wire.

    Args:
        link: what messages cost.
        numel: numbers to reduce.
        world_size: ranks; 1 takes no time.
        bytes_per_number: 4 for float32, 2 for bf16.

    Raises:
        ValueError: an argument is negative, or there is no rank.
    """
    _check(numel, 8 * bytes_per_number, world_size)
    if world_size == 1 or not numel:
        return 0.0
    share = 2 * (world_size - 1) / world_size
    wire = share * bytes_per_number * numel / link.float32_bytes_per_second
    return 2 * (world_size - 1) * link.float32_latency + wire


def _check(numel: int, bits_per_number: float, world_size: int) -> None:
    if numel < 0 or bits_per_number <= 0 or world_size < 1:
        raise ValueError(
            f"numel is {numel}, bits per number {bits_per_number}, world_size {world_size}; "
            "allowed: numel from 0, bits above 0, world_size from 1"
        )


def _hidden_share(first: float, second: float, both: float) -> float:
    """How much of the shorter of two works is hidden when both, done at once, take ``both``."""
    return min(1.0, max(0.0, (first + second - both) / min(first, second)))


def _slowest(
    transport: Transport,
    action: Callable[[], object],
    repeats: int,
    take: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Median over repetitions of the seconds of the slowest rank; equal on all ranks."""
    seconds = torch.empty(repeats, dtype=torch.float64, device="cpu")
    for turn in range(repeats):
        transport.barrier()
        begin = time.perf_counter()
        action()
        seconds[turn] = time.perf_counter() - begin
    transport.all_reduce_max_float64(seconds)
    return float(take(seconds.tolist()))


def _bandwidth(
    transport: Transport,
    prepare: Callable[[int], Callable[[], None]],
    largest: int = _LARGEST_BYTES,
) -> tuple[float, int, float]:
    """Bytes per second of what is prepared for a size; a large size, and the seconds it takes.

    The slope between two sizes: what every size pays (latency) or is spared (the first bytes, which
    wait in buffers behind a slow link) cancels out.
    """
    size = _FIRST_BYTES
    seconds = _slowest(transport, prepare(size), 2)
    while seconds < _ENOUGH_SECONDS and size < largest:
        growth = max(1, round(math.log2(_ENOUGH_SECONDS / seconds)))
        size = min(largest, size << growth)
        seconds = _slowest(transport, prepare(size), 1)
    repeats = min(9, max(_LARGE_REPEATS, round(0.1 / seconds)))  # short ones jitter more
    large = _slowest(transport, prepare(size), repeats)
    small = _slowest(transport, prepare(size // 4), repeats)
    return 0.75 * size / max(large - small, 0.5 * large), size, large


def _float32_all_reduce(transport: Transport, size: int) -> Callable[[], None]:
    numbers = torch.zeros(size // 4, dtype=torch.float32, device="cpu").add_(0)
    return lambda: transport.all_reduce_sum(numbers.div_(transport.world_size))


def _exchange(transport: Transport, size: int) -> Callable[[], None]:
    """Every rank sends ``size`` bytes, spread over its peers in messages, and waits for as much."""
    incoming, outgoing = _messages(transport, size)

    def run() -> None:
        works = _start(transport.receive, incoming)  # first, so that no message waits for one
        works += _start(transport.send, outgoing)
        transport.wait(works, "measuring the link with")

    return run


def _small_exchange(transport: Transport, threads: ThreadPoolExecutor) -> None:
    """An exchange as a reduction makes it: one thread posts receives, one sends, one waits."""
    incoming, outgoing = _messages(transport, _SMALL_BYTES)
    receives = _start(transport.receive, incoming)

    def send() -> Future[None]:
        works = receives + _start(transport.send, outgoing)
        return threads.submit(transport.wait, works, "measuring the link with")

    threads.submit(send).result().result()


def _messages(transport: Transport, size: int) -> tuple[list[_Message], list[_Message]]:
    """What comes in and what goes out when every rank sends ``size`` bytes.

    Ones, not zeros: pages of memory that were never written would be made while time is taken.
    """
    share = size // len(transport.peers)
    sizes = [min(MESSAGE_BYTES, share - begin) for begin in range(0, share, MESSAGE_BYTES)]
    first = transport.reserve(len(sizes))
    incoming, outgoing = (
        [
            (peer, torch.ones(part, dtype=torch.uint8, device="cpu"), tag_of(first + number, 0))
            for number, part in enumerate(sizes)
            for peer in transport.peers
        ]
        for _ in range(2)
    )
    return incoming, outgoing


def _start(
    call: Callable[[torch.Tensor, int, int], dist.Work], messages: list[_Message]
) -> list[tuple[int, dist.Work]]:
    return [(peer, call(message, peer, tag)) for peer, message, tag in messages]


def _at_once(threads: ThreadPoolExecutor, *works: Callable[[], object]) -> None:
    for future in [threads.submit(work) for work in works]:
        future.result()


def _codec() -> Callable[[], None]:
    """Encodes and decodes one message of e5m2, with the functions of a reduction."""
    layout = cut([MESSAGE_BYTES], [format_of("e5m2")], 2, MESSAGE_BYTES)
    piece = layout.chunks[0][0]
    numbers = torch.linspace(-1, 1, MESSAGE_BYTES, dtype=torch.float32, device="cpu")
    message = torch.zeros(piece.size, dtype=torch.uint8, device="cpu")
    arithmetic = Arithmetic(world_size=2, scale="local", op="mean")

    def run() -> None:
        pack(piece, numbers, message, "local", None)
        unpack(piece, message, numbers, arithmetic)

    return run
