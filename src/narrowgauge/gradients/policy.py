"""Which parameter's gradient travels in which format, and from when on.

A policy is written as one format, as patterns of parameter names, as a schedule of these, or as a
bound on the round-off error under which each parameter takes the narrowest format it can. All ranks
decide alike: from the step, the epoch, or sums over all ranks. The trade-off: what is narrow early
or in a sensitive layer may cost accuracy; what is wide costs bytes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch

from narrowgauge.collectives.message import as_sent
from narrowgauge.collectives.reduce import wire_format
from narrowgauge.formats import BlockFormat, FloatFormat, Format, FormatLike, IntFormat, format_of

F = TypeVar("F", bound=Format)
FormatRule: TypeAlias = FormatLike | Mapping[str, FormatLike]
"""One format for all parameters, or patterns of names and their formats."""


@dataclass(frozen=True)
class Schedule:
    """Formats that change during the training, e.g. float32 first and narrow later.

    APS trains 30 of 90 epochs in float32 and the rest in (4,3): ``Schedule({0: "fp32", 30: "e4m3"},
    unit="epoch")`` (arXiv 1911.08907, "hybrid precision").

    Args:
        stages: from which step or epoch on which format, or patterns of names; one begins at 0.
        unit: what is counted: ``"step"`` (backward passes that synchronise), or ``"epoch"``, which
            the training tells by ``set_epoch``.

    Raises:
        ValueError: no stage begins at 0, one begins before, or an unknown unit.
    """

    stages: Mapping[int, FormatRule]
    unit: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Mapping):
            raise TypeError(
                f"stages is {type(self.stages).__name__}; it must be a dict from steps or epochs "
                'to formats, such as {0: "fp32", 30: "e4m3"}'
            )
        begins = list(self.stages)
        if not all(isinstance(b, int) and not isinstance(b, bool) and b >= 0 for b in begins):
            raise ValueError(f"stages begin at {begins}; allowed: whole numbers from 0")
        if 0 not in begins:
            raise ValueError(f"stages begin at {begins}; one must begin at 0")
        if self.unit not in ("step", "epoch"):
            raise ValueError(f"unit is {self.unit!r}; allowed: 'step', 'epoch'")


@dataclass(frozen=True)
class Hybrid:
    """For each parameter the narrowest format whose measured round-off error is within a bound.

    Every so many steps each rank rounds its own gradients to every format that is not yet excluded
    and all ranks compare the mean of ``|(exact - rounded) / exact|`` over the elements (the metric
    of arXiv 1911.08907) with the bound.

    Args:
        formats: the candidates; sorted by their bits here. If none is within the bound, the widest
            is taken.
        bound: largest mean relative error, above 0.
        every: steps between measurements, the first of which is made before anything is sent.

    Raises:
        ValueError: no candidate, a bound that is not positive, or ``every`` below 1.
    """

    formats: Sequence[FormatLike] = ("int4@32", "e4m3", "bf16", "fp32")
    bound: float = 0.1
    every: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.formats, (list, tuple)) or not self.formats:
            raise ValueError(f"formats is {self.formats!r}; pass at least one, in a list")
        if not isinstance(self.bound, (int, float)) or not 0 < self.bound < math.inf:
            raise ValueError(f"bound is {self.bound!r}; it must be positive, e.g. 0.1 for 10 %")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every is {self.every!r}; allowed: a number of steps from 1")


class FixedPolicy:
    """The same formats in every step."""

    def __init__(self, formats: dict[str, Format]) -> None:
        self.formats = formats

    @property
    def all_stages(self) -> list[dict[str, Format]]:
        """The formats by name in each stage that is known beforehand."""
        return [self.formats]

    @property
    def all_formats(self) -> set[Format]:
        """Every format that may travel."""
        return {format for formats in self.all_stages for format in formats.values()}

    def begin_step(self, step: int, epoch: int) -> None:
        """Turn to the formats of this step."""

    def measures(self, step: int) -> bool:
        """Whether :meth:`decide` is to be called in this step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""


class ScheduledPolicy(FixedPolicy):
    """The formats of the latest stage that has begun."""

    def __init__(self, stages: Mapping[int, dict[str, Format]], unit: str) -> None:
        super().__init__(stages[0])
        self._stages = stages
        self._unit = unit

    @property
    def all_stages(self) -> list[dict[str, Format]]:
        """The formats by name in each stage that is known beforehand."""
        return list(self._stages.values())

    def begin_step(self, step: int, epoch: int) -> None:
        """Turn to the formats of this step."""
        now = step if self._unit == "step" else epoch
        self.formats = self._stages[max(begin for begin in self._stages if begin <= now)]


class HybridPolicy(FixedPolicy):
    """Formats chosen by measured error; see :class:`Hybrid`."""

    def __init__(
        self,
        names: Iterable[str],
        candidates: list[Format],
        keep: dict[str, Format],
        hybrid: Hybrid,
    ) -> None:
        self._candidates = sorted(candidates, key=lambda format: format.bits)
        self._keep = keep
        self._hybrid = hybrid
        self._due = self._again = False  # measuring in this step; a measurement failed
        super().__init__({name: keep.get(name, self._candidates[-1]) for name in names})

    @property
    def all_formats(self) -> set[Format]:
        """Every format that may travel."""
        return {*self._candidates, *self._keep.values()}

    def begin_step(self, step: int, epoch: int) -> None:
        """Turn to the formats of this step."""
        self._due = self._again or step % self._hybrid.every == 0
        self._again = False

    def measures(self, step: int) -> bool:
        """Whether :meth:`decide` is to be called in this step."""
        return self._due

    def decide(
        self,
        gradients: Mapping[str, torch.Tensor],
        scaled: bool,
        sum_over_ranks: Callable[[torch.Tensor], None],
    ) -> None:
        """Choose the formats of these parameters from their gradients on all ranks.

        One without a gradient keeps its format, and one that is not finite, until the next step.

        Args:
            gradients: float32, flat, by name; on all ranks the same names in the same order.
            scaled: whether gradients are scaled before they are rounded.
            sum_over_ranks: replaces a float32 tensor by its sum over the ranks.
        """
        free = {name: values for name, values in gradients.items() if name not in self._keep}
        if not free:
            return
        sums = torch.stack(
            [
                torch.stack([_error_sums(v, as_sent(v, f, scaled)) for f in self._candidates])
                for v in free.values()
            ]
        )
        sum_over_ranks(sums)
        errors = sums[..., 0] / sums[..., 1].clamp(min=1)
        for name, errors_of_parameter, (_, count, not_finite) in zip(
            free, errors.tolist(), sums[:, 0].tolist(), strict=True
        ):
            if not_finite:  # a gradient scaler will skip this step
                self._again = True
            elif count:
                self.formats[name] = next(
                    (
                        format
                        for format, error in zip(self._candidates, errors_of_parameter, strict=True)
                        if error <= self._hybrid.bound
                    ),
                    self._candidates[-1],
                )

    def state_dict(self) -> dict[str, Any]:
        """The formats chosen so far."""
        return {name: format.name for name, format in self.formats.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        allowed = {format.name for format in self.all_formats}
        for name, format in state.items():
            if name not in self.formats or format not in allowed:
                raise ValueError(
                    f"the state gives {name!r} the format {format!r}; allowed: the model's "
                    f"parameters, and {', '.join(sorted(allowed))}"
                )
        self.formats.update({name: format_of(format) for name, format in state.items()})


def _error_sums(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Sum of relative errors, elements that count, elements that are not finite; float32.

    Unlike the ledger's, an element that rounding makes infinite has an infinite error.
    """
    counted = (exact != 0) & exact.isfinite()
    reference = exact[counted].double()
    errors = ((reference - rounded[counted].double()) / reference).abs()
    not_finite = (~exact.isfinite()).sum()
    total = errors.nan_to_num_(math.inf, math.inf).sum()
    return torch.stack([total, counted.sum(), not_finite]).float()


def policy_of(
    names: Iterable[str],
    format: FormatRule | Schedule | Hybrid,
    keep: Mapping[str, FormatLike] | None = None,
) -> FixedPolicy:
    """The policy that ``format`` and ``keep`` describe, for these parameters.

    Raises:
        TypeError: ``format`` is none of the allowed kinds.
        ValueError: as :func:`parameter_formats`.
    """
    all_names = list(names)
    if isinstance(format, Schedule):
        stages = {
            begin: parameter_formats(all_names, rule, keep) for begin, rule in format.stages.items()
        }
        return ScheduledPolicy(stages, format.unit)
    if isinstance(format, Hybrid):
        candidates = [wire_format(candidate) for candidate in format.formats]
        kept = _exceptions(all_names, keep, wire_format)
        return HybridPolicy(all_names, candidates, kept, format)
    if not isinstance(format, (str, FloatFormat, IntFormat, BlockFormat, Mapping)):
        raise TypeError(
            f"format is a {type(format).__name__}; allowed: a format or its name, a dict of "
            "patterns and formats, a Schedule, a Hybrid"
        )
    return FixedPolicy(parameter_formats(all_names, format, keep))


@overload
def parameter_formats(
    names: Iterable[str], format: FormatRule, keep: Mapping[str, FormatLike] | None = None
) -> dict[str, Format]: ...


@overload
def parameter_formats(
    names: Iterable[str],
    format: FormatRule,
    keep: Mapping[str, FormatLike] | None = None,
    *,
    check: Callable[[FormatLike], F],
) -> dict[str, F]: ...


def parameter_formats(
    names: Iterable[str],
    format: FormatRule,
    keep: Mapping[str, FormatLike] | None = None,
    *,
    check: Callable[[FormatLike], Any] = wire_format,
) -> dict[str, Any]:
    """The format of each parameter's gradient on the wire.

    Args:
        names: parameter names as ``named_parameters()`` gives them.
        format: the format of all that ``keep`` does not name; or, as in ``keep``, patterns and
            their formats, of which every parameter must match one: ``{"fc": "fp32", "*": "e4m3"}``.
        keep: exceptions, the first match wins: a parameter's name, a module's name (all parameters
            below it), or a pattern such as ``"*.bias"``, and the format to use there.
        check: makes the format of what names it, or raises; by default those that can travel.

    Raises:
        TypeError: a pattern is no string.
        ValueError: a pattern matches no parameter, a parameter no pattern, or a format cannot
            travel.
    """
    all_names = list(names)
    formats = _exceptions(all_names, keep, check)
    if isinstance(format, Mapping):
        by_pattern = _exceptions(all_names, format, check, "format")
        missing = [name for name in all_names if name not in by_pattern and name not in formats]
        if missing:
            raise ValueError(
                f"format names no format for {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; end with "
                '"*": the format of all others'
            )
        return {name: formats.get(name) or by_pattern[name] for name in all_names}
    default = check(format)
    return {name: formats.get(name, default) for name in all_names}


def _exceptions(
    names: list[str],
    patterns: Mapping[str, FormatLike] | None,
    check: Callable[[FormatLike], Any],
    argument: str = "keep",
) -> dict[str, Any]:
    """The formats of the parameters that a pattern matches; the first one wins."""
    if patterns is not None and not isinstance(patterns, Mapping):
        raise TypeError(
            f"{argument} is {type(patterns).__name__}; it must be a dict from names to formats, "
            'such as {"fc": "fp32"}'
        )
    formats: dict[str, Any] = {}
    for pattern, value in (patterns or {}).items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"{argument} has the key {pattern!r}, which is {type(pattern).__name__}; it must "
                "be a str: a parameter's name, a module's name, or a pattern such as '*.bias'"
            )
        parsed = check(value)
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            modules = {name.rsplit(".", 1)[0] for name in names}
            close = difflib.get_close_matches(pattern, sorted(modules | set(names)), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(
                f"{argument} names {pattern!r}, which matches no parameter{hint} Parameters: "
                f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
            )
        for name in matched:
            formats.setdefault(name, parsed)
    return formats


def _matches(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.") or fnmatchcase(name, key)
