"""What a model calls: its operators, what they are given, and which one feeds which.

Recorded in one forward with the loss, whose effect on the model and on random numbers is undone.
The trade-off: an operator is known by what it was given once. Equal signatures cost the same time;
a model whose shapes change from batch to batch has others on another day.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.operators.compute import Cast, Compute, run
from narrowgauge.operators.functions import Function


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator takes, gives, or keeps for its backward pass.

    Args:
        shape: its shape.
        stride: its strides, in elements.
        dtype: its dtype.
        requires_grad: whether a gradient flows into it.
        parameter: whether it is a leaf that requires grad, as the model's parameters are.
        storage: a number that tensors sharing memory have in common, within one recording.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    parameter: bool
    storage: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def bytes(self) -> int:
        """Size of the elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape, stride = (",".join(map(str, x)) for x in (self.shape, self.stride))
        mark = " parameter" if self.parameter else " grad" if self.requires_grad else ""
        return f"{name}[{shape}]({stride}){mark}"


@dataclass(frozen=True)
class OperatorCall:
    """One operator of the model, as it was called.

    Args:
        name: its stable name.
        operator: what it does, such as ``"linear"``.
        signature: operator, tensors and other arguments; equal ones cost the same time.
        inputs: tensors it takes, in the order of its arguments.
        outputs: tensors it gives.
        saved: tensors that autograd keeps for its backward pass.
        inside: whether it is called by a module of the model, not outside like a loss.
        format: the format it was computed in while recording.
        function: what torch calls.
        arguments: its ``(args, kwargs)``, detached, if they were asked for and no call before it
            had the same signature; else ``None``.
        padding: the mode of a ``pad``.
    """

    name: str
    operator: str
    signature: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    saved: tuple[Operand, ...]
    inside: bool
    format: str
    function: Function = field(repr=False, compare=False)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = field(repr=False, compare=False)
    padding: str | None = None

    @property
    def in_place(self) -> bool:
        """Whether it writes into its first input, and so computes in that tensor's dtype."""
        return self.operator.endswith("_")


@dataclass(frozen=True)
class Edge:
    """A result that another operator takes, perhaps as a view or a part of a concatenation.

    Args:
        producer: name of the operator that made it.
        consumer: name of the operator that takes it.
        numel: how many elements of the producer's are taken; in different formats of the two, all
            are cast.
        requires_grad: whether a gradient of the same size comes back.
    """

    producer: str
    consumer: str
    numel: int
    requires_grad: bool


@dataclass
class Recording:
    """Calls and edges, in the order in which they happened.

    Pass an empty one to ``OperatorPlan.applied``, or let :func:`record_operators` make it.

    Args:
        keep_arguments: keep the arguments of the first call of each signature, to time it later.
    """

    keep_arguments: bool = False
    calls: list[OperatorCall] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    training: bool = True
    _sources: dict[int, tuple[weakref.ref[Tensor], dict[str, int]]] = field(
        default_factory=dict, repr=False
    )
    _storages: dict[int, int] = field(default_factory=dict, repr=False)
    _alive: list[Any] = field(default_factory=list, repr=False)
    _signatures: set[str] = field(default_factory=set, repr=False)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[OperatorCall]:
        return iter(self.calls)

    @property
    def names(self) -> list[str]:
        """The operators' names, in the order of their calls."""
        return [call.name for call in self.calls]

    def called(
        self,
        name: str,
        operator: str,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Compute,
        cast: Cast,
        inside: bool,
    ) -> Any:
        """Call the operator, and note it."""
        inputs = list(tensors_in((args, kwargs)))
        operands = tuple(self._operand(x) for x in inputs)
        signature = _signature(operator, args, kwargs, iter(map(str, operands)))
        for x, operand in zip(inputs, operands, strict=True):
            for producer, numel in self._sources_of(x).items():
                if x.is_floating_point():
                    self.edges.append(Edge(producer, name, numel, operand.requires_grad))
        arguments = None
        if self.keep_arguments and signature not in self._signatures:
            arguments = _detached(args), _detached(kwargs)
        self._signatures.add(signature)
        saved: dict[int, Operand] = {}

        def keep(x: Tensor) -> Tensor:
            operand = self._operand(x)
            saved[operand.storage] = operand
            return x.detach()  # itself, if a result, would be a cycle that is never freed

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = run(compute, operator, function, args, kwargs, cast)
        outputs = list(tensors_in(result))
        for x in outputs:
            self._remember(x, {name: x.numel()})
            if operator.endswith("_") and x._base is not None:
                self._remember(x._base, {**self._sources_of(x._base), name: x.numel()})
        self.calls.append(
            OperatorCall(
                name,
                operator,
                signature,
                operands,
                tuple(self._operand(x) for x in outputs),
                tuple(saved.values()),
                inside,
                compute.name,
                function,
                arguments,
                _padding(args, kwargs) if operator == "pad" else None,
            )
        )
        return result

    def moved(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note that a function which is no operator passed its inputs on."""
        name = getattr(function, "__name__", "")
        if name == "__get__" and not isinstance(result, Tensor):
            return
        sources: dict[str, int] = {}
        for x in tensors_in((args, kwargs)):
            sources.update(self._sources_of(x))
        if not sources:
            return
        outputs = list(tensors_in(result))
        if name.endswith("_") and args and isinstance(args[0], Tensor):  # copy_, __setitem__
            outputs.append(args[0])
            if args[0]._base is not None:
                outputs.append(args[0]._base)
        for x in outputs:
            self._remember(x, {s: min(numel, x.numel()) for s, numel in sources.items()})

    def finish(self) -> None:
        """Let go of the tensors that were kept to tell them apart."""
        self._sources.clear()
        self._storages.clear()
        self._alive.clear()

    def _sources_of(self, x: Tensor) -> dict[str, int]:
        known = self._sources.get(id(x))
        return known[1] if known is not None and known[0]() is x else {}

    def _remember(self, x: Tensor, sources: dict[str, int]) -> None:
        self._sources[id(x)] = (weakref.ref(x), sources)

    def _operand(self, x: Tensor) -> Operand:
        try:
            storage = x.untyped_storage()
            pointer = storage._cdata
            if pointer not in self._storages:
                self._alive.append(storage)  # or its number would be given to another
        except (NotImplementedError, RuntimeError):  # sparse and other tensors have none
            self._alive.append(x)
            pointer = -id(x)
        number = self._storages.setdefault(pointer, len(self._storages))
        stride = tuple(x.stride()) if x.layout is torch.strided and not x.is_nested else ()
        return Operand(
            tuple(x.shape) if not x.is_nested else (),
            stride,
            x.dtype,
            x.requires_grad,
            x.is_leaf and x.requires_grad,
            number,
        )


def record_operators(
    model: nn.Module, run: Callable[[], Any], *, keep_arguments: bool = False
) -> Recording:
    """The operators of a model and its loss, without changing either.

    Buffers (running statistics) and the state of torch's random numbers are as before afterwards.
    ``.grad`` is not looked after: do not call ``backward`` in ``run``.

    Args:
        model: the model; within ``DistributedDataParallel`` or ``torch.compile`` the one inside.
        run: one forward of the model and its loss, e.g. ``lambda: loss_fn(model(x), y)``. What
            ``torch.compile`` made of the model runs uncompiled here.
        keep_arguments: keep the arguments of the first call of each signature.

    Raises:
        TypeError: ``model`` is no module, is or contains a compiled TorchScript module, or ``run``
            cannot be called.
        ValueError: ``run`` calls no operator of the model.
    """
    from narrowgauge.operators.plan import OperatorPlan

    if not callable(run):
        raise TypeError(
            f"run is {type(run).__name__}; it must be a function that runs the model and its loss, "
            "such as lambda: loss_fn(model(x), y)"
        )
    recording = Recording(keep_arguments=keep_arguments, training=getattr(model, "training", True))
    plan = OperatorPlan({})
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with plan.applied(model, mismatch="ignore", recording=recording):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            eager = torch.compiler.set_stance("force_eager")  # or Dynamo would trace the recording
            with torch.random.fork_rng(devices=devices), eager:
                run()
        finally:
            recording.finish()
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
    if not any(call.inside for call in recording):
        raise ValueError(
            "run calls no operator of the model; it must call the model that was passed, eagerly, "
            "such as lambda: loss_fn(model(x), y)"
        )
    return recording


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a value, through tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from tensors_in(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors_in(x)


def _signature(operator: str, args: Any, kwargs: Any, tensors: Iterator[str]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return next(tensors)
        if isinstance(value, (tuple, list)):
            return f"({', '.join([text(x) for x in value])})"
        return repr(value)

    words = [text(x) for x in args] + [f"{name}={text(x)}" for name, x in kwargs.items()]
    return f"{operator}({', '.join(words)})"


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)([_detached(x) for x in value])
    if isinstance(value, dict):
        return {name: _detached(x) for name, x in value.items()}
    return value


def _padding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return str(args[2] if len(args) > 2 else kwargs.get("mode", "constant"))
