"""The DDP communication hook: gradients travel in narrow formats, nothing else changes.

DDP hands over a bucket of gradients as soon as it is full; the hook starts a compressed all-reduce
and returns at once, so that messages travel while the backward pass goes on. The trade-off against
DDP's built-in all-reduce: fewer bytes for some codec time and a rounding error per step.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.collectives.layout import MESSAGE_BYTES
from narrowgauge.collectives.link import Link
from narrowgauge.collectives.message import Scale
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduce import check_inside_format, check_scale
from narrowgauge.collectives.reduction import Reduction
from narrowgauge.collectives.transport import refuse
from narrowgauge.collectives.two_level import (
    Inside,
    TwoLevelReducer,
    TwoLevelReduction,
    inside_groups,
)
from narrowgauge.formats import Format, FormatLike
from narrowgauge.gradients.checks import (
    check_same_parameters,
    check_state,
    check_timeout,
    checked_count,
)
from narrowgauge.gradients.feedback import Residuals
from narrowgauge.gradients.policy import (
    FixedPolicy,
    FormatRule,
    Hybrid,
    HybridPolicy,
    Schedule,
    policy_of,
)
from narrowgauge.gradients.steps import StepwiseCompression
from narrowgauge.ledger import Ledger, round_off_sums


class GradientCompression(StepwiseCompression):
    """What :func:`compress` attached to a model.

    Attributes:
        ledger: one entry per step (per backward pass that synchronises), movement ``"gradients"``.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        policy: FixedPolicy,
        reducer: Reducer | TwoLevelReducer,
        *,
        scale: Scale,
        residuals: Residuals | None,
        ledger: Ledger,
        measure_error_every: int,
        check_every: int,
    ) -> None:
        super().__init__(policy, ledger)
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._scale = scale
        self._residuals = residuals
        self._measure_error_every = measure_error_every
        self._check_every = check_every
        self._reducer = reducer
        self._averaged_at: int | None = None  # the step whose residuals are equal on all ranks
        self._has_all = False  # whether the last bucket to come was that of its step
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []  # means, and what came of them

    @property
    def link(self) -> Link | None:
        """What messages cost between the ranks, if it was measured or given."""
        return self._reducer.link if isinstance(self._reducer, Reducer) else None

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each parameter's gradient now, by name."""
        return dict(self._policy.formats)

    def hook(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start reducing one bucket; DDP calls this during the backward pass.

        A hook of your own may call it: ``compress(..., register=False)``, then
        ``model.register_comm_hook(state, your_hook)``.
        """
        backward = self._enter_backward()
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        exact = self._exact_mean(buffer) if self._measures_error else None
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        sizes = [parameter.numel() for parameter in parameters]
        if isinstance(self._policy, HybridPolicy) and self._policy.measures(self._steps):
            gradients = dict(zip(names, flat.split(sizes), strict=True))
            scaled = self._scale is not None
            self._policy.decide(gradients, scaled, self._reducer.transport.all_reduce_sum)
        reduction = self._start(
            f"bucket {bucket.index()}",
            flat,
            sizes,
            names,
            None if flat is buffer else lambda: buffer.copy_(flat),
        )
        self._under_way.append(reduction)
        if exact is not None:
            self._exact.append((exact, reduction.flat))
        self._has_all = bucket.is_last()
        if backward == -1 and bucket.is_last():  # as join() does: nobody else would wait
            self._finish_step()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduction.add_done_callback(lambda: future.set_result(buffer))
        return future

    def _start(
        self,
        name: str,
        flat: torch.Tensor,
        sizes: list[int],
        names: tuple[str, ...],
        on_success: Any,
    ) -> Reduction | TwoLevelReduction:
        formats = [self._policy.formats[name] for name in names]
        if isinstance(self._reducer, TwoLevelReducer):
            return self._reducer.start(
                flat, sizes, formats, scale=self._scale, name=name, on_success=on_success
            )
        residual = None
        if self._residuals is not None:
            held = self._residuals.hold(names, flat)
            residual = self._residuals.of(names)
            on_success = partial(_give_back, held, on_success)
        if not self._reducer.narrow_pays(sizes, formats):
            return self._reducer.start_float32(
                flat, residual=residual, name=name, on_success=on_success
            )
        return self._reducer.start(
            flat,
            sizes,
            formats,
            scale=self._scale,
            residual=residual,
            name=name,
            on_success=on_success,
        )

    @property
    def _measures_error(self) -> bool:
        every = self._measure_error_every
        return every > 0 and self._steps % every == 0

    def _exact_mean(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's float32 mean over the ranks, by a plain all-reduce of its own."""
        exact = buffer.to(torch.float32, copy=True).div_(self._reducer.transport.world_size)
        self._reducer.transport.all_reduce_sum(exact)
        return exact

    def _is_complete(self) -> bool:
        return self._has_all and super()._is_complete()

    def _after_step(self) -> None:
        if self._check_every and self._steps % self._check_every == 0:
            check_same_parameters(self._reducer.transport, self._parameters)

    def _round_off_error(self) -> float | None:
        measured = [round_off_sums(exact, result) for exact, result in self._exact]
        self._exact.clear()
        count = sum(elements for _, elements in measured)
        return sum(total for total, _ in measured) / count if count else None

    def consolidate_state_dict(self) -> None:
        """Make this rank's state that of all ranks; every rank calls it before ``state_dict``.

        It replaces the residuals of error feedback by their mean over the ranks. What the mean
        gradient will get stays equal, so the training goes on as if resumed from the checkpoint, on
        any number of ranks.

        Raises:
            CollectiveError: a rank died or did not answer.
        """
        if self._residuals is not None:
            transport = self._reducer.transport
            self._residuals.average(transport.world_size, transport.all_reduce_sum)
        self._averaged_at = self._steps

    def state_dict(self) -> dict[str, Any]:
        """The step, the epoch, chosen formats and residuals: equal on all ranks.

        Raises:
            RuntimeError: residuals are not consolidated since the last step.
        """
        if self._residuals is not None and self._averaged_at != self._steps:
            raise RuntimeError(
                "each rank has residuals of its own; call consolidate_state_dict() on every rank "
                "before state_dict()"
            )
        return {
            "step": self._steps,
            "epoch": self._epoch,
            "formats": self._policy.state_dict(),
            "residuals": None if self._residuals is None else self._residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; every rank loads the same, on any number of ranks.

        Raises:
            ValueError: not such a state, residuals of other parameters, or residuals for a
                compression without.
        """
        check_state(state, ("step", "epoch", "formats", "residuals"))
        residuals = state["residuals"]
        if (residuals is None) != (self._residuals is None):
            raise ValueError(
                f"the state has {'no ' if residuals is None else ''}residuals, but this "
                f"compression has error_feedback={self._residuals is not None}; attach it as it "
                "was when the state was saved"
            )
        if self._residuals is not None:
            self._residuals.load_state_dict(residuals)
        self._policy.load_state_dict(state["formats"])
        self._steps = self._averaged_at = checked_count("step", state["step"])
        self._epoch = checked_count("epoch", state["epoch"])
        self._policy.begin_step(self._steps, self._epoch)


def _give_back(
    held: list[tuple[torch.Tensor, torch.Tensor]], then: Callable[[], object] | None
) -> None:
    for residual, kept in held:
        residual.add_(kept)
    if then is not None:
        then()


def compress(
    model: DistributedDataParallel,
    format: FormatRule | Schedule | Hybrid = "e5m2",
    *,
    scale: Scale = "local",
    keep: Mapping[str, FormatLike] | None = None,
    error_feedback: bool = False,
    adapt: bool = True,
    link: Link | None = None,
    inside: Inside | None = None,
    inside_format: FormatLike = "fp32",
    ledger: Ledger | None = None,
    measure_error_every: int = 0,
    check_every: int = 0,
    timeout: timedelta | None = None,
    message_bytes: int | None = None,
    register: bool = True,
) -> GradientCompression:
    """Send the gradients of a DDP model in a narrow format from now on.

    Every rank calls this once, with the same arguments, after wrapping the model. Nothing else in
    the training script changes: ``no_sync``, bucket views and unused parameters work as before. All
    ranks end every step with the same bits; a non-finite gradient on one rank is non-finite on all.

    Args:
        model: the wrapped model, on the CPU.
        format: the format on the wire, e.g. ``"e5m2"``, ``"e4m3"``, ``"int8"``, ``"bf16"``, or in
            blocks ``"mxfp8_e4m3"``, ``"int4@64"``, ``"nvfp4"``; or patterns of parameter names and
            their formats, the first match wins, e.g. ``{"fc": "fp32", "*.bias": "bf16", "*":
            "e4m3"}``; or a :class:`Schedule` of these, or a :class:`Hybrid`.
        scale: ``"local"`` (one exponent per tensor and rank in the message header), ``"shared"``
            (APS as published: agreed by all ranks first, with room for the sum), ``None`` (none).
            Block formats scale themselves and allow only ``"local"``.
        keep: parameters or modules that travel in another format, e.g. ``{"fc": "fp32"}``. APS
            keeps the last layer in float32. See :func:`~narrowgauge.gradients.parameter_formats`.
        error_feedback: send what rounding withheld in a later step; for formats of 4 bits and less.
        adapt: measure the link now, and send a bucket in float32 where that is faster. It says so,
            once per size.
        link: what messages cost, if it is known; it is not measured then.
        inside: reduce on two levels: the formats travel only between groups of ranks, which are so
            many consecutive ranks, those of one ``"host"`` (as ``LOCAL_WORLD_SIZE`` says), or the
            last dimension of a DeviceMesh of two. It does not adapt.
        inside_format: what travels inside such a group: fp32, or bf16.
        ledger: where to count bytes, seconds and error; a new one by default.
        measure_error_every: every so many steps (0: never) also all-reduce in float32 and enter
            the round-off error of the compressed gradients. Costs a float32 all-reduce each time,
            which is not counted in ``bytes_sent``.
        check_every: every so many steps (0: never) compare the parameters of all ranks, bit by bit;
            not within ``join()``, where ranks without inputs rightly keep theirs.
        timeout: how long one message may take before the step fails on the ranks that wait for it;
            ``None``: as long as in the model's process group.
        message_bytes: size of the messages a bucket is cut into; ``None``: by the measured link, or
            512 KiB.
        register: whether to register the hook. DDP allows one: to have a hook of your own as well,
            call the result's ``hook(state, bucket)`` in it.

    Returns:
        The compression attached to the model, with its ledger.

    Raises:
        TypeError: ``model`` is not a DistributedDataParallel, or an argument is of a wrong type.
        ValueError: a wrong format, scale or pattern; parameters that are not on the CPU; error
            feedback on two levels.
        CollectiveError: the ranks passed different arguments, or one refused its own.
        RuntimeError: the model has a communication hook already (DDP allows one).
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}; wrap it first: "
            "torch.nn.parallel.DistributedDataParallel(model). For fully_shard (FSDP2) there is "
            "compress_sharded"
        )
    group = model.process_group
    ignored = set(model.parameters_to_ignore)
    named = {
        name.replace("_orig_mod.", ""): parameter  # which torch.compile puts before its modules
        for name, parameter in model.module.named_parameters()
        if name not in ignored
    }
    try:
        _check_settings(scale, error_feedback, inside)
        for name, number, least in (
            ("measure_error_every", measure_error_every, 0),
            ("check_every", check_every, 0),
            ("message_bytes", 1 if message_bytes is None else message_bytes, 1),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} is {number!r}; allowed: whole numbers from {least}")
        _check_parameters(named)
        policy = policy_of(named, format, keep)
        check_scale(scale, policy.all_formats)
        wide = check_inside_format(inside_format)
        groups = None if inside is None else inside_groups(inside, group)
        check_timeout(timeout)
        for name, given, allowed in (("link", link, Link), ("ledger", ledger, Ledger)):
            if not isinstance(given, (allowed, type(None))):
                raise TypeError(f"{name} is {given!r}; allowed: a {allowed.__name__}, or None")
    except Exception as error:
        refuse(group, error)  # or the others would wait for this rank
        raise
    settings = {
        "use": "gradients.compress",
        "inside": str(groups),
        "inside_format": wide.name,
        "scale": repr(scale),
        "error_feedback": str(error_feedback),
        "adapt": str(adapt),
        "link": str(link),
        "measure_error_every": str(measure_error_every),
        "check_every": str(check_every),
        "message_bytes": str(message_bytes),
        "format": str(format),
        "keep": str(keep),
        "formats": str({name: format.name for name, format in policy.formats.items()}),
    }
    size = message_bytes or MESSAGE_BYTES
    reducer: Reducer | TwoLevelReducer
    if groups is None:
        reducer = Reducer(group, timeout, size, settings=settings)
    else:
        reducer = TwoLevelReducer(groups, wide, group, timeout, size, settings)
    if adapt and isinstance(reducer, Reducer):
        reducer.adapt(link, message_bytes)
    sizes = {name: parameter.numel() for name, parameter in named.items()}
    compression = GradientCompression(
        named,
        policy,
        reducer,
        scale=scale,
        residuals=Residuals(sizes) if error_feedback else None,
        ledger=Ledger() if ledger is None else ledger,
        measure_error_every=measure_error_every,
        check_every=check_every,
    )
    if register:
        model.register_comm_hook(None, compression.hook)
    return compression


def _check_settings(scale: object, error_feedback: bool, inside: Inside | None) -> None:
    check_scale(scale)
    if error_feedback and inside is not None:
        raise ValueError(
            "error_feedback keeps what each rank's own gradient lost, but with inside=… only sums "
            "of groups are rounded; leave one of them out"
        )


def _check_parameters(named: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            raise TypeError(
                f"parameter {name!r} is a DTensor, whose placements an all-reduce of DDP would "
                "contradict; use fully_shard and compress_sharded"
            )
        if not parameter.is_floating_point():
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; allowed: floating dtypes (keep the real "
                "and the imaginary part as two parameters)"
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; compressed gradients travel over "
                "Gloo from CPU memory: keep the model on the CPU"
            )
