"""The DDP communication hook: gradients travel in narrow formats, nothing else changes.

DDP hands over a bucket of gradients as soon as it is full; the hook starts a compressed all-reduce
and returns at once, so that messages travel while the backward pass goes on. The trade-off against
DDP's built-in all-reduce: fewer bytes for some codec time and a rounding error per step.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.collectives.layout import MESSAGE_BYTES
from narrowgauge.collectives.message import Scale
from narrowgauge.collectives.pipeline import Reducer
from narrowgauge.collectives.reduce import check_scale
from narrowgauge.collectives.reduction import Reduction
from narrowgauge.formats import Format, FormatLike
from narrowgauge.gradients.policy import parameter_formats
from narrowgauge.ledger import Ledger, round_off_sums


class GradientCompression:
    """What :func:`compress` attached to a model.

    Attributes:
        ledger: one entry per step (per backward pass that synchronises), movement ``"gradients"``.
        formats: the format of each parameter's gradient, by name.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        formats: dict[str, Format],
        scale: Scale,
        ledger: Ledger,
        measure_error_every: int,
        timeout: timedelta,
        message_bytes: int,
    ) -> None:
        self.ledger = ledger
        self.formats = formats
        self._format_of_parameter = {
            id(parameter): formats[name] for name, parameter in model.module.named_parameters()
        }
        self._scale = scale
        self._measure_error_every = measure_error_every
        self._reducer = Reducer(model.process_group, timeout, message_bytes)
        self._reducer.transport.agree(
            "formats, scale and settings of gradient compression",
            f"{ {name: f.name for name, f in formats.items()} }, {scale=}, "
            f"{measure_error_every=}, {message_bytes=}",
        )
        self._steps = 0
        self._backward = -1  # autograd's number of the backward pass under way
        self._under_way: list[tuple[Reduction, torch.Tensor | None]] = []

    def hook(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start reducing one bucket; DDP calls this during the backward pass."""
        backward = torch._C._current_graph_task_id()
        if backward not in (self._backward, -1):
            # Runs when this backward pass is over. An error set on the future would reach the user
            # as a failed cast; raised from here it arrives as it is.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_step)
            self._backward = backward
            self._under_way = []
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        exact = self._exact_mean(buffer) if self._measures_error else None
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        reduction = self._reducer.start(
            flat,
            [parameter.numel() for parameter in parameters],
            [self._format_of_parameter[id(parameter)] for parameter in parameters],
            scale=self._scale,
            on_success=None if flat is buffer else lambda: buffer.copy_(flat),
        )
        self._under_way.append((reduction, exact))
        if backward == -1:  # DDP reduces outside of a backward pass, so nobody would wait
            self._finish_step()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduction.add_done_callback(lambda: future.set_result(buffer))
        return future

    @property
    def _measures_error(self) -> bool:
        every = self._measure_error_every
        return every > 0 and self._steps % every == 0

    def _exact_mean(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's float32 mean over the ranks, by a plain all-reduce of its own."""
        exact = buffer.to(torch.float32, copy=True).div_(self._reducer.transport.world_size)
        self._reducer.transport.all_reduce_sum(exact)
        return exact

    def _finish_step(self) -> None:
        """Wait for all buckets of this backward pass and enter them into the ledger."""
        under_way, self._under_way, self._backward = self._under_way, [], -1
        self._steps += 1
        for reduction, _ in under_way:
            reduction.wait()
        measured = [round_off_sums(e, r.flat) for r, e in under_way if e is not None]
        count = sum(elements for _, elements in measured)
        self.ledger.record(
            "gradients",
            bytes_sent=sum(reduction.bytes_sent for reduction, _ in under_way),
            codec_seconds=sum(reduction.codec_seconds for reduction, _ in under_way),
            wire_seconds=sum(reduction.wire_seconds for reduction, _ in under_way),
            round_off_error=sum(total for total, _ in measured) / count if count else None,
        )


def compress(
    model: DistributedDataParallel,
    format: FormatLike = "e5m2",
    *,
    scale: Scale = "local",
    keep: Mapping[str, FormatLike] | None = None,
    ledger: Ledger | None = None,
    measure_error_every: int = 0,
    timeout: timedelta = default_pg_timeout,
    message_bytes: int = MESSAGE_BYTES,
) -> GradientCompression:
    """Send the gradients of a DDP model in a narrow format from now on.

    Every rank calls this once, with the same arguments, after wrapping the model. Nothing else in
    the training script changes: ``no_sync``, bucket views and unused parameters work as before. All
    ranks end every step with the same bits; a non-finite gradient on one rank is non-finite on all.

    Args:
        model: the wrapped model, on the CPU.
        format: the format on the wire, e.g. ``"e5m2"``, ``"e4m3"``, ``"int8"``, ``"bf16"``, or in
            blocks ``"mxfp8_e4m3"``, ``"int4@64"``, ``"nvfp4"``.
        scale: ``"local"`` (one exponent per tensor and rank in the message header), ``"shared"``
            (APS as published: agreed by all ranks first, with room for the sum), ``None`` (none).
            Block formats scale themselves and allow only ``"local"``.
        keep: parameters or modules that travel in another format, e.g. ``{"fc": "fp32"}``. APS
            keeps the last layer in float32. See :func:`~narrowgauge.gradients.parameter_formats`.
        ledger: where to count bytes, seconds and error; a new one by default.
        measure_error_every: every so many steps (0: never) also all-reduce in float32 and enter
            the round-off error of the compressed gradients. Costs a float32 all-reduce each time,
            which is not counted in ``bytes_sent``.
        timeout: how long one message may take before the step fails on the ranks that wait for it.
        message_bytes: size of the messages a bucket is cut into.

    Returns:
        The compression attached to the model, with its ledger.

    Raises:
        TypeError: ``model`` is not a DistributedDataParallel.
        ValueError: a wrong format, scale or key of ``keep``; parameters that are not on the CPU.
        CollectiveError: the ranks passed different arguments.
        RuntimeError: the model has a communication hook already (DDP allows one).
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}; wrap it first: "
            "torch.nn.parallel.DistributedDataParallel(model)"
        )
    check_scale(scale)
    if measure_error_every < 0:
        raise ValueError(
            f"measure_error_every is {measure_error_every}; allowed: 0 (never) or more"
        )
    named = dict(model.module.named_parameters())
    for name, parameter in named.items():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}; compressed gradients travel over "
                "Gloo from CPU memory: keep the model on the CPU"
            )
    formats = parameter_formats(named, format, keep)
    check_scale(scale, formats.values())
    compression = GradientCompression(
        model,
        formats,
        scale,
        Ledger() if ledger is None else ledger,
        measure_error_every,
        timeout,
        message_bytes,
    )
    model.register_comm_hook(None, compression.hook)
    return compression
