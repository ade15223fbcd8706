"""Batches on their way from rank 0: each rank's part straight to it, in the dtype it is stored in.

For every batch rank 0 sends each rank a header of fixed size, the skeleton if it is another than
the last one, and the memory of each tensor. While there is nothing to send it says so every third
of the timeout, so that a slow source, or a training step that takes long, is not taken for a dead
rank.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.collectives.transport import Transport, tag_of
from narrowgauge.inputs.structure import Leaf, bytes_of, leaves_of

HEADER_LANE, SKELETON_LANE, TENSOR_LANE = 2042, 2043, 2044
_FIELDS = 16


class Kind(IntEnum):
    """What a header announces."""

    BATCH = 1
    WAIT = 2
    OVER = 3


@dataclass(frozen=True)
class Header:
    """What rank 0 says about a batch.

    Attributes:
        kind: whether there is one.
        number: of the batch, in this iteration.
        epoch: of the batch.
        samples: of the epoch that were delivered with this batch.
        total: samples in the batch, on all ranks together.
        full: samples in a full batch.
        rows: of the receiver's part.
        digest: of the samples delivered, 32 hexadecimal digits.
        microseconds: that reading took.
    """

    kind: Kind
    number: int = 0
    epoch: int = 0
    samples: int = 0
    total: int = 0
    full: int = 0
    rows: int = 0
    digest: str = "0" * 32
    microseconds: int = 0


Sent = tuple[int, dist.Work, torch.Tensor]
"""To whom, what to wait for, and the memory that must stay until then."""


class Sender:
    """Rank 0's side; used by one thread.

    Attributes:
        bytes_sent: payload so far, headers included.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._headers = 0
        self._tensors = dict.fromkeys(transport.peers, 0)
        self._skeletons = dict.fromkeys(transport.peers, (b"", 0))
        self._said: list[Sent] = []
        self.bytes_sent = 0

    def announce(self, kind: Kind) -> None:
        """Say to all that there is nothing yet, or nothing more."""
        said = [self._header(peer, Header(kind), 0) for peer in self._transport.peers]
        self._headers += 1
        self._said = said  # nobody waits for it, but dropped it would not arrive
        if kind == Kind.WAIT:
            self.wait(said, "telling that there is no batch yet to")

    def send(
        self, headers: dict[int, Header], parts: dict[int, tuple[Any, list[torch.Tensor]]]
    ) -> list[Sent]:
        """Start sending a batch: by rank, its header and its part; what to wait for."""
        sent: list[Sent] = []
        for peer, (skeleton, tensors) in parts.items():
            packed = pickle.dumps(skeleton)
            known, count = self._skeletons[peer]
            changed = packed != known
            sent.append(self._header(peer, headers[peer], len(packed) if changed else 0))
            if changed:
                message = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                sent.append(self._start(message, peer, tag_of(count, SKELETON_LANE)))
                self._skeletons[peer] = packed, count + 1
            for tensor in tensors:
                if tensor.numel():
                    number = self._tensors[peer]
                    tag = tag_of(number, TENSOR_LANE)
                    sent.append(self._start(bytes_of(tensor), peer, tag))
                    self._tensors[peer] = number + 1
        self._headers += 1
        return sent

    def wait(self, sent: list[Sent], doing: str) -> None:
        """Wait until messages are on their way to all.

        Raises:
            CollectiveError: a rank died or does not receive.
        """
        self._transport.wait([(peer, work) for peer, work, _ in sent], doing)

    def _header(self, peer: int, header: Header, skeleton: int) -> Sent:
        digest = bytes.fromhex(header.digest)
        parts = [int.from_bytes(digest[n : n + 8], "little", signed=True) for n in (0, 8)]
        fields = [header.kind, header.number, header.epoch, header.samples, header.total]
        fields += [header.full, header.rows, *parts, header.microseconds, skeleton]
        message = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
        message[: len(fields)] = torch.tensor(fields, dtype=torch.int64, device="cpu")
        return self._start(message, peer, tag_of(self._headers, HEADER_LANE))

    def _start(self, message: torch.Tensor, peer: int, tag: int) -> Sent:
        self.bytes_sent += message.numel() * message.element_size()
        return peer, self._transport.send(message, peer, tag), message


class Receiver:
    """The other ranks' side; used by one thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._headers = 0
        self._tensors = 0
        self._skeletons = 0
        self.skeleton: Any = None
        self.leaves: list[Leaf] = []

    def header(self, batch: int) -> Header:
        """Wait for the next header, and for the skeleton if it is a new one.

        Raises:
            CollectiveError: rank 0 died, or was silent for longer than the timeout.
        """
        message = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
        self._receive(message, tag_of(self._headers, HEADER_LANE), f"waiting for batch {batch} of")
        self._headers += 1
        kind, number, epoch, samples, total, full, rows, low, high, time, size, *_ = (
            message.tolist()
        )
        if size:
            packed = torch.empty(size, dtype=torch.uint8, device="cpu")
            where = f"waiting for the structure of batch {batch} of"
            self._receive(packed, tag_of(self._skeletons, SKELETON_LANE), where)
            self._skeletons += 1
            self.skeleton = pickle.loads(packed.numpy().tobytes())
            self.leaves = leaves_of(self.skeleton)
        digest = b"".join(part.to_bytes(8, "little", signed=True) for part in (low, high)).hex()
        return Header(Kind(kind), number, epoch, samples, total, full, rows, digest, time)

    def tensors(self, memory: list[torch.Tensor], batch: int) -> None:
        """Wait for the tensors of a batch, into ``memory`` (uint8, one each).

        Raises:
            CollectiveError: rank 0 died, or sends no more.
        """
        works = []
        for piece in memory:
            if piece.numel():
                tag = tag_of(self._tensors, TENSOR_LANE)
                works.append((0, self._transport.receive(piece, 0, tag)))
                self._tensors += 1
        self._transport.wait(works, f"waiting for batch {batch} of")

    def _receive(self, message: torch.Tensor, tag: int, where: str) -> None:
        self._transport.wait([(0, self._transport.receive(message, 0, tag))], where)
