"""ZeRO-1 over any optimizer of torch, whose parameters travel as compressed differences.

Each rank keeps float32 masters and optimizer state of its own part only, updates it, and sends what
its masters are ahead of the replicas, in a narrow format; every rank, the owner included, adds the
same bytes. The trade-off against torch's ``ZeroRedundancyOptimizer``: replicas lag behind masters
by a rounding error, which the next difference makes up for, in exchange for a quarter or an eighth
of the bytes, in one all-gather.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.collectives.layout import MESSAGE_BYTES
from narrowgauge.collectives.link import Link, measure_link, message_bytes_for
from narrowgauge.collectives.reduction import Reduction
from narrowgauge.collectives.transport import CollectiveError, Transport, fingerprint, refuse
from narrowgauge.formats import FormatLike, format_of
from narrowgauge.kernels.differences import difference_blocks
from narrowgauge.kernels.grid import DifferenceBlocks
from narrowgauge.ledger import Ledger
from narrowgauge.parameters import checkpoint
from narrowgauge.parameters.checks import (
    check_arguments,
    check_kinds,
    check_parameters,
    described,
    description_of,
    differing,
)
from narrowgauge.parameters.exchange import Exchange, Exchanged
from narrowgauge.parameters.gradients import GradientReducer
from narrowgauge.parameters.paying import narrow_pays
from narrowgauge.parameters.probe import check_divisible
from narrowgauge.parameters.space import Space


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state and float32 masters are spread over the ranks.

    Every rank makes it at one point, with the same arguments, after the model has its final dtype
    and place; parameters become views of one buffer. If ranks hold other numbers, they take rank
    0's. Gradients are expected to be averaged already, as DDP does, with a hook of
    :func:`~narrowgauge.gradients.compress` or without; or ``gradient_format`` says how this
    optimizer averages them itself.

    What is written into a parameter between steps (``load_state_dict`` of the model, clamping) is
    taken over by its master, if every rank writes the same; ``p.data`` hides such writes from
    torch, and then :meth:`sync_masters_from_model` must be called.

    With one rank nothing travels, and parameters are the masters' float32 (rounded to their dtype).

    Args:
        params: parameters, named parameters or param groups, on the CPU, float32, bfloat16 or
            float16. Those that do not require a gradient are left out until they do.
        optimizer_class: any optimizer that updates each element by its own gradient and state.
            Others are refused; those that update each parameter on its own (Adafactor, LAMB, Muon)
            need ``whole_parameters=True``.
        format: of the differences: a signed format of at most 16 bits, or such a format in blocks
            (``"int8@64"``). ``"fp32"``: masters travel as they are.
        block: numbers that share a scale, a power of two from 16 to 1024.
        process_group: the ranks; ``None``: all.
        whole_parameters: give ranks whole parameters, however uneven that makes their shares.
        gradient_format: ``None``, or a format of at most 16 bits (or fp32) in which gradients
            travel, scaled per parameter: then the optimizer averages them over the ranks, by a
            reduce-scatter. ``p.grad`` stays what this rank computed.
        tolerance: blocks travel as float32 whose replicas could be off by more than this share of
            their largest master.
        check_every: compare the replicas of all ranks every that many steps; if some differ, a
            warning names the parameter and the ranks, and all replicas are made anew. 0: never.
        adapt: measure the link once; if differences in the format take longer than float32, warn
            with both times, and send float32.
        link: what messages cost, instead of measuring it.
        ledger: where to count bytes and seconds; a new one by default.
        timeout: how long one message may take; ``None``: as long as in ``process_group``.
        message_bytes: size of the messages; ``None``: by the link, or 1 MiB.
        **defaults: arguments of the optimizer, such as ``lr``.

    Attributes:
        local: the wrapped optimizer over this rank's masters.
        ledger: one entry per step, movement ``"parameters"``.

    Raises:
        TypeError, ValueError: an argument is not what it should be, or the optimizer cannot be cut.
        CollectiveError: the ranks passed different arguments, or one refused its own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        format: FormatLike = "int8",
        block: int = 256,
        process_group: dist.ProcessGroup | None = None,
        *,
        whole_parameters: bool = False,
        gradient_format: FormatLike | None = None,
        tolerance: float = math.inf,
        check_every: int = 0,
        adapt: bool = True,
        link: Link | None = None,
        ledger: Ledger | None = None,
        timeout: timedelta | None = None,
        message_bytes: int | None = None,
        **defaults: Any,
    ) -> None:
        self._ready = False
        try:
            check_arguments(optimizer_class, tolerance, check_every, message_bytes, timeout)
            check_kinds(whole_parameters, adapt, link, ledger)
            self._optimizer_class, self._settings = optimizer_class, defaults
            self._whole, self._check_every = whole_parameters, check_every
            self._blocks = _blocks(format, block)
            gradient = None if gradient_format is None else format_of(gradient_format)
            if gradient is not None and whole_parameters:
                raise ValueError(
                    "gradient_format reduces even shards, but whole_parameters makes uneven ones; "
                    "leave one of them out, and average gradients with DDP"
                )
            example = optimizer_class(
                [torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float32, device="cpu"))],
                **defaults,
            )
            super().__init__(params, dict(example.defaults))
            parameters = self._unsharded()
            check_parameters(parameters)
            for group in self.param_groups:
                arguments = self._arguments_of(group)
                check_divisible(optimizer_class, defaults, arguments, whole_parameters)
        except Exception as error:
            if dist.is_initialized():
                refuse(process_group, error)  # or the others would wait for this rank
            raise
        settings = {
            "use": "parameters.ShardedOptimizer",
            "optimizer_class": optimizer_class.__name__,
            **{name: described(value) for name, value in defaults.items()},
            "format": str(format_of(format)),
            "block": str(block),
            "whole_parameters": str(whole_parameters),
            "gradient_format": "None" if gradient is None else gradient.name,
            "tolerance": str(tolerance),
            "check_every": str(check_every),
            "adapt": str(adapt),
            "link": str(link),
            "message_bytes": str(message_bytes),
            "param_groups": described([self._arguments_of(g) for g in self.param_groups]),
            **description_of(parameters),
        }
        self.ledger = Ledger() if ledger is None else ledger
        self._group = process_group
        self._transport = Transport(process_group, timeout, settings=settings)
        self._steps = 0
        self._spaces: list[Space] = []
        self._seen: set[int] = set()
        self.local = self._local_optimizer()
        self._ready = True
        self._shard(parameters)
        size = message_bytes or MESSAGE_BYTES
        if adapt and self._transport.world_size > 1 and self._blocks is not None:
            link = link or measure_link(self._transport)
            size = message_bytes or message_bytes_for(link)
            if not narrow_pays(link, self._transport, self._spaces, self._blocks):
                self._blocks = None
        self.link = link
        self._exchange = Exchange(self._transport, self._blocks, size, tolerance)
        self._gradients: GradientReducer | None = None
        if gradient is not None and self._transport.world_size > 1:
            self._gradients = GradientReducer(
                process_group, gradient, timeout, size, {"use": "gradients of ShardedOptimizer"}
            )

    # -- what is sharded -------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer`` does; on every rank at one point.

        Raises:
            TypeError, ValueError: they cannot be sharded, or are here already.
            CollectiveError: other ranks add others.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            parameters = self._unsharded()
            arguments = self._arguments_of(self.param_groups[-1])
            check_parameters(parameters)
            check_divisible(self._optimizer_class, self._settings, arguments, self._whole)
        except Exception as error:
            del self.param_groups[count:]
            if self._spaces:  # the others compare what they add: show them something else
                self._transport.all_gather(fingerprint(f"refused: {error}"))
            raise
        self.local.add_param_group({**arguments, "params": [_nothing()]})
        self._shard(parameters, described(arguments))

    def _unsharded(self) -> list[tuple[str, Tensor, int]]:
        """Parameters that require gradients and are in no space: name, parameter, group."""
        sharded = set() if not self._ready else self._seen
        found = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"{number}.{place}" for place in range(len(group["params"]))
            ]
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.requires_grad and id(parameter) not in sharded:
                    found.append((name, parameter, number))
        return found

    def _shard(self, parameters: Sequence[tuple[str, Tensor, int]], about: str = "") -> None:
        """Give parameters their places, on all ranks alike, and the local optimizer its pieces."""
        transport = self._transport
        if self._spaces:  # the first were compared when ranks met
            own = fingerprint(f"{description_of(parameters)} {about}")
            for rank, theirs in enumerate(transport.all_gather(own)):
                if not theirs.equal(own):
                    raise CollectiveError(
                        f"{transport.named([rank])} adds other parameters to its ShardedOptimizer "
                        f"than {transport.named([transport.rank])}, or refused them; all ranks "
                        "must add the same. Look at its output"
                    )
        spaces = []
        for dtype in dict.fromkeys(parameter.dtype for _, parameter, _ in parameters):
            of_dtype = [each for each in parameters if each[1].dtype == dtype]
            spaces.append(Space(of_dtype, transport.world_size, transport.rank, self._whole))
        self._seen |= {id(parameter) for _, parameter, _ in parameters}
        if transport.world_size > 1 and spaces and differing(transport, spaces):
            _take_from_rank_0(transport, spaces)
        self._spaces += spaces
        for space in spaces:
            for piece in space.pieces:
                self.local.param_groups[piece.slot.group]["params"].append(piece.master)

    def _arguments_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}

    def _local_optimizer(self) -> torch.optim.Optimizer:
        groups = [{**self._arguments_of(g), "params": [_nothing()]} for g in self.param_groups]
        return self._optimizer_class(groups, **self._settings)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's masters, and everybody's replicas; on every rank.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            CollectiveError: a rank died, did not come in time, or could not make its step.
            FloatingPointError: masters hold NaN or infinity; all ranks raise this and name the
                parameter. Replicas keep the numbers they had there.
            RuntimeError: a gradient is sparse.
        """
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                self._follow_the_model()
                reductions = self._update_masters()
        except CollectiveError:
            raise
        except Exception as error:
            self._refuse(error)
            raise
        with torch.no_grad():
            self._send(reductions)
        return loss

    def _refuse(self, error: Exception) -> None:
        if self._transport.world_size > 1:
            text = f"{type(error).__name__}: {error}"
            self._exchange.refuse(text)
            if self._gradients is not None:
                self._gradients.refuse()

    def _follow_the_model(self) -> None:
        """Take over what was written into parameters, and parameters that now require gradients."""
        for space in self._spaces:
            space.take_over(space.changed())
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"a parameter of group {number}, of shape {tuple(parameter.shape)}, has a "
                        "sparse gradient; shards need dense ones: sparse=False"
                    )
        new = self._unsharded()
        if new:
            check_parameters(new)
            self._shard(new)

    def _update_masters(self) -> list[Reduction]:
        """One step of the wrapped optimizer; the reductions of gradients that it took."""
        for own, group in zip(self.local.param_groups, self.param_groups, strict=True):
            own.update(self._arguments_of(group))
        reductions = []
        for space in self._spaces:
            if self._gradients is None:
                for piece in space.pieces:
                    piece.master.grad = piece.gradient(self._whole)
                continue
            mean, present, reduction = self._gradients.reduce(space)
            reductions.append(reduction)
            start = space.own.start
            anywhere = dict(zip(map(id, space.slots), present, strict=True))
            for piece in space.pieces:
                if anywhere[id(piece.slot)]:
                    piece.master.grad = mean[piece.begin - start : piece.end - start]
        self.local.step()
        for own, group in zip(self.local.param_groups, self.param_groups, strict=True):
            group.update({k: v for k, v in own.items() if k in group and k != "params"})
            for master in own["params"]:
                master.grad = None
        return reductions

    def _send(self, reductions: list[Reduction]) -> None:
        self._steps += 1
        begin = time.perf_counter()
        settings = [self._arguments_of(group) for group in self.param_groups]
        exchanged = self._exchange.run(self._spaces, self._steps, settings=described(settings))
        waited = time.perf_counter() - begin
        if reductions:
            self.ledger.record(
                "gradients",
                bytes_sent=sum(reduction.bytes_sent for reduction in reductions),
                codec_seconds=sum(reduction.codec_seconds for reduction in reductions),
                wire_seconds=sum(reduction.wire_seconds for reduction in reductions),
            )
        self.ledger.record(
            "parameters",
            bytes_sent=exchanged.bytes_sent,
            codec_seconds=exchanged.encode_seconds + exchanged.decode_seconds,
            wire_seconds=exchanged.wire_seconds,
            wait_seconds=waited,
        )
        self._finish(exchanged)
        if self._check_every and self._steps % self._check_every == 0:
            self.check_replicas()

    def _finish(self, exchanged: Exchanged) -> None:
        for space in self._spaces:
            space.remember()
        if exchanged.not_finite:
            space, index = min(
                exchanged.not_finite, key=lambda place: (self._spaces.index(place[0]), place[1])
            )
            name = space.name_at(index)
            raise FloatingPointError(
                f"after step {self._steps} the float32 masters of parameter {name!r} hold NaN or "
                "infinity. Replicas keep the numbers they had there, equal on all ranks. Look at "
                "the gradients and the learning rate (torch.nn.utils.clip_grad_norm_, GradScaler); "
                "to go on from the replicas: sync_masters_from_model(), and a new optimizer state"
            )

    # -- replicas and masters --------------------------------------------------------------------

    @torch.no_grad()
    def resynchronize(self) -> None:
        """Make all replicas equal to the masters, in float32; on every rank at one point."""
        self._finish(self._exchange.run(self._spaces, self._steps, plain=True))

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Make the masters what the model's parameters are now; on every rank.

        For writes that torch does not see (``p.data``). The ranks' models must be equal.
        """
        for space in self._spaces:
            space.take_over(space.slots)
            space.remember()

    def check_replicas(self) -> dict[str, list[int]]:
        """Compare the replicas of all ranks, and make them anew if they differ; on every rank.

        Returns:
            Parameters that differed from rank 0's, with the ranks; a warning says so as well.
        """
        if self._transport.world_size == 1:
            return {}
        found = differing(self._transport, self._spaces)
        if found:
            text = ", ".join(
                f"{name!r} on {self._transport.named(ranks)}" for name, ranks in found.items()
            )
            warnings.warn(
                f"after step {self._steps} parameters had other bits than on "
                f"{self._transport.named([0])}: {text[:500]}. Something but this optimizer wrote "
                "there, on some ranks only (or memory failed). All replicas have been made equal "
                "to their owners' masters",
                stacklevel=2,
            )
            self.resynchronize()
        return found

    def largest_error(self) -> float:
        """How far this rank's replicas are from its masters, as a share of the largest master."""
        error = largest = 0.0
        for space in self._spaces:
            if space.master.numel():
                off = space.master - space.replica[space.own]
                error = max(error, float(off.abs().max()))
                largest = max(largest, float(space.master.abs().max()))
        return error / largest if largest else 0.0

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Masters, replicas and optimizer state, in shards; on every rank at one point.

        For ``torch.distributed.checkpoint``, which writes every shard from its rank, and reads them
        on any number of ranks: ``load`` into what this method gives, then
        :meth:`load_state_dict`.
        """
        return checkpoint.saved(
            self._spaces, self.local, self._transport, self._group, self.param_groups, self._steps
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; on every rank at one point.

        Parameters of the model become the saved replicas, so that training goes on bit for bit on
        as many ranks as before.

        Raises:
            ValueError: it is the state of other parameters, or of another optimizer.
        """
        self._steps = checkpoint.load(state_dict, self._spaces, self.local, self.param_groups)
        checkpoint.gather_replicas(self._spaces, self._transport)
        for space in self._spaces:
            space.remember()


def _blocks(format: FormatLike, block: int) -> DifferenceBlocks | None:
    return None if format_of(format).name == "fp32" else difference_blocks(format, block)


def _nothing() -> torch.nn.Parameter:
    """Keeps a group without pieces on this rank from being empty; optimizers skip it.

    It is a matrix because Muon takes nothing else.
    """
    return torch.nn.Parameter(torch.zeros(0, 0, dtype=torch.float32, device="cpu"))


def _take_from_rank_0(transport: Transport, spaces: Sequence[Space]) -> None:
    for space in spaces:
        tag = transport.reserve(1)
        if transport.rank == 0:
            sends = [(peer, transport.send(space.replica, peer, tag)) for peer in transport.peers]
            transport.wait(sends, "sending the first parameters to")
        else:
            receive = transport.receive(space.replica, 0, tag)
            transport.wait([(0, receive)], "waiting for the first parameters of")
        space.master.copy_(space.replica[space.own])
