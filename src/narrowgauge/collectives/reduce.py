"""The compressed all-reduce: encode, exchange bytes, sum in float32, exchange again, decode.

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
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from narrowgauge.collectives.layout import cut
from narrowgauge.collectives.message import (
    Arithmetic,
    Op,
    Scale,
    agreed_exponents,
    largest_exponents_of,
    pack,
    reduce_and_encode,
    reduce_into,
    unpack,
)
from narrowgauge.collectives.reduction import Messages, Plan, Reduction
from narrowgauge.collectives.transport import CollectiveError, Transport, fingerprint, tag_of
from narrowgauge.formats import BlockFormat, Format, FormatLike, format_of

MESSAGE_BYTES = 1 << 20
"""Messages of about this size: small enough to overlap codec and wire, large enough that the cost
per message does not count."""


_Inbox: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def _work(inbox: _Inbox) -> None:
    """One stage's thread: it holds its reducer only while there is work, and ends with it."""
    while (task := inbox.get()) is not None:
        task()
        del task


def _dismiss(inbox: _Inbox, thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():
        # At the interpreter's exit a thread that still runs could be ended inside C++ code. One
        # that waits for a dead rank is left behind.
        thread.join(timeout=1.0)


class Reducer:
    """Runs compressed all-reduces on one process group, in the order in which they are started.

    Args:
        group: the ranks that take part (``None``: all). All of them must create it at one point.
        timeout: how long one message may take.
        message_bytes: size of the messages that a reduction is cut into.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = default_pg_timeout,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        if message_bytes < 1:
            raise ValueError(f"message_bytes is {message_bytes}; it must be at least 1")
        self.transport = Transport(group, timeout)
        self.message_bytes = message_bytes
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._failure: BaseException | None = None
        self._to_encode: _Inbox = queue.SimpleQueue()
        self._to_reduce: _Inbox = queue.SimpleQueue()
        self._to_decode: _Inbox = queue.SimpleQueue()
        if self.transport.world_size > 1:
            for inbox in (self._to_encode, self._to_reduce, self._to_decode):
                thread = threading.Thread(target=_work, args=(inbox,), daemon=True)
                thread.start()
                weakref.finalize(self, _dismiss, inbox, thread)

    def start(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        formats: Sequence[Format],
        *,
        scale: Scale = "local",
        op: Op = "mean",
        on_success: Callable[[], None] | None = None,
    ) -> Reduction:
        """Start reducing ``flat`` in place: all receives are posted before this returns.

        Args:
            flat: contiguous float32 CPU tensor of one dimension; not to be touched until the end.
            sizes: elements of the tensors that lie in it one after the other.
            formats: format of each.
            scale: see :func:`all_reduce`.
            op: ``"mean"`` or ``"sum"``.
            on_success: called by the pipeline when the result is in ``flat``, before waiters wake.

        Raises:
            CollectiveError: an earlier reduction failed, or the ranks pass different arguments.
        """
        if self._failure is not None:
            raise CollectiveError(
                "an earlier compressed all-reduce on this group failed; restart the ranks "
                f"(torchrun does). First failure: {self._failure}"
            ) from self._failure
        transport = self.transport
        plan = self._plan(tuple(sizes), tuple(formats), scale, op)
        arithmetic = Arithmetic(transport.world_size, scale, op)
        reduction = Reduction(flat, plan, arithmetic, on_success)
        if transport.world_size == 1:
            reduction.finish()
            return reduction
        layout = plan.layout
        with torch.inference_mode(False):  # these outlive the caller's mode
            messages = (
                plan.free.pop()
                if plan.free
                else Messages(layout, transport.rank, transport.world_size)
            )
        reduction.messages = messages
        reduction.first_number = transport.reserve(2 * len(layout.chunks) + 1)
        greeting_tag = tag_of(reduction.first_number, 0)
        for peer in transport.peers:
            reduction.greetings[peer] = torch.empty_like(plan.fingerprint)
            work = transport.receive(reduction.greetings[peer], peer, greeting_tag)
            reduction.greeting_receives.append((peer, work))
        for index in range(len(layout.chunks)):
            tag = reduction.tag(index)
            reduction.first_receives.append(self._receive(messages.incoming[index], tag))
            if not layout.one_shot:
                reduction.second_receives.append(self._receive(messages.reduced[index], tag + 1))
        for peer in transport.peers:
            self._send(reduction, plan.fingerprint, peer, greeting_tag)
        self._to_encode.put(partial(self._do, self._encode, reduction))
        return reduction

    def _plan(
        self,
        sizes: tuple[int, ...],
        formats: tuple[Format, ...],
        scale: Scale,
        op: Op,
    ) -> Plan:
        key = (sizes, formats, scale, op)
        plan = self._plans.get(key)
        if plan is None:
            description = (
                f"{scale=}, {op=}, messages of {self.message_bytes} bytes, tensors of {sizes} "
                f"elements in {[format.name for format in formats]}"
            )
            layout = cut(sizes, formats, self.transport.world_size, self.message_bytes)
            with torch.inference_mode(False):
                plan = Plan(layout, description, fingerprint(description))
            self._plans[key] = plan
        return plan

    def _receive(self, messages: list[torch.Tensor], tag: int) -> list[tuple[int, dist.Work]]:
        transport = self.transport
        return [
            (peer, transport.receive(messages[peer], peer, tag))
            for peer in transport.peers
            if messages[peer].numel()
        ]

    def _send(self, reduction: Reduction, message: torch.Tensor, peer: int, tag: int) -> None:
        if message.numel():
            reduction.sent(peer, self.transport.send(message, peer, tag), message.numel())

    # -- the three stages ------------------------------------------------------------------------

    def _do(self, stage: Callable[..., None], reduction: Reduction, *chunk: int) -> None:
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
        agreed = self._agree_on_exponents(reduction) if scale == "shared" else None
        for index, pieces in enumerate(layout.chunks):
            tag = reduction.tag(index)
            if layout.one_shot:
                message = messages.incoming[index][transport.rank]
                with reduction.codec():
                    pack(pieces[0], reduction.flat, message, scale, agreed)
                for peer in transport.peers:
                    self._send(reduction, message, peer, tag)
            else:
                for peer in [*transport.peers, transport.rank]:
                    message = messages.outgoing[index][peer]
                    with reduction.codec():
                        pack(pieces[peer], reduction.flat, message, scale, agreed)
                    if peer != transport.rank:
                        self._send(reduction, message, peer, tag)
            self._to_reduce.put(partial(self._do, self._reduce, reduction, index))

    def _agree_on_exponents(self, reduction: Reduction) -> list[int]:
        """APS as published: one exponent per tensor for all ranks, agreed on before sending."""
        layout = reduction.plan.layout
        self._compare_plans(reduction)  # before a collective that not every rank may make
        with reduction.codec():
            largest = largest_exponents_of(reduction.flat, layout.sizes, self.transport.world_size)
        with reduction.wire():
            self.transport.all_reduce_max(largest)
        return agreed_exponents(largest, layout.formats)

    def _reduce(self, reduction: Reduction, index: int) -> None:
        transport, messages = self.transport, reduction.messages
        assert messages is not None
        layout = reduction.plan.layout
        self._compare_plans(reduction)
        self._wait(reduction, reduction.first_receives[index], "waiting for codes of")
        incoming = messages.incoming[index]
        if layout.one_shot:
            with reduction.codec():
                piece = layout.chunks[index][0]
                reduce_into(piece, incoming, reduction.flat, reduction.arithmetic)
            self._finish_chunk(reduction, index)
            return
        result = messages.reduced[index][transport.rank]
        with reduction.codec():
            piece = layout.chunks[index][transport.rank]
            reduce_and_encode(piece, incoming, result, reduction.arithmetic)
        for peer in transport.peers:
            self._send(reduction, result, peer, reduction.tag(index) + 1)
        self._to_decode.put(partial(self._do, self._decode, reduction, index))

    def _decode(self, reduction: Reduction, index: int) -> None:
        messages = reduction.messages
        assert messages is not None
        self._wait(reduction, reduction.second_receives[index], "waiting for sums of")
        with reduction.codec():
            pieces = reduction.plan.layout.chunks[index]
            for piece, message in zip(pieces, messages.reduced[index], strict=True):
                unpack(piece, message, reduction.flat, reduction.arithmetic)
        self._finish_chunk(reduction, index)

    def _compare_plans(self, reduction: Reduction) -> None:
        """Raise unless all ranks reduce the same tensors in the same way; once per reduction."""
        self._wait(reduction, reduction.greeting_receives, "waiting for codes of")
        plan = reduction.plan
        different = [
            peer
            for peer, theirs in reduction.greetings.items()
            if not theirs.equal(plan.fingerprint)
        ]
        if different:
            raise CollectiveError(
                f"ranks {sorted(different)} pass other tensors, formats, scale or op to a "
                f"compressed all-reduce than rank {self.transport.rank}; all ranks must pass the "
                f"same. Rank {self.transport.rank} passes {plan.description[:500]}"
            )
        reduction.greetings.clear()

    def _wait(self, reduction: Reduction, works: list[tuple[int, dist.Work]], phase: str) -> None:
        with reduction.wire():
            self.transport.wait(works, phase)
        works.clear()

    def _finish_chunk(self, reduction: Reduction, index: int) -> None:
        if index + 1 < len(reduction.plan.layout.chunks):
            return
        self._wait(reduction, reduction.sends, "sending to")
        assert reduction.messages is not None
        reduction.plan.free.append(reduction.messages)
        reduction.finish()


_reducers: dict[dist.ProcessGroup, Reducer] = {}


def _reducer_of(group: dist.ProcessGroup | None) -> Reducer:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group "
            "first, or start the program with torchrun"
        )
    key = group or dist.group.WORLD
    assert key is not None
    if key not in _reducers:
        for destroyed in _reducers.keys() - dist.distributed_c10d._world.pg_map.keys():
            del _reducers[destroyed]
        _reducers[key] = Reducer(group)
    return _reducers[key]


def wire_format(format: FormatLike) -> Format:
    """``format`` as one that can travel: fp32, blocks, or signed and of at most 16 bits.

    Raises:
        ValueError: it is unsigned, or wider than 16 bits and not fp32.
    """
    parsed = format_of(format)
    fits = parsed.bits <= 16 or parsed.name == "fp32"
    if not isinstance(parsed, BlockFormat) and not (fits and parsed.signed):
        raise ValueError(
            f"format {parsed.name!r} cannot travel between ranks; allowed: fp32, block formats, or "
            "signed formats of at most 16 bits such as e5m2, e4m3, int8, bf16"
        )
    return parsed


def check_scale(scale: object, formats: Iterable[Format] = ()) -> None:
    """Raise ValueError unless ``scale`` is known, and one that all of these formats can have."""
    if scale not in ("local", "shared", None):
        raise ValueError(f"scale is {scale!r}; allowed: 'local', 'shared' (APS as published), None")
    for format in formats:
        if isinstance(format, BlockFormat) and scale != "local":
            raise ValueError(
                f"scale is {scale!r}, but {format.name} brings a scale per block, each rank's own; "
                f"leave scale='local', or use its elements' format {format.element.name}"
            )


def all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    format: FormatLike,
    *,
    op: Op = "mean",
    scale: Scale = "local",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Reduction | None:
    """All-reduce tensors in place, sent between ranks in ``format``; every rank gets the same bits.

    Codes are summed in float32. A tensor with a NaN or infinity on any rank becomes non-finite on
    every rank (in block formats NaN, in that block); one that is zero everywhere stays zero. With
    one rank nothing moves or changes.

    Args:
        tensors: one tensor or several, on the CPU, of a floating dtype, any shape and strides. All
            ranks must pass the same shapes in the same order. Other dtypes than float32 are
            converted to float32 and back.
        format: the format on the wire: fp32, any signed format of at most 16 bits, or a block
            format. Blocks are cut from each flattened tensor (and from the parts of it that travel
            in messages of their own); a second level of scales is that of such a part.
        op: ``"mean"`` or ``"sum"`` over the ranks.
        scale: ``"local"``: each rank scales each tensor by its own largest magnitude and sends the
            exponent along. ``"shared"``: APS as published (arXiv 1911.08907, section 3): ranks
            first agree on one exponent per tensor with room for the sum. ``None``: no scaling.
            Block formats scale themselves: with them, only ``"local"``.
        group: the process group; ``None`` is the default one. The messages travel on a Gloo group
            of our own over the same ranks, made at the first call, which all of them must make.
        async_op: return at once with a :class:`Reduction` to wait for.

    Raises:
        TypeError: a tensor that is not floating or not on the CPU.
        ValueError: an unknown ``format``, ``op`` or ``scale``, or a ``scale`` for blocks.
        CollectiveError: a rank died or did not answer, or the ranks' arguments differ.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; allowed: 'mean', 'sum'")
    parsed = wire_format(format)
    check_scale(scale, [parsed])
    targets = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in targets:
        if not tensor.is_floating_point() or tensor.device.type != "cpu":
            raise TypeError(
                f"a tensor is {tensor.dtype} on {tensor.device}; allowed: floating dtypes on the "
                "CPU (copy it there first: messages travel over Gloo)"
            )
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is expanded: its elements share memory "
                "and cannot be reduced in place; pass tensor.clone()"
            )
    with torch.no_grad():
        reducer = _reducer_of(group)
        single = targets[0].detach() if len(targets) == 1 else None
        in_place = single is not None and single.dtype == torch.float32 and single.is_contiguous()
        if single is not None and in_place:
            flat = single.view(-1)
        else:
            flat = torch.cat(
                [tensor.reshape(-1).float() for tensor in targets] or [torch.empty(0, device="cpu")]
            )
        sizes = [tensor.numel() for tensor in targets]

        def copy_back() -> None:
            for target, part in zip(targets, flat.split(sizes), strict=True):
                target.detach().copy_(part.view(target.shape))

        reduction = reducer.start(
            flat,
            sizes,
            [parsed] * len(sizes),
            scale=scale,
            op=op,
            on_success=None if in_place else copy_back,
        )
    if async_op:
        return reduction
    reduction.wait()
    return None
