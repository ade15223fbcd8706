"""The pipeline of a compressed reduction: encode, exchange bytes, sum in float32, decode.

Two ranks exchange their codes and both sum them (one-shot). More ranks each sum one piece for all,
encode the result once and send it to everybody (two-shot). Either way every rank decodes the *same
bytes* in the same order, so every rank ends with the same bits. Codes are summed in float32 in rank
order: narrow numbers travel, wide ones are added.

Three threads work as a pipeline: encode and send; receive, sum and send; receive and decode. Each
takes chunks in the order in which the reductions were started, which is the same on every rank, so
nothing can deadlock. The trade-off: three threads per process group, which release the GIL in every
kernel and every wait, in exchange for codec time that hides behind the wire.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.collectives.greeting import REFUSAL, GreetingBuffers, carries, check
from narrowgauge.collectives.layout import MESSAGE_BYTES, Kind, cut
from narrowgauge.collectives.link import (
    Link,
    expected_seconds,
    float32_seconds,
    measure_link,
    message_bytes_for,
)
from narrowgauge.collectives.message import (
    AS_SENT,
    Arithmetic,
    Op,
    Scale,
    agreed_exponents,
    largest_exponents_of,
    pack,
    reduce_and_encode,
    reduce_into,
    unpack,
    withhold,
    withhold_sums,
)
from narrowgauge.collectives.reduction import Messages, Plan, Reduction
from narrowgauge.collectives.threads import Inbox, work_on
from narrowgauge.collectives.transport import CollectiveError, Transport, fingerprint, tag_of
from narrowgauge.formats import Format, format_of

_AHEAD = 3
"""Chunks whose receives are posted before they are needed; more would delay the first sent."""

_FP32 = format_of("fp32")


class Reducer:
    """Runs compressed all-reduces on one process group, in the order in which they are started.

    Args:
        group: the ranks that take part (``None``: all). All of them must create it at one point.
        timeout: how long one message may take; ``None``: as long as in ``group``.
        message_bytes: size of the messages that a reduction is cut into.
        among: the ranks of ``group`` that take part, in order; ``None``: all of them. All ranks of
            ``group`` create a reducer at one point, each among its own.
        settings: what must be the same on all ranks of ``group``, by name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        message_bytes: int = MESSAGE_BYTES,
        among: Sequence[int] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if message_bytes < 1:
            raise ValueError(f"message_bytes is {message_bytes}; it must be at least 1")
        self.transport = Transport(group, timeout, among, settings)
        self.message_bytes = message_bytes
        self.link: Link | None = None
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._pays: dict[tuple[int, float, bool], bool] = {}  # by elements, bits of each, waiting
        self._failure: BaseException | None = None
        self._refusals: list[dist.Work] = []
        self._greetings = GreetingBuffers(self.transport.peers, self.transport.world_size)
        self._to_encode: Inbox = queue.SimpleQueue()
        self._to_reduce: Inbox = queue.SimpleQueue()
        self._to_decode: Inbox = queue.SimpleQueue()
        if self.transport.world_size > 1:
            for inbox in (self._to_encode, self._to_reduce, self._to_decode):
                work_on(inbox, self)

    def adapt(self, link: Link | None = None, message_bytes: int | None = None) -> None:
        """From now on send in float32 what arrives sooner so; choose the size of messages.

        Args:
            link: what messages cost; ``None``: it is measured, by all ranks at one point.
            message_bytes: size of messages; ``None``: by the link.
        """
        if self.transport.world_size > 1:
            self.link = link or measure_link(self.transport)
            self.message_bytes = message_bytes or message_bytes_for(self.link)

    def narrow_pays(
        self, sizes: Sequence[int], formats: Sequence[Format], waiting: bool = False
    ) -> bool:
        """Whether tensors arrive sooner in these formats than in float32, as far as is known.

        ``waiting``: the caller does nothing else meanwhile.
        """
        numel = sum(sizes)
        bits = sum(s * f.bits for s, f in zip(sizes, formats, strict=True)) / max(numel, 1)
        key = numel, bits, waiting
        if key not in self._pays:
            self._pays[key] = any(format.name != "fp32" for format in formats)
            if self._pays[key] and self.link is not None:
                ranks = self.transport.world_size
                narrow = expected_seconds(self.link, numel, bits, ranks, waiting)
                wide = float32_seconds(self.link, numel, ranks)
                self._pays[key] = narrow <= 0.9 * wide  # a margin, for what is not known
                if not self._pays[key] and self.transport.rank == 0:
                    warnings.warn(
                        f"{numel:,} numbers are sent in float32: they take {wide * 1e3:.3g} ms on "
                        f"this link, and {narrow * 1e3:.3g} ms in the formats asked for; "
                        "adapt=False sends these",
                        stacklevel=2,
                    )
        return self._pays[key]

    def start(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        formats: Sequence[Format],
        *,
        scale: Scale = "local",
        op: Op = "mean",
        kind: Kind | None = None,
        on_success: Callable[[], None] | None = None,
        residual: torch.Tensor | None = None,
        name: str = "",
        at_once: bool = False,
    ) -> Reduction:
        """Start reducing ``flat`` in place; it may have ended when this returns.

        Args:
            flat: contiguous float32 CPU tensor of one dimension; not to be touched until the end.
            sizes: elements of the tensors that lie in it one after the other.
            formats: format of each.
            scale: see :func:`~narrowgauge.all_reduce`.
            op: ``"mean"`` or ``"sum"``.
            kind: ``None``: an all-reduce, in float32 if that is faster, once :meth:`adapt` was
                called. ``"float32"``: one that sends all of it as it is.
                ``"reduce-scatter"``: only this rank's shard of ``flat`` (see
                :func:`~narrowgauge.collectives.layout.shard_borders`) holds the result, in float32.
                ``"all-gather"``: every rank sends its shard to all.
            on_success: called by the pipeline when the result is in ``flat``, before waiters wake.
            residual: float32, like ``flat``: is added to ``flat`` first, and gets what rounding
                then withholds from the other ranks, to be passed again (error feedback).
            name: what is reduced, for messages.
            at_once: make a small reduction in the calling thread, before this returns.

        Raises:
            CollectiveError: an earlier reduction failed, or the ranks pass different arguments.
        """
        self._raise_if_failed()
        transport = self.transport
        adapts = kind is None and self.link is not None
        if adapts and not self.narrow_pays(sizes, formats, waiting=at_once):
            kind = "float32"
        plan = self._plan(tuple(sizes), tuple(formats), scale, op, kind)
        layout = plan.layout
        arithmetic = Arithmetic(transport.world_size, scale, op)
        # What is agreed on by all must be so in the order of the starts: by the pipeline.
        at_once = at_once and scale != "shared" and len(layout.chunks) <= 1
        reduction = Reduction(flat, plan, arithmetic, on_success, name, at_once)
        reduction.residual = residual
        if transport.world_size == 1:
            reduction.finish()
            return reduction
        with torch.inference_mode(False):  # these outlive the caller's mode
            messages = (
                plan.free.pop()
                if plan.free
                else Messages(plan, transport.rank, transport.world_size)
            )
            messages.greet_into(self._greetings.take(), plan.carries)
        reduction.messages = messages
        chunks = len(layout.chunks)
        reduction.first_number = transport.reserve(2 * max(chunks, 1) + 1)
        for peer in transport.peers:
            work = transport.receive(
                messages.greetings[peer], peer, reduction.greeting_tag, reduction.where
            )
            reduction.greeting_receives.append((peer, work))
        for index in range(chunks if layout.kind == "all-gather" else min(_AHEAD, chunks)):
            self._post_receives(reduction, index)
        if not plan.carries:
            for peer in transport.peers:
                self._send(reduction, messages.heads[peer], peer, reduction.greeting_tag)
        self._next(self._to_encode, self._first_stage(layout.kind), reduction)
        return reduction

    def start_float32(
        self,
        flat: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        on_success: Callable[[], None] | None = None,
        name: str = "",
    ) -> Reduction:
        """Start the mean of ``flat`` as torch's own DDP makes it: in float32, by Gloo.

        Without our threads, so that it takes no longer; and without the greeting by which ranks
        notice that they pass different tensors: for those that cannot, as DDP's buckets.

        Args:
            flat: float32 CPU tensor of one dimension; not to be touched until the end.
            residual: is added to ``flat``, and then zero.
            on_success: as in :meth:`start`.
            name: as in :meth:`start`.
        """
        self._raise_if_failed()
        transport = self.transport
        plan = self._plan((flat.numel(),), (_FP32,), None, "mean", "float32")
        reduction = Reduction(flat, plan, Arithmetic(transport.world_size, None, "mean"))
        reduction.on_success, reduction.name = on_success, name
        if residual is not None:
            flat.add_(residual)
            residual.zero_()
        if transport.world_size == 1:
            reduction.finish()
            return reduction
        share = 2 * (transport.world_size - 1) / transport.world_size
        reduction.bytes_sent = round(share * 4 * flat.numel())
        with transport.explained(f"{reduction.where}summing float32 with", transport.peers):
            work = transport.start_all_reduce_sum(flat.div_(transport.world_size))
        # Not by a callback: Gloo's own thread must not be the last to know its group.
        self._to_decode.put(partial(self._do, self._wait_for_float32, reduction, work))
        return reduction

    def _wait_for_float32(self, reduction: Reduction, work: dist.Work) -> None:
        doing = f"{reduction.where}summing float32 with"
        with reduction.wire(), self.transport.explained(doing, self.transport.peers):
            work.wait()
        reduction.finish()

    def refuse(self) -> None:
        """Make the ranks that start the next reduction raise, because this one will not."""
        number = self.transport.reserve(3)
        for peer in self.transport.peers:
            self._refusals.append(self.transport.send(REFUSAL, peer, tag_of(number, 0)))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise CollectiveError(
                "an earlier compressed all-reduce on this group failed; restart the ranks "
                f"(torchrun does). First failure: {self._failure}"
            ) from self._failure

    def _plan(
        self,
        sizes: tuple[int, ...],
        formats: tuple[Format, ...],
        scale: Scale,
        op: Op,
        kind: Kind | None,
    ) -> Plan:
        key = (sizes, formats, scale, op, kind, self.message_bytes)
        plan = self._plans.get(key)
        if plan is None:
            layout = cut(sizes, formats, self.transport.world_size, self.message_bytes, kind)
            description = (
                f"{scale=}, {op=}, {layout.kind}, messages of {self.message_bytes} bytes, tensors "
                f"of {sizes} elements in {[format.name for format in formats]}"
            )
            with torch.inference_mode(False):
                first = carries(layout, scale == "shared", self.transport.world_size)
                plan = Plan(layout, description, fingerprint(description), first)
            self._plans[key] = plan
        return plan

    def _first_stage(self, kind: Kind) -> Callable[[Reduction], None]:
        return {"float32": self._sum_float32, "all-gather": self._encode_own}.get(
            kind, self._encode
        )

    def _post_receives(self, reduction: Reduction, index: int) -> None:
        """Of a chunk's codes, unless they come with the greeting, and of its sums."""
        assert reduction.messages is not None
        messages, tag = reduction.messages, reduction.tag(index)
        if messages.incoming:
            greeted = index == 0 and reduction.plan.carries
            receives = [] if greeted else self._receive(reduction, messages.incoming[index], tag)
            reduction.first_receives.append(receives)
        if messages.reduced:
            receives = self._receive(reduction, messages.reduced[index], tag + 1)
            reduction.second_receives.append(receives)

    def _receive(
        self, reduction: Reduction, messages: list[torch.Tensor], tag: int
    ) -> list[tuple[int, dist.Work]]:
        transport = self.transport
        return [
            (peer, transport.receive(messages[peer], peer, tag, reduction.where))
            for peer in transport.peers
            if messages[peer].numel()
        ]

    def _send_codes(self, reduction: Reduction, index: int, peer: int) -> None:
        """What this rank has encoded of a chunk for a peer."""
        messages, layout = reduction.messages, reduction.plan.layout
        assert messages is not None
        if index == 0 and reduction.plan.carries:
            self._send(reduction, messages.heads[peer], peer, reduction.greeting_tag)
        elif layout.kind == "one-shot":
            own = messages.incoming[index][self.transport.rank]
            self._send(reduction, own, peer, reduction.tag(index))
        else:
            self._send(reduction, messages.outgoing[index][peer], peer, reduction.tag(index))

    def _send(self, reduction: Reduction, message: torch.Tensor, peer: int, tag: int) -> None:
        if message.numel():
            size = message.numel() * message.element_size()
            work = self.transport.send(message, peer, tag, reduction.where)
            reduction.sent(peer, work, size)

    # -- the three stages ------------------------------------------------------------------------

    def _next(
        self, inbox: Inbox, stage: Callable[..., None], reduction: Reduction, *chunk: int
    ) -> None:
        if reduction.at_once:
            self._do(stage, reduction, *chunk)
        else:
            inbox.put(partial(self._do, stage, reduction, *chunk))

    def _do(self, stage: Callable[..., None], reduction: Reduction, *chunk: Any) -> None:
        try:
            if self._failure is not None:
                raise CollectiveError(f"an earlier message failed: {self._failure}")
            # As the caller, who may hand over inference tensors.
            with torch.inference_mode(reduction.inference):
                stage(reduction, *chunk)
        except BaseException as error:
            self._failure = self._failure or error
            reduction.finish(error)

    def _encode(self, reduction: Reduction) -> None:
        transport, messages = self.transport, reduction.messages
        assert messages is not None
        layout, scale = reduction.plan.layout, reduction.arithmetic.scale
        if not layout.numel:
            self._compare_plans(reduction)
            self._finish_chunk(reduction, len(layout.chunks) - 1)
            return
        residual = reduction.residual
        if residual is not None:
            with reduction.codec():
                reduction.flat.add_(residual)
        agreed = self._agree_on_exponents(reduction) if scale == "shared" else None
        for index, pieces in enumerate(layout.chunks):
            if layout.kind == "one-shot":
                message = messages.incoming[index][transport.rank]
                with reduction.codec():
                    pack(pieces[0], reduction.flat, message, scale, agreed)
                    if residual is not None:
                        withhold(pieces[0], message, reduction.flat, residual)
                for peer in transport.peers:
                    self._send_codes(reduction, index, peer)
            else:
                for peer in [*transport.peers, transport.rank]:
                    message = messages.outgoing[index][peer]
                    with reduction.codec():
                        pack(pieces[peer], reduction.flat, message, scale, agreed)
                        if residual is not None:
                            withhold(pieces[peer], message, reduction.flat, residual)
                    if peer != transport.rank:
                        self._send_codes(reduction, index, peer)
            self._next(self._to_reduce, self._reduce, reduction, index)

    def _encode_own(self, reduction: Reduction) -> None:
        """The first stage of an all-gather: what is ours, to everybody."""
        transport, messages = self.transport, reduction.messages
        assert messages is not None
        self._compare_plans(reduction)
        for index, pieces in enumerate(reduction.plan.layout.chunks):
            message = messages.reduced[index][transport.rank]
            with reduction.codec():
                pack(pieces[transport.rank], reduction.flat, message, "local", None)
            for peer in transport.peers:
                self._send(reduction, message, peer, reduction.tag(index) + 1)
            self._next(self._to_decode, self._decode, reduction, index)

    def _sum_float32(self, reduction: Reduction) -> None:
        """The only stage of what travels as it is: small ones in one step, others by Gloo."""
        transport, flat = self.transport, reduction.flat
        if reduction.residual is not None:
            flat.add_(reduction.residual)
            reduction.residual.zero_()
        if reduction.arithmetic.op == "mean":
            flat.div_(transport.world_size)
        messages = reduction.messages
        assert messages is not None
        if reduction.plan.carries:
            numbers = [message.view(torch.float32) for message in messages.incoming[0]]
            numbers[transport.rank].copy_(flat)
            for peer in transport.peers:
                self._send_codes(reduction, 0, peer)
            self._compare_plans(reduction)
            torch.add(numbers[0], numbers[1], out=flat)
            for other in numbers[2:]:
                flat.add_(other)
        else:
            self._compare_plans(reduction)  # before a collective that not every rank may make
            with reduction.wire():
                if reduction.at_once:
                    transport.all_reduce_sum(flat, reduction.where)
                else:
                    transport.all_reduce_sum_in_order(flat, reduction.where)
            share = 2 * (transport.world_size - 1) / transport.world_size
            reduction.bytes_sent += round(share * flat.numel() * 4)
        self._finish(reduction)

    def _agree_on_exponents(self, reduction: Reduction) -> list[int]:
        """APS as published: one exponent per tensor for all ranks, agreed on before sending."""
        layout = reduction.plan.layout
        self._compare_plans(reduction)  # before a collective that not every rank may make
        with reduction.codec():
            largest = largest_exponents_of(reduction.flat, layout.sizes, self.transport.world_size)
        with reduction.wire():
            self.transport.all_reduce_max(largest, reduction.where)
        return agreed_exponents(largest, layout.formats)

    def _reduce(self, reduction: Reduction, index: int) -> None:
        transport, messages = self.transport, reduction.messages
        assert messages is not None
        layout = reduction.plan.layout
        self._compare_plans(reduction)
        if index + _AHEAD < len(layout.chunks):
            self._post_receives(reduction, index + _AHEAD)
        self._wait(reduction, reduction.first_receives[index], "waiting for codes of")
        incoming = messages.incoming[index]
        if layout.kind != "two-shot":
            piece = layout.chunks[index][0 if layout.kind == "one-shot" else transport.rank]
            with reduction.codec():
                reduce_into(piece, incoming, reduction.flat, reduction.arithmetic)
            self._finish_chunk(reduction, index)
            return
        result = messages.reduced[index][transport.rank]
        with reduction.codec():
            piece = layout.chunks[index][transport.rank]
            arithmetic, residual = reduction.arithmetic, reduction.residual
            reduce_and_encode(piece, incoming, result, arithmetic)
            if residual is not None:
                withhold_sums(piece, incoming, result, reduction.flat, residual, arithmetic)
        for peer in transport.peers:
            self._send(reduction, result, peer, reduction.tag(index) + 1)
        self._next(self._to_decode, self._decode, reduction, index)

    def _decode(self, reduction: Reduction, index: int) -> None:
        messages = reduction.messages
        assert messages is not None
        layout, arithmetic = reduction.plan.layout, reduction.arithmetic
        if layout.kind == "all-gather":
            arithmetic = AS_SENT
        self._wait(reduction, reduction.second_receives[index], "waiting for sums of")
        with reduction.codec():
            for piece, message in zip(layout.chunks[index], messages.reduced[index], strict=True):
                unpack(piece, message, reduction.flat, arithmetic)
        self._finish_chunk(reduction, index)

    def _compare_plans(self, reduction: Reduction) -> None:
        """Raise unless all ranks reduce the same tensors in the same way; once per reduction."""
        if reduction.greeting_receives:
            assert reduction.messages is not None
            self._wait(reduction, reduction.greeting_receives, "waiting for codes of")
            plan = reduction.plan
            greetings = reduction.messages.greetings
            check(greetings, plan.fingerprint, plan.description, self.transport)

    def _wait(self, reduction: Reduction, works: list[tuple[int, dist.Work]], phase: str) -> None:
        with reduction.wire():
            self.transport.wait(works, reduction.where + phase)
        works.clear()

    def _finish_chunk(self, reduction: Reduction, index: int) -> None:
        if index + 1 == len(reduction.plan.layout.chunks):
            self._finish(reduction)

    def _finish(self, reduction: Reduction) -> None:
        self._wait(reduction, reduction.sends, "sending to")
        assert reduction.messages is not None
        self._greetings.give_back(reduction.messages.greetings)
        reduction.plan.free.append(reduction.messages)
        reduction.finish()
