"""One training step, recorded while the user makes it, so that it can be made again.

Comparing formats needs the same step twice: same batch, same parameters, same random numbers. The
loop belongs to the user, and a ``with`` block cannot be run again; but every call it makes on
tensors can. So the step is kept as a tape: calls of the model (as a whole, with whatever is
inside), torch functions outside of it (loss, scaling, clipping), ``backward``, and the optimizer's
step. The trade-off: what is neither, such as an ``autograd.Function`` in the loss, cannot be made
again and is an error; inside the model it can.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

_grad: Any = Tensor.grad
_data: Any = Tensor.data
_set_data = _data.__set__
_GRADIENT = (_grad.__get__, _grad.__set__)


_WRITING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_WRITING |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")} | {"__setitem__"}


class ReplayError(RuntimeError):
    """A step that cannot be made again; the message says why."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that an earlier call of the tape makes."""

    number: int


@dataclass
class _Settings:
    """What an optimizer was told for its step."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    grad_scale: Tensor | None


@dataclass
class _Call:
    function: Callable[..., Any] | str  # "model" and "optimizer" are calls of their own kind; of a
    # part of the model that the loop calls by itself, it is the module
    args: Any
    kwargs: Any
    outputs: list[_Slot | None]
    grad_enabled: bool
    settings: _Settings | None = None
    writes_parameter: bool = False


class StepTape(TorchFunctionMode):
    """Records one step: ``with tape: loss = …; loss.backward(); optimizer.step()``.

    Args:
        model: called in the step, as a whole or some of its modules; DistributedDataParallel is
            known.
        optimizers: whose ``step`` belongs to the step.

    Attributes:
        loss: its value, once ``backward`` is reached.
        stepped: whether the optimizer made its step.
        scaled: whether GradScaler looked at the gradients; without a step it found an overflow.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__()
        self._model = model
        self._inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizers = optimizers
        self._calls: list[_Call] = []
        self._slots: dict[int, _Slot] = {}
        self._without_grad: set[_Slot] = set()  # made while gradients were off
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        trained = [*self._inner.parameters(), *(p for group in groups for p in group)]
        self._trained = {p.untyped_storage().data_ptr() for p in trained if p.numel()}
        self._alive: list[Tensor] = []  # an id is a name only while its tensor lives
        self._inside = 0  # of the model or the optimizer, whose calls are theirs
        self._running: nn.Module | None = None  # that the loop called
        self._loss: _Slot | None = None
        self._random = _random_state()
        self._buffers = [buffer.detach().clone() for buffer in self._inner.buffers()]
        self._handles: list[Any] = []
        self.stepped = self.scaled = False
        self.loss = math.nan

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters that require a gradient."""
        return [p for p in self._inner.parameters() if p.requires_grad]

    def check(self) -> None:
        """Make sure that the step that is over called ``loss.backward()``.

        Raises:
            ReplayError: it did not.
        """
        if self._loss is None:
            raise ReplayError(
                "the step ended without loss.backward(); it must be called within search.step()"
            )

    def __enter__(self) -> StepTape:
        for module in {self._model: None, **dict.fromkeys(_parts(self._inner))}:
            self._handles += [
                module.register_forward_pre_hook(self._begin_model, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._end_model, with_kwargs=True, always_call=True),
            ]
        self._handles.append(register_optimizer_step_pre_hook(self._begin_foreign))
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(self._begin_optimizer),
                optimizer.register_step_post_hook(self._end_optimizer),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._inside, self._running = 0, None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call, and note it if it belongs to the step itself."""
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(args, kwargs)
        noted = self._named((args, kwargs))
        writes = self._writes_parameter(func, args)
        result = func(*args, **kwargs)
        self._note(func, noted, result)
        self._calls[-1].writes_parameter = writes
        self.scaled |= func is torch._amp_foreach_non_finite_check_and_unscale_
        return result

    def _writes_parameter(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether it changes a parameter by hand, or a view of it, as weight clipping does."""
        if not (func == _set_data or _writing(func)) or not args or not isinstance(args[0], Tensor):
            return False
        with torch._C.DisableTorchFunction():
            if args[0].layout is not torch.strided:
                return False
            return args[0].untyped_storage().data_ptr() in self._trained

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self._loss is None
        noted = self._named((args, kwargs))
        if first:
            slot = noted[0][0]
            if not isinstance(slot, _Slot):
                raise ReplayError(
                    "backward() was called on a tensor that neither the model nor a torch function "
                    "of this step has made; a custom autograd.Function must lie inside the model"
                )
            if args[0].numel() != 1:
                raise ReplayError(
                    f"backward() was called on a tensor of shape {tuple(args[0].shape)}; the loss "
                    "must be one number, such as loss.mean()"
                )
            self._loss = slot
            self.loss = float(args[0].detach())
        self._inside += 1
        try:
            # Autocast, if a contender runs under it, is for the forward pass only.
            with _no_autocast():
                torch.Tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._inside -= 1
        self._note(torch.Tensor.backward, noted, None)

    def _begin_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside:
            self._noted = self._named((args, kwargs))
            self._running = module
        self._inside += module is self._running

    def _end_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is not self._running:
            return
        self._inside -= 1
        if not self._inside:
            self._running = None
            if output is not None:  # as if it raised
                self._note("model" if module is self._model else module, self._noted, output)

    def _begin_foreign(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._inside and optimizer not in self._optimizers:
            raise ReplayError(
                f"the step calls step() of another optimizer, {type(optimizer).__name__}; pass it "
                "to OperatorSearch(…, stateful=[it]), so that its steps can be made again"
            )

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closures = [*args[1:], kwargs.get("closure")]  # the first is the optimizer
        if any(closure is not None for closure in closures):
            raise ReplayError(
                f"{type(optimizer).__name__}.step was given a closure, whose steps cannot be made "
                "again; call loss.backward(), then optimizer.step() without it, or train with an "
                "optimizer that needs none"
            )
        self._inside += 1
        scale = getattr(optimizer, "grad_scale", None)  # of GradScaler, for fused optimizers
        with torch._C.DisableTorchFunction():
            self._scale = None if scale is None else scale.clone()

    def _end_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        self._note("optimizer", ((), {}), None)
        groups = [
            {k: copy.copy(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._calls[-1].settings = _Settings(optimizer, groups, self._scale)
        self.stepped = True

    def _named(self, values: Any) -> Any:
        """Arguments with slots in place of what the tape makes."""

        def name(value: Any) -> Any:
            if isinstance(value, Tensor):
                slot = self._slots.get(id(value))
                # What a custom autograd.Function calls is seen, with gradients off, and its own
                # way back is not: the gradient would be another when the step is made again.
                way_back = value.grad_fn
                custom = slot in self._without_grad and isinstance(way_back, BackwardCFunction)
                if way_back is not None and (slot is None or custom):
                    raise ReplayError(
                        f"a tensor of shape {tuple(value.shape)} and {way_back.name()} comes "
                        "from outside the step or from a custom autograd.Function; compute it with "
                        "torch functions within search.step(), or inside the model"
                    )
                if slot is None and value.numel() == 1 and not value.requires_grad:
                    return value.clone()  # as a scale, which will be another in the next step
                return value if slot is None else slot
            return value

        with torch._C.DisableTorchFunction():
            return tree_map(name, values)

    def _note(self, function: Any, noted: Any, result: Any) -> None:
        outputs: list[_Slot | None] = []
        with torch._C.DisableTorchFunction():
            for value in _flat(result):
                if not isinstance(value, Tensor):
                    outputs.append(None)
                    continue
                if id(value) not in self._slots and not isinstance(value, nn.Parameter):
                    self._slots[id(value)] = _Slot(len(self._slots))
                    self._alive.append(value)
                    if not torch.is_grad_enabled():
                        self._without_grad.add(self._slots[id(value)])
                outputs.append(self._slots.get(id(value)))
        call = _Call(function, noted[0], noted[1], outputs, torch.is_grad_enabled())
        self._calls.append(call)

    # Making it again ---------------------------------------------------------------------------

    def gradients(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> tuple[float, list[Tensor | None]]:
        """Loss and gradients once more, of the parameters as they are now; nothing is changed.

        Args:
            around: makes a context for the forward pass, such as a plan's.

        Returns:
            The loss, and the gradient of each of :attr:`parameters` (its own, under DDP not
            averaged), ``None`` where the loss does not depend on it.

        Raises:
            ReplayError: the step called no ``backward``, or cannot be made again.
        """
        self.check()
        with self._as_it_began():
            values: dict[_Slot, Any] = {}
            with around(), torch.enable_grad():
                for call in self._of_the_step():
                    if call.function is torch.Tensor.backward:
                        break
                    if call.writes_parameter:  # done already
                        self._pass_on(call, values)
                    elif call.function not in _GRADIENT:
                        self._make(call, values, self._inner)
            assert self._loss is not None
            loss = values[self._loss]
            with _no_autocast():
                found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return loss.detach().float().item(), list(found)

    def step_again(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> float:
        """The whole step once more, on whatever parameters and optimizer state are in place now.

        Gradients are taken from and left in ``.grad``; ranks of DDP average them again.

        Args:
            around: makes a context for the forward pass.

        Returns:
            The loss.
        """
        self.check()
        values: dict[_Slot, Any] = {}
        with _random_from(self._random), contextlib.ExitStack() as forward:
            forward.enter_context(around())
            for call in self._of_the_step():
                if call.function is torch.Tensor.backward:
                    forward.close()  # the format of operators is the forward pass's business
                self._make(call, values, self._model)
        assert self._loss is not None
        return float(values[self._loss].detach().float())

    def _of_the_step(self) -> list[_Call]:
        """The calls without which the optimizer's step would be another.

        Those are all up to ``backward``, what is done to gradients, such as clipping, and what that
        needs. What sums losses for the log, or changes any other tensor from outside, must not be
        done twice.
        """
        of_gradients: set[_Slot] = set()
        kept: list[bool] = []
        forward = True
        for call in self._calls:
            about = _about_gradients(call, of_gradients) or call.writes_parameter
            kept.append(about or (forward and call.function not in _GRADIENT))
            forward = forward and call.function is not torch.Tensor.backward
        needed: set[_Slot] = set()
        for position in reversed(range(len(kept))):
            call = self._calls[position]
            kept[position] |= any(slot in needed for slot in call.outputs)
            if kept[position]:
                flat = tree_flatten((call.args, call.kwargs))[0]
                needed.update(value for value in flat if isinstance(value, _Slot))
        return [call for call, keep in zip(self._calls, kept, strict=True) if keep]

    def _make(self, call: _Call, values: dict[_Slot, Any], model: nn.Module) -> None:
        if call.settings is not None:
            self._step_optimizer(call.settings)
            return
        if _writes_outside(call):  # done already, once for all
            self._pass_on(call, values)
            return
        args, kwargs = tree_map(
            lambda value: values[value] if isinstance(value, _Slot) else value,
            (call.args, call.kwargs),
        )
        function = model if call.function == "model" else call.function
        with torch.set_grad_enabled(call.grad_enabled):
            result = function(*args, **kwargs)  # type: ignore[operator]
        with torch._C.DisableTorchFunction():
            flat = _flat(result)
        for slot, value in zip(call.outputs, flat, strict=True):
            if slot is not None:
                values[slot] = value

    def _pass_on(self, call: _Call, values: dict[_Slot, Any]) -> None:
        """Do not write again; the result is what was written into."""
        for slot in call.outputs:
            if slot is not None and slot not in values:
                values[slot] = call.args[0]

    def _step_optimizer(self, settings: _Settings) -> None:
        optimizer: Any = settings.optimizer
        groups = optimizer.param_groups
        now = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for group, then in zip(groups, settings.groups, strict=True):
            group.update(then)
        try:
            if settings.grad_scale is not None:
                optimizer.grad_scale = settings.grad_scale.clone()
                optimizer.found_inf = torch.zeros_like(settings.grad_scale)
            optimizer.step()
        finally:
            if settings.grad_scale is not None:
                del optimizer.grad_scale, optimizer.found_inf
            for group, value in zip(groups, now, strict=True):
                group.update(value)

    @contextlib.contextmanager
    def _as_it_began(self) -> Iterator[None]:
        """Random numbers and buffers as when the step began; afterwards as they are now."""
        buffers = list(self._inner.buffers())
        # Exchanged, not copied: a copy would count as a change of what backward() still needs.
        now = [buffer.data for buffer in buffers]
        with _random_from(self._random):
            try:
                for buffer, then in zip(buffers, self._buffers, strict=True):
                    buffer.data = then.clone()
                yield
            finally:
                for buffer, data in zip(buffers, now, strict=True):
                    buffer.data = data


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those within, but for what is compiled: new hooks would compile it again."""
    yield module
    if module._compiled_call_impl is None and not hasattr(module, "_orig_mod"):
        for child in module.children():
            yield from _parts(child)


def _flat(result: Any) -> list[Any]:
    """What is in nested containers and dataclasses, in an order that is always the same."""
    flat: list[Any] = []
    for value in tree_flatten(result)[0]:
        if is_dataclass(value) and not isinstance(value, type):
            flat += _flat([getattr(value, field.name) for field in fields(value)])
        else:
            flat.append(value)
    return flat


def _about_gradients(call: _Call, of_gradients: set[_Slot]) -> bool:
    """Whether a call makes, changes or applies gradients; what it gives is noted as one."""
    if call.function in ("optimizer", torch.Tensor.backward):
        return True
    flat = tree_flatten((call.args, call.kwargs))[0]
    if call.function in _GRADIENT:
        about = isinstance(flat[0], nn.Parameter)
    else:
        about = any(isinstance(value, _Slot) and value in of_gradients for value in flat)
        about = about and not isinstance(flat[0], Tensor)
    if about:
        of_gradients.update(slot for slot in call.outputs if slot is not None)
    return about


def _writes_outside(call: _Call) -> bool:
    """Whether a call changes a tensor that is none of the step's own, such as a running sum."""
    if isinstance(call.function, str) or call.function in _GRADIENT or not call.args:
        return False
    if call.writes_parameter:
        return False
    return _writing(call.function) and isinstance(call.args[0], Tensor)


def _writing(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


@contextlib.contextmanager
def _random_from(state: tuple[Tensor, list[Tensor]]) -> Iterator[None]:
    with torch.random.fork_rng(range(len(state[1]))):
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])
        yield
