"""What operators, casts and saved activations cost here, and the formats that cost least together.

Each distinct signature is timed once per format, forward and backward, on operands of the recorded
shapes and strides; each size of cast as well. That a stride-2 depthwise convolution is many times
slower in bf16 on one processor, and faster on the next, is in no list. The trade-off: operators are
timed alone, with warm caches; so what the sums promise is verified on whole steps afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from narrowgauge.formats import format_of
from narrowgauge.operators.compute import NATIVE, compute_of, run
from narrowgauge.operators.recording import Operand, OperatorCall, Recording, tensors_in
from narrowgauge.operators.search.cut import Edge as Cast
from narrowgauge.operators.search.cut import cheapest_formats
from narrowgauge.operators.search.timing import time_in_turn

_TIED = 1e9  # an operator that writes into its input has that input's format


@dataclass
class Profile:
    """Measured seconds.

    Args:
        operators: by signature, then by format: forward and backward; formats are missing in which
            torch cannot compute it.
        casts: by format from, format to: (elements, seconds there and back), ascending.
    """

    operators: dict[str, dict[str, float]] = field(default_factory=dict)
    casts: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything was measured."""
        return bool(self.casts)

    def cast(self, source: str, target: str, numel: int) -> float:
        """Seconds of a cast, there and back: between or beyond the measured sizes, on a line."""
        points = self.casts.get((source, target), [])
        if source == target or not points:
            return 0.0
        if len(points) == 1:
            return points[0][1]
        after = next((i for i, (size, _) in enumerate(points) if size >= numel), len(points) - 1)
        (n0, t0), (n1, t1) = points[max(after, 1) - 1], points[max(after, 1)]
        return max(t0 + (t1 - t0) * (numel - n0) / (n1 - n0), min(t0, t1) * 0.5)


def measure(
    recording: Recording,
    formats: Sequence[str],
    seconds: float,
    known: Mapping[str, dict[str, float]] | None = None,
) -> Profile:
    """Times all signatures and casts of a recording.

    Args:
        recording: with arguments of each signature.
        formats: native formats.
        seconds: to spend on all together, about; every signature is timed at least once.
        known: times of signatures that need not be measured again.
    """
    profile = Profile()
    calls = {c.signature: c for c in recording if c.arguments is not None and not c.in_place}
    share = seconds / max(1, len(calls) + 1)
    for signature, call in calls.items():
        times = (known or {}).get(signature)
        if times is None or not set(times) <= set(formats):
            times = _time_call(call, formats, share)
        profile.operators[signature] = times
    sizes = sorted({edge.numel for edge in recording.edges})
    if len(sizes) > 6:
        sizes = [sizes[round(i * (len(sizes) - 1) / 5)] for i in range(6)]
    devices = {x.device for c in calls.values() for x in tensors_in(c.arguments)}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    for source in formats:
        for target in formats:
            if source != target:
                timed = {n: _cast_there_and_back(n, source, target, device) for n in sizes}
                took = time_in_turn(timed, rounds=20, seconds=share / len(formats) ** 2)
                profile.casts[source, target] = sorted(took.items())
    return profile


def _time_call(call: OperatorCall, formats: Sequence[str], seconds: float) -> dict[str, float]:
    with torch.random.fork_rng(devices=[]):
        functions = {}
        for format in formats:
            function = _forward_and_backward(call, format)
            try:
                function()
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # torch has no kernel for it
                continue
            functions[format] = function
        if "fp32" not in functions:
            return {}
        return time_in_turn(functions, rounds=9, seconds=seconds, clock=_clock)


def _clock() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _forward_and_backward(call: OperatorCall, format: str) -> Callable[[], object]:
    """The call in a format, on operands that come in it; parameters are cast, as a plan does."""
    assert call.arguments is not None
    dtype = NATIVE[format]
    compute = compute_of(format)
    operands = iter(call.inputs)
    leaves: list[Tensor] = []

    def prepared(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        operand = next(operands, None)
        if not value.is_floating_point():
            return value
        copy = value.detach().clone(memory_format=torch.preserve_format)
        if operand is not None and operand.requires_grad:
            if not operand.parameter and value.dtype in NATIVE.values():
                copy = copy.to(dtype)
            leaves.append(copy.requires_grad_())
        return copy

    args, kwargs = tree_map(prepared, call.arguments)

    def forward() -> Any:
        return run(compute, call.operator, call.function, args, kwargs)

    if not leaves:
        return forward

    def both() -> object:
        outputs = [x for x in tensors_in(forward()) if x.requires_grad]
        if not outputs:
            return None
        ones = [torch.ones_like(x) for x in outputs]
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)

    return both


def _cast_there_and_back(
    numel: int, source: str, target: str, device: torch.device
) -> Callable[[], object]:
    x = torch.ones(numel, dtype=NATIVE[source], device=device, requires_grad=True)
    gradient = torch.ones(numel, dtype=NATIVE[target], device=device)
    return lambda: torch.autograd.grad(x.to(NATIVE[target]), x, gradient)


def saved_bytes(recording: Recording, formats: Mapping[str, str]) -> int:
    """What autograd keeps for the backward pass, reckoned from what it kept in float32.

    A tensor is kept once, in the format of the operator that made it, and once more in each other
    format in which an operator takes and keeps it. Parameters count where they are cast.

    Args:
        recording: in float32.
        formats: format by operator name; what is missing is float32.
    """
    kept: dict[tuple[int, str], int] = {}
    found, parameters = resolved(recording, formats), _parameters(recording)
    for call in recording:
        format = found[call.name]
        for operand in call.saved:
            if operand.storage in parameters and format == "fp32":
                continue
            kept[operand.storage, format] = _bytes(operand, format)
    return sum(kept.values())


def resolved(recording: Recording, formats: Mapping[str, str]) -> dict[str, str]:
    """Formats in which ``"promote"`` is replaced by what the operands come in.

    That is the producers' format if they all have the same, else float32.
    """
    producers: dict[str, set[str]] = {}
    found: dict[str, str] = {}
    for edge in recording.edges:
        producers.setdefault(edge.consumer, set()).add(edge.producer)
    for call in recording:
        format = formats.get(call.name, "fp32")
        if format == "promote":
            made_in = {found.get(name, "fp32") for name in producers.get(call.name, ())}
            format = made_in.pop() if len(made_in) == 1 else "fp32"
        found[call.name] = format
    return found


def _parameters(recording: Recording) -> set[int]:
    """Storages of parameters, of which operators may keep a view."""
    return {x.storage for call in recording for x in call.inputs if x.parameter}


def _bytes(operand: Operand, format: str) -> int:
    if operand.dtype is not torch.float32:
        return operand.bytes
    bits = format_of(format.partition("/")[0]).bits  # of a simulated one: as if it were stored
    return math.ceil(operand.numel * bits / 8)


def never_cheapest(
    recording: Recording, profile: Profile, formats: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Operators that lose more in a format than all casts around them could spare, and why.

    Without a weight for memory, :func:`cheapest_plan` would not choose them, with a caution of up
    to 2.
    """
    casts: dict[tuple[str, str], float] = {}
    for edge in recording.edges:
        for format in formats:
            there, back = (profile.cast(*pair, edge.numel) for pair in _both(format))
            for name in (edge.producer, edge.consumer):
                casts[name, format] = casts.get((name, format), 0.0) + 2 * max(there, back)
    tied = {call.name for call in recording if call.in_place}
    for edge in reversed(recording.edges):
        if edge.consumer in tied:  # it has its producer's format, so its casts are that one's, too
            for format in formats:
                more = casts.get((edge.consumer, format), 0.0)
                casts[edge.producer, format] = casts.get((edge.producer, format), 0.0) + more
    found = {}
    for call in recording:
        times = profile.operators.get(call.signature, {})
        for format in formats:
            if times and format not in times:
                found[call.name, format] = "torch cannot compute it in this format"
            elif format in times and times[format] - times["fp32"] > casts.get(
                (call.name, format), 0
            ):
                found[call.name, format] = (
                    f"it takes {times[format] / times['fp32']:.3g} × as long as in float32, more "
                    "than casts around it could spare; not judged"
                )
    return found


def _both(format: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("fp32", format), (format, "fp32")


def cheapest_plan(
    recording: Recording,
    profile: Profile,
    allowed: Mapping[str, Sequence[str]],
    *,
    memory_weight: float = 0.0,
    caution: float = 1.0,
) -> dict[str, str]:
    """The formats for which (time / time₃₂) + memory_weight · (saved bytes / bytes₃₂) is least.

    Args:
        recording: the operators and their edges.
        profile: what they cost.
        allowed: formats that an operator may take; what is missing is float32.
        memory_weight: what saved bytes are worth: with 1, halving them is worth halving the time.
        caution: by how much casts are taken to cost more than measured.

    Returns:
        Format by operator name; ``"promote"`` for those that write into their input.
    """
    costs: dict[str, dict[str, float]] = {}
    first_saver: dict[int, str] = {}
    parameters = _parameters(recording)
    all_seconds = sum(profile.operators.get(c.signature, {}).get("fp32", 0.0) for c in recording)
    all_bytes = saved_bytes(recording, {}) or 1
    per_second, per_byte = 1 / (all_seconds or 1.0), memory_weight / all_bytes
    by_name = {call.name: call for call in recording}
    for call in recording:
        formats = ["fp32", *(f for f in allowed.get(call.name, ()) if f != "fp32")]
        if call.in_place:
            formats = sorted({f for names in allowed.values() for f in names} | {"fp32"})
        times = profile.operators.get(call.signature, {})
        own = [x for x in call.saved if first_saver.setdefault(x.storage, call.name) == call.name]
        costs[call.name] = {
            format: per_second * times.get(format, 0.0)
            + per_byte
            * sum(_bytes(x, format) for x in own if x.storage not in parameters or format != "fp32")
            for format in formats
        }
    casts = []
    for edge in recording.edges:
        if edge.producer not in by_name or edge.consumer not in by_name:
            continue
        source, target = by_name[edge.producer], by_name[edge.consumer]
        keeps = {x.storage for x in target.saved} & {x.storage for x in target.inputs}
        price: dict[tuple[str, str], float] = {}
        for a in costs[source.name]:
            for b in costs[target.name]:
                if a == b:
                    continue
                seconds = profile.cast(a, b, edge.numel) * (1.0 if edge.requires_grad else 0.5)
                copy = edge.numel * NATIVE[b].itemsize if keeps else 0
                price[a, b] = caution * per_second * seconds + per_byte * copy
                if target.in_place:
                    price[a, b] = _TIED
        casts.append(Cast(source.name, target.name, price))
    chosen = cheapest_formats(costs, casts)
    return {n: "promote" if by_name[n].in_place else f for n, f in chosen.items()}
