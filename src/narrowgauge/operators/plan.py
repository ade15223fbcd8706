"""OperatorPlan: which operator of a model computes in which format, and why.

Plain data that lies in a JSON file beside the checkpoint. It is found by a search, or written from
rules, and applied to the unmodified model.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.formats import FormatLike
from narrowgauge.operators.applying import Applied, Attached
from narrowgauge.operators.autocast import DEVICES, autocast_format
from narrowgauge.operators.compute import NATIVE, PROMOTE, Compute, compute_of
from narrowgauge.operators.mode import ADVICE, OperatorMismatch, Rules, mismatch_text
from narrowgauge.operators.names import did_you_mean, split_name
from narrowgauge.operators.recording import OperatorCall, Recording

VERSION = 1
_KIND = "narrowgauge operator plan"


class OperatorPlan:
    """The format of each operator of a model; not changed once it is made.

    Args:
        formats: format by operator name, such as ``{"layers.0.attn::softmax#0": "fp32"}``. A format
            is native (``"fp32"``, ``"bf16"``, ``"fp16"``), ``"promote"`` (the dtype that the
            operands come in, as torch does it), any other format of the library, which is then
            simulated in float32, or a pair such as ``"e4m3/e5m2"``, the second for gradients.
        default: the format of operators that are not named, where a mismatch is allowed.
        signatures: what each operator was given when it was recorded, by name; for reading only.
        outside: names of operators called outside the model, such as the loss.
        training: whether the operators were recorded in training mode.
        evidence: for some names, a JSON object on why the format was chosen.
        about: a JSON object on the plan as a whole.
        environment: where its evidence was measured; ``None``: here.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a name that is no operator's name; an unknown format; a native format for an
            operator that writes into its input.
    """

    def __init__(
        self,
        formats: Mapping[str, FormatLike],
        *,
        default: FormatLike = PROMOTE,
        signatures: Mapping[str, str] | None = None,
        outside: Iterable[str] = (),
        training: bool = True,
        evidence: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(formats, Mapping):
            raise TypeError(
                f"formats is {type(formats).__name__}; it must be a dict from operators' names to "
                'formats, such as {"fc::linear#0": "bf16"}'
            )
        self._computes = {name: _checked(name, format) for name, format in formats.items()}
        self._default = compute_of(default)
        self.signatures = dict(signatures or {})
        self.outside = frozenset(outside)
        self.training = training
        self.evidence = dict(evidence or {})
        self.about = dict(about or {})
        self.environment = dict(environment_here() if environment is None else environment)
        for argument, names in (
            ("signatures", self.signatures),
            ("outside", self.outside),
            ("evidence", self.evidence),
        ):
            for name in names:
                if name not in self._computes:
                    raise ValueError(
                        f"{argument} names {name!r}, which formats does not"
                        f"{did_you_mean(name, self._computes)}"
                    )
        self._expected: dict[str, int] | None = None
        self._rules: Rules | None = None

    # --- what it says ----------------------------------------------------------------------------

    @property
    def formats(self) -> dict[str, str]:
        """Format by operator name, in the order of the calls; a copy."""
        return {name: compute.name for name, compute in self._computes.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The operators' names, in the order of their calls."""
        return tuple(self._computes)

    @property
    def default(self) -> str:
        """The format of operators that are not named."""
        return self._default.name

    @property
    def fingerprint(self) -> str:
        """A hash of the operators' names, the same for all plans of one model."""
        return hashlib.sha256("\n".join(sorted(self._computes)).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._computes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperatorPlan):
            return NotImplemented
        return self._as_json() == other._as_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for compute in self._computes.values():
            counts[compute.name] = counts.get(compute.name, 0) + 1
        listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return f"OperatorPlan({len(self)} operators: {listed or 'none'}; {self.fingerprint})"

    # --- other plans -----------------------------------------------------------------------------

    def with_formats(self, formats: Mapping[str, FormatLike]) -> OperatorPlan:
        """The same plan with other formats for some operators; cheap, a few microseconds.

        Raises:
            ValueError: an operator that the plan does not name, or as in the constructor.
        """
        new = object.__new__(OperatorPlan)
        new.__dict__.update(self.__dict__)
        rules = self.rules()
        calls = dict(rules.formats)
        new._computes = computes = dict(self._computes)
        for name, format in formats.items():
            if name not in computes:
                raise ValueError(
                    f"the plan has no operator {name!r}{did_you_mean(name, computes)}; it has "
                    f"{len(computes)}, see .formats"
                )
            computes[name] = _checked(name, format)
            key, _, number = name.rpartition("#")
            of_key = [*calls[key]]
            of_key[int(number)] = computes[name]
            calls[key] = of_key
        new._rules = replace(rules, formats=calls)
        return new

    def with_evidence(
        self, evidence: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> OperatorPlan:
        """The same plan with evidence added: a JSON object by operator, and on the whole plan.

        Raises:
            ValueError: an operator that the plan does not name.
        """
        unknown = [name for name in evidence if name not in self._computes]
        if unknown:
            raise ValueError(
                f"the plan has no operator {unknown[0]!r}{did_you_mean(unknown[0], self._computes)}"
            )
        new = self.with_formats({})
        new.evidence = {**self.evidence, **evidence}
        new.about = {**self.about, **(about or {})}
        return new

    def merge(self, other: OperatorPlan) -> OperatorPlan:
        """Both plans' operators, as of a model whose control flow differs from batch to batch.

        Where both name an operator, ``other``'s format and evidence count.
        """
        return OperatorPlan(
            {**self.formats, **other.formats},
            default=other.default,
            signatures={**self.signatures, **other.signatures},
            outside=self.outside | other.outside,
            training=self.training or other.training,
            evidence={
                **{k: v for k, v in self.evidence.items() if k not in other._computes},
                **other.evidence,
            },
            about={**self.about, **other.about},
            environment=other.environment,
        )

    @classmethod
    def uniform(cls, operators: Iterable[OperatorCall], format: FormatLike) -> OperatorPlan:
        """All operators in one format; those that write into their input keep its dtype.

        Args:
            operators: what :func:`record_operators` returns.
            format: the format.
        """
        compute = compute_of(format)
        native = not compute.simulated
        return cls._of(
            operators, lambda call: PROMOTE if call.in_place and native else compute.name
        )

    @classmethod
    def from_autocast_rules(
        cls, operators: Iterable[OperatorCall], dtype: FormatLike = "bf16", device: str = "cpu"
    ) -> OperatorPlan:
        """What ``torch.autocast`` would do: with standard layers, the same losses bit for bit.

        Not the same: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, which autocast takes apart inside
        torch, and which are one operator here.

        Args:
            operators: what :func:`record_operators` returns.
            dtype: the low-precision format, ``"bf16"`` or ``"fp16"``.
            device: ``"cpu"`` or ``"cuda"``, whose lists differ.

        Raises:
            ValueError: another dtype or device.
        """
        low = compute_of(dtype).name
        if low not in ("bf16", "fp16"):
            raise ValueError(f"dtype is {low!r}; torch.autocast knows 'bf16' and 'fp16'")
        if device not in DEVICES:
            raise ValueError(f"device is {device!r}; allowed: {', '.join(map(repr, DEVICES))}")
        return cls._of(
            operators, lambda call: autocast_format(call.operator, low, device, call.padding)
        )

    @classmethod
    def _of(
        cls, operators: Iterable[OperatorCall], format: Callable[[OperatorCall], str]
    ) -> OperatorPlan:
        if not isinstance(operators, (Recording, list, tuple)):
            raise TypeError(
                f"operators is {type(operators).__name__}; it must be what "
                "narrowgauge.operators.record_operators(model, run) returns"
            )
        calls = list(operators)
        return cls(
            {call.name: format(call) for call in calls},
            signatures={call.name: call.signature for call in calls},
            outside=[call.name for call in calls if not call.inside],
            training=getattr(operators, "training", True),
        )

    # --- applying it -----------------------------------------------------------------------------

    def applied(
        self,
        model: nn.Module,
        *,
        mismatch: str = "error",
        recording: Recording | None = None,
    ) -> Applied:
        """A context in which the model, and what is called around it such as its loss, follows.

        ``with plan.applied(model): loss = loss_fn(model(x), y)``

        Args:
            model: the model, or ``DistributedDataParallel`` or ``torch.compile`` around it.
            mismatch: if the model's operators are not the plan's: ``"error"``; ``"warn"``, once for
                each new operator, which follows ``default``, for models whose control flow changes;
                ``"ignore"``.
            recording: where to note what is called.

        Raises:
            TypeError: ``model`` is no module, or one in TorchScript.
            OperatorMismatch: the plan names modules that the model lacks. (On leaving a forward of
                the model, or in a call outside of it: also other operators.)
            RuntimeError: the model has a plan already.
        """
        return Applied(self, model, mismatch, recording)

    def attach(self, model: nn.Module, *, mismatch: str = "error") -> Attached:
        """Let every forward of the model follow the plan, until ``.remove()`` of what is returned.

        What is called outside the model, such as a loss, does not follow; use :meth:`applied`, or
        a module that computes the loss inside. Arguments and errors as there.
        """
        return Attached(self, model, mismatch)

    def check(self, operators: Iterable[OperatorCall]) -> None:
        """Compare with the operators of a model.

        Args:
            operators: what :func:`record_operators` returns.

        Raises:
            OperatorMismatch: some appeared or vanished.
        """
        names = [call.name for call in operators]
        appeared = [name for name in names if name not in self._computes]
        vanished = [name for name in self._computes if name not in set(names)]
        if appeared or vanished:
            raise OperatorMismatch(f"{mismatch_text(appeared, vanished, self.names)}. {ADVICE}")

    def rules(self) -> Rules:
        """The plan as it is read at every call."""
        if self._rules is None:
            calls: dict[str, list[Compute | None]] = {}
            for name, compute in self._computes.items():
                key, _, number = name.rpartition("#")
                of_key = calls.setdefault(key, [])
                of_key += [None] * (int(number) + 1 - len(of_key))
                of_key[int(number)] = compute
            self._rules = Rules(
                self.names, calls, self._default, self._calls_expected(), self.training
            )
        return self._rules

    def _calls_expected(self) -> dict[str, int]:
        if self._expected is None:
            self._expected = {}
            for name in self._computes:
                if name not in self.outside:
                    key = name.rpartition("#")[0]
                    self._expected[key] = self._expected.get(key, 0) + 1
        return self._expected

    # --- its file --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file is there as a whole, or as it was before.

        Raises:
            TypeError: evidence that JSON cannot hold.
            OSError: the file cannot be written.
        """
        path = Path(path)
        text = json.dumps(self._as_json(), indent=1, ensure_ascii=False) + "\n"
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OperatorPlan:
        """Read a plan from its file.

        Raises:
            ValueError: not a plan's file, of another version, or changed by hand so that it
                contradicts itself; the text says where.
            OSError: the file cannot be read.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
            raise ValueError(f"{path} is no operator plan: not JSON ({error})") from None
        if not isinstance(data, dict) or data.get("kind") != _KIND:
            raise ValueError(f'{path} is no operator plan: it lacks "kind": "{_KIND}"')
        if data.get("version") != VERSION:
            raise ValueError(
                f"{path} is an operator plan of version {data.get('version')!r}; this narrowgauge "
                f"reads version {VERSION}. Update narrowgauge, or make the plan again"
            )
        try:
            entries = data["operators"]
            names = [entry["name"] for entry in entries]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"it names {twice[0]!r} twice")
            truths = [("training", data["training"])]
            truths += [(f"outside of {e['name']!r}", e.get("outside", False)) for e in entries]
            for what, value in truths:
                if not isinstance(value, bool):
                    raise ValueError(f"{what} is {value!r}; it must be true or false")
            plan = cls(
                {entry["name"]: entry["format"] for entry in entries},
                default=data["default"],
                signatures={e["name"]: e["signature"] for e in entries if "signature" in e},
                outside=[entry["name"] for entry in entries if entry.get("outside")],
                training=data["training"],
                evidence={e["name"]: e["evidence"] for e in entries if "evidence" in e},
                about=data["about"],
                environment=data["environment"],
            )
        except KeyError as error:
            raise ValueError(f"{path} is no whole operator plan: {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no valid operator plan: {error}") from None
        if data.get("fingerprint") != plan.fingerprint:
            raise ValueError(
                f"{path} has the fingerprint {data.get('fingerprint')!r}, but its operators have "
                f"{plan.fingerprint!r}: operators were added or removed by hand. Change formats "
                "only, or make the plan again"
            )
        return plan

    def _as_json(self) -> dict[str, Any]:
        entries = []
        for name, compute in self._computes.items():
            entry: dict[str, Any] = {"name": name, "format": compute.name}
            if name in self.outside:
                entry["outside"] = True
            if name in self.signatures:
                entry["signature"] = self.signatures[name]
            if name in self.evidence:
                entry["evidence"] = self.evidence[name]
            entries.append(entry)
        return {
            "kind": _KIND,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "environment": self.environment,
            "default": self.default,
            "training": self.training,
            "about": self.about,
            "operators": entries,
        }


def environment_here() -> dict[str, Any]:
    """What evidence depends on: versions, processor, threads."""
    try:
        package = version("narrowgauge")
    except PackageNotFoundError:  # run from its source without being installed
        package = "unknown"
    found: dict[str, Any] = {
        "narrowgauge": package,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name()
    return found


def _checked(name: str, format: FormatLike) -> Compute:
    _, operator, _ = split_name(name)
    try:
        compute = compute_of(format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"operator {name!r}: {error}") from None
    if operator.endswith("_") and compute.name in NATIVE:
        raise ValueError(
            f"operator {name!r} writes into its input and so computes in that tensor's dtype; its "
            f"format is 'promote' or a simulated one, not {compute.name!r}"
        )
    return compute
