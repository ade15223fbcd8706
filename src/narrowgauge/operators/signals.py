"""What operators in a narrow format do to a training step, judged in float32.

The same step is made twice, in float32 and with some operators in the format: same batch, same
parameters, same random numbers. What counts is how far the gradient turns away, and whether the
loss changes; the error of an operator's own output tells little (a softmax may be off by a percent
and harm nothing, a loss by as much and end the training). The trade-off: a forward and a backward
pass for each set of operators that is judged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.collectives.message import as_sent
from narrowgauge.collectives.reduce import wire_format
from narrowgauge.formats import FloatFormat, FormatLike, format_of
from narrowgauge.operators.compute import Compute, compute_of, run
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.operators.recording import Recording, tensors_in
from narrowgauge.operators.replay import ReplayError, StepTape
from narrowgauge.rounding import quantize


@dataclass(frozen=True)
class Signal:
    """What a set of operators in a format does to one step.

    Args:
        gradient_error: ‖g − g₃₂‖ / ‖g₃₂‖ over all parameters; infinite if g is not finite, or if
            the step raises in this format, as torch cannot compute every operator in each.
        loss_change: |loss − loss₃₂| / |loss₃₂|; infinite likewise.
        overflow: how many finite numbers, operands and results, the format turns infinite or holds
            at its largest.
        underflow: how many numbers other than zero it turns into zero.
    """

    gradient_error: float
    loss_change: float
    overflow: int = 0
    underflow: int = 0

    def worst(self, other: Signal) -> Signal:
        """The larger of each, as over several steps or ranks."""
        return Signal(
            max(self.gradient_error, other.gradient_error),
            max(self.loss_change, other.loss_change),
            max(self.overflow, other.overflow),
            max(self.underflow, other.underflow),
        )

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


class Judge:
    """Judges sets of operators on one step, which is over.

    Args:
        model: the model.
        tape: the step.
        plan: all operators in float32.
        formats: formats whose overflows and underflows are counted, for all operators at once.
        watched: names of the operators whose are; ``None``: all.

    Attributes:
        loss: in float32.
        gradients: in float32, of each parameter that requires one.
        usable: whether loss and gradients are finite in float32, so that they can judge.
        saved_bytes: what autograd kept for the backward pass, parameters apart, when the step was
            last made; at first that is in float32.
        ranges: (overflows, underflows) by (operator, format).
    """

    def __init__(
        self,
        model: nn.Module,
        tape: StepTape,
        plan: OperatorPlan,
        formats: Sequence[str] = (),
        watched: Collection[str] | None = None,
    ) -> None:
        self._model, self._tape, self._plan = model, tape, plan
        watch = RangeWatch(formats, watched)
        self._parameters = {p.untyped_storage().data_ptr() for p in tape.parameters}
        self.loss, self.gradients = self._made(lambda: self._following(plan, watch))
        self.ranges = watch.counts
        self._norm = _norm(self.gradients)
        self.usable = math.isfinite(self.loss) and 0 < self._norm < math.inf

    def signal(self, formats: Mapping[str, FormatLike]) -> Signal:
        """What these operators do in these formats, all others being in float32.

        Args:
            formats: format by operator name.
        """
        plan = self._plan.with_formats(formats)
        found = self._compared(lambda: self._following(plan))
        counts = [self.ranges.get((n, compute_of(f).name), (0, 0)) for n, f in formats.items()]
        return Signal(*found, sum(o for o, _ in counts), sum(u for _, u in counts))

    def autocast(self, dtype: torch.dtype, device: str) -> Signal:
        """What ``torch.autocast`` does to the step."""
        return Signal(*self._compared(lambda: torch.autocast(device, dtype)))

    def _compared(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> tuple[float, float]:
        try:
            loss, gradients = self._made(around)
        except (ReplayError, torch.cuda.OutOfMemoryError):
            raise
        except Exception:  # torch has no kernel for an operator, or mixes no dtypes in another
            return math.inf, math.inf
        differences = [
            found if exact is None else exact if found is None else found.float() - exact.float()
            for exact, found in zip(self.gradients, gradients, strict=True)
        ]
        error = _norm(differences) / max(self._norm, 1e-30)
        change = abs(loss - self.loss) / max(abs(self.loss), 1e-30)
        return (
            error if math.isfinite(error) else math.inf,
            change if math.isfinite(change) else math.inf,
        )

    def _following(
        self, plan: OperatorPlan, recording: Recording | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        return plan.applied(self._model, mismatch="ignore", recording=recording)

    def _made(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> tuple[float, list[Tensor | None]]:
        """Loss and gradients of the step in a context; counts what is kept between."""
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            if x.layout is not torch.strided:
                return x  # a sparse tensor is no plan's to save
            place = x.untyped_storage().data_ptr()  # all are alive until the backward pass
            kept[place] = max(kept.get(place, 0), x.numel() * x.itemsize)
            return x

        @contextlib.contextmanager
        def forward() -> Iterator[None]:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), around():
                yield

        found = self._tape.gradients(forward)
        self.saved_bytes = sum(n for place, n in kept.items() if place not in self._parameters)
        return found


def _norm(tensors: Sequence[Tensor | None]) -> float:
    """Of all together, summed in float64."""
    squares = [x.detach().double().square().sum() for x in tensors if x is not None]
    return math.sqrt(s) if math.isfinite(s := float(sum(squares))) else math.inf


class RangeWatch(Recording):
    """Counts what formats would lose of operands and results, while operators run in float32."""

    def __init__(self, formats: Sequence[str], watched: Collection[str] | None) -> None:
        super().__init__()
        self._watched = watched
        self._formats = {name: compute_of(name) for name in formats}
        self.counts: dict[tuple[str, str], tuple[int, int]] = {}

    def called(
        self,
        name: str,
        operator: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Compute,
        cast: Any,
        inside: bool,
    ) -> Any:
        """Call the operator; count operands before, as it may write into them, and results."""
        if self._watched is not None and name not in self._watched:
            return run(compute, operator, function, args, kwargs, cast)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            before = [self._lost(x) for x in tensors_in((args, kwargs))]
        result = run(compute, operator, function, args, kwargs, cast)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            lost = [*before, *(self._lost(x) for x in tensors_in(result))]
        for position, format in enumerate(self._formats):
            both = [entry[position] for entry in lost if entry]
            self.counts[name, format] = (sum(o for o, _ in both), sum(u for _, u in both))
        return result

    def moved(self, *_: Any) -> None:
        """What only moves data loses nothing."""

    def _lost(self, x: Tensor) -> list[tuple[int, int]]:
        if not x.is_floating_point() or not x.numel():
            return []
        found = []
        for compute in self._formats.values():
            name = compute.forward or compute.name.partition("/")[0]
            format = format_of(name if name != "promote" else "fp32")
            values = x.detach().float()
            if compute.dtype is not None and compute.forward is None:
                narrow = values.to(compute.dtype).float()
            else:
                narrow = quantize(values, format)
            largest = format.largest if isinstance(format, FloatFormat) else math.inf
            over = (narrow.abs().isinf() & values.isfinite()) | (values.abs() > 2 * largest)
            under = (narrow == 0) & (values != 0)
            found.append((int(over.sum()), int(under.sum())))
        return found


def gradient_errors(
    gradients: Mapping[str, Tensor], formats: Sequence[FormatLike]
) -> dict[str, dict[str, float]]:
    """The relative error ‖Q(g) − g‖ / ‖g‖ of each parameter's gradient in each format.

    Q(g) is what others read of a message with it: scaled by a power of two (auto-precision
    scaling), or in blocks, as ``narrowgauge.gradients.compress`` sends it by default.

    Args:
        gradients: by parameter name.
        formats: formats of the wire.

    Returns:
        Error by parameter name, then by format name; 0 for a gradient of zeros.

    Raises:
        ValueError: a format that cannot travel.
    """
    candidates = [wire_format(format) for format in formats]
    errors: dict[str, dict[str, float]] = {}
    for name, gradient in gradients.items():
        exact = gradient.detach().float().cpu().flatten()
        norm = float(exact.double().norm())
        errors[name] = {
            format.name: _norm([as_sent(exact, format, True) - exact]) / (norm or 1.0)
            for format in candidates
        }
    return errors


def narrowest(
    errors: Mapping[str, Mapping[str, float]], formats: Sequence[FormatLike], bound: float
) -> dict[str, str]:
    """For each parameter the format with the fewest bits whose error is within a bound.

    Returns:
        Format by parameter name, ``"fp32"`` where none is within it: a policy that
        ``narrowgauge.gradients.compress(model, policy)`` takes.
    """
    by_bits = sorted((format_of(f) for f in formats), key=lambda format: format.bits)
    return {
        name: next((f.name for f in by_bits if found[f.name] <= bound), "fp32")
        for name, found in errors.items()
    }
