"""Gives every operator of an unmodified model its format, while the model runs.

A ``TorchFunctionMode`` sees each call of torch; hooks on modules tell it from which module the call
comes. The mode is entered anew in each forward of the model (or for a whole block, so that losses
are seen as well), and again when a checkpointed part is computed a second time. The trade-off: some
microseconds of Python per operator, in exchange for a model whose code and state stay as they are;
under ``torch.compile`` the Python runs while tracing only.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.operators.compute import Compute, cast, reuse, run, transforming
from narrowgauge.operators.functions import (
    ARITHMETIC,
    COMPLEX,
    COMPOSITES,
    FLOATING,
    IN_PLACE_AT,
    NESTED,
    OPERATORS,
    dtypes_of,
)
from narrowgauge.operators.names import did_you_mean, module_paths

if TYPE_CHECKING:
    from narrowgauge.operators.recording import Recording

MISMATCH = ("error", "warn", "ignore")
ADVICE = (
    "Record the model's operators again; or, if its control flow changes from call to call, pass "
    'mismatch="warn"'
)


class OperatorMismatch(ValueError):
    """A plan and a model do not have the same operators."""


@dataclass(frozen=True, eq=False)
class Rules:
    """A plan in the form that is read at every call.

    Args:
        names: the operators' names.
        formats: how to compute each call, by ``path::operator``; ``None``: the plan lacks it.
        default: how to compute those that are not named.
        expected: how often each ``path::operator`` is called in one forward of the model.
        training: whether the operators were recorded in training mode.
    """

    names: Sequence[str]
    formats: Mapping[str, Sequence[Compute | None]]
    default: Compute
    expected: Mapping[str, int]
    training: bool


class PlanMode(TorchFunctionMode):
    """The mode of one model: which module is running, what was called so far, in which format.

    One object serves all plans of the model one after the other, so that a compiled model finds the
    same one again. Dormant while it has no rules.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self.model = model if model is None else weakref.ref(model)
        self.rules: Rules | None = None
        self.mismatch = "error"
        self.everywhere = False  # entered for a block, not by each forward
        self.recording: Recording | None = None
        self.path: list[str] = []  # of the modules that are running
        self.counts: dict[str, int] = {}  # calls by "path::operator" since the forward began
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] | None = {}
        self.differentiates = True  # whether the forward began with gradients enabled
        self.warned: set[str] = set()
        self._handles: list[Any] = []
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._users = 0

    # A copy of the model, or the model in a file, is a plain model: hooks that do nothing.
    def __deepcopy__(self, memo: dict[int, Any]) -> PlanMode:
        return PlanMode(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanMode, (None,)

    # --- hooks -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let the modules' hooks be there until :meth:`release` was called as often as this."""
        self._users += 1
        model = None if self.model is None else self.model()
        if self._handles or model is None:
            return
        for path, module in module_paths(model):
            handles = self._hooks.get(module)
            if handles is None or handles[0] != path:
                entering = functools.partial(_entering, self, path)
                leaving = functools.partial(_leaving, self, path)
                before = module.register_forward_pre_hook(entering, prepend=True)
                after = module.register_forward_hook(leaving, always_call=True)
                self._hooks[module] = path, before, after, entering, leaving
            else:  # under the same numbers as before, or compiled code would be compiled again
                _, before, after, entering, leaving = handles
                module._forward_pre_hooks[before.id] = entering
                module._forward_pre_hooks.move_to_end(before.id, last=False)  # type: ignore[attr-defined]
                module._forward_hooks[after.id] = leaving
                module._forward_hooks_always_called[after.id] = True
            self._handles += [before, after]

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self._users -= 1
        if self._users == 0:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def begin(self, path: str, again: bool = False) -> None:
        """A module of the model is called from outside; names count anew below its path.

        ``again``: the forward before was interrupted, and did not leave the mode.
        """
        below = f"{path}."
        self.counts = {
            key: count
            for key, count in (self.counts.items() if path else ())
            if key.partition("::")[0] != path and not key.startswith(below)
        }
        self.path = []
        self.casts = {}
        self.differentiates = torch.is_grad_enabled()
        if again:
            return
        if not self.everywhere:
            self.__enter__()  # type: ignore[no-untyped-call]
        _entered.append(self)

    def end(self, path: str, finished: bool) -> None:
        """The module returns to outside, or raises."""
        self.casts = {}
        _entered.pop()
        if not self.everywhere:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if finished and not path and not torch.compiler.is_compiling():
            self.check_fit()

    def check_fit(self) -> None:
        """Compare the calls of a forward that is over with those that the plan expects.

        Raises:
            OperatorMismatch: they differ.
        """
        assert self.rules is not None
        expected = self.rules.expected
        if self.mismatch == "ignore" or self.counts == expected:
            return
        appeared = _more(self.counts, expected)
        model = None if self.model is None else self.model()
        same = model is not None and model.training == self.rules.training
        vanished = _more(expected, self.counts) if same and self.differentiates else []
        vanished = [] if self.mismatch == "warn" else vanished
        if appeared or vanished:
            self.report(appeared, vanished)

    def report(self, appeared: list[str], vanished: list[str]) -> None:
        """Raise or warn, as ``mismatch`` says."""
        assert self.rules is not None
        if self.mismatch == "error":
            raise OperatorMismatch(
                f"{mismatch_text(appeared, vanished, self.rules.names)}. {ADVICE}"
            )
        new = [name for name in appeared if name not in self.warned]
        if new:
            self.warned.update(new)
            warnings.warn(
                f"{mismatch_text(new, [], self.rules.names)}. They follow the plan's default, "
                f"{self.rules.default.name}",
                stacklevel=4,
            )

    # --- calls -----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What torch calls instead of ``func``; every step here is paid for at every call."""
        kwargs = kwargs or {}
        operator = OPERATORS.get(func)
        rules = self.rules
        if operator is None or rules is None or not _entered or _entered[-1] is not self:
            return self.pass_on(func, args, kwargs)
        found = {x.dtype for x in args if isinstance(x, Tensor)}
        if kwargs:
            found.update([x.dtype for x in kwargs.values() if isinstance(x, Tensor)])
        if operator in NESTED:
            found = dtypes_of(args)
        if (
            found.isdisjoint(FLOATING)
            or not found.isdisjoint(COMPLEX)
            or "out" in kwargs
            or not (self.path or self.counts_outside(operator, args, kwargs))
        ):
            return self.pass_on(func, args, kwargs)
        if func in IN_PLACE_AT and _in_place(func, args, kwargs):
            operator += "_"
        key = (self.path[-1] if self.path else "") + "::" + operator
        call = self.counts.get(key, 0)
        self.counts[key] = call + 1
        planned = rules.formats.get(key, ())
        compute = planned[call] if call < len(planned) else None
        if compute is None:
            compute = self.unknown(f"{key}#{call}")
        if self.recording is not None:
            return self.recording.called(
                f"{key}#{call}", operator, func, args, kwargs, compute, self.cast, bool(self.path)
            )
        if compute.dtype is None:
            return func(*args, **kwargs)
        if torch._C._is_any_autocast_enabled():
            with torch.autocast(_device(args, kwargs), enabled=False):
                return run(compute, operator, func, args, kwargs, self.cast)
        if found.isdisjoint(compute.foreign) and not compute.simulated and "dtype" not in kwargs:
            return func(*args, **kwargs)  # all operands have the dtype
        return run(compute, operator, func, args, kwargs, self.cast)

    def pass_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what is no operator of this model."""
        if func in COMPOSITES and _entered and _entered[-1] is self:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # Dynamo cannot trace the method once a mode has caught it
        result = func(*args, **kwargs)
        if self.recording is not None:
            self.recording.moved(func, args, kwargs, result)
        return result

    def counts_outside(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call outside the model has a name, as those of a loss have.

        What belongs to the optimizer or to a backward pass has none, and neither has arithmetic on
        single numbers, such as scaling a loss.
        """
        if operator in ARITHMETIC and not any(
            isinstance(x, Tensor) and x.dim() for x in (*args, *kwargs.values())
        ):
            return False
        if self.differentiates and not torch.is_grad_enabled():
            return False
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1

    def unknown(self, name: str) -> Compute:
        """The format of an operator that the plan does not name."""
        assert self.rules is not None
        # Inside the model the whole forward is compared, when it is over.
        if self.mismatch != "ignore" and (not self.path or torch.compiler.is_compiling()):
            self.report([name], [])
        return self.rules.default

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in another dtype; a parameter is cast once in a forward, unless it was changed.

        Each use has a gradient path of its own, so that gradients of a shared parameter are summed
        in its dtype, not in the narrow one, with this cache as without it.
        """
        if self.casts is None or torch.compiler.is_compiling() or x.dtype is dtype:
            return cast(x, dtype)
        # Tensors of torch.func's transforms come and go under the same id.
        if not (x.is_leaf and x.requires_grad) or x.is_inference() or transforming():
            return cast(x, dtype)
        key = (id(x), dtype)
        known = self.casts.get(key)
        if known is not None and known[1] == x._version:
            return reuse(x, known[2]) if torch.is_grad_enabled() else known[2]
        result = cast(x, dtype)
        if not result.is_inference():
            self.casts[key] = (x, x._version, result.detach())
        return result


_modes: weakref.WeakKeyDictionary[nn.Module, PlanMode] = weakref.WeakKeyDictionary()
_entered: list[PlanMode] = []
"""Modes whose model is running, or whose block it is; the last one owns what is called."""


def mode_of(model: nn.Module) -> PlanMode:
    """The mode of a model, the same whenever it is asked for."""
    mode = _modes.get(model)
    if mode is None:
        mode = _modes[model] = PlanMode(model)
    return mode


def modes_on(module: nn.Module) -> list[PlanMode]:
    """The modes whose hooks a module has."""
    return [
        hook.args[0]
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, functools.partial) and hook.func is _entering
    ]


def _entering(mode: PlanMode, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    if mode.rules is None:
        return
    if not mode.path:
        mode.begin(path)
    elif not path and _interrupted(module):
        mode.begin(path, again=True)
    mode.path.append(path)


def _leaving(
    mode: PlanMode, path: str, module: nn.Module, args: tuple[Any, ...], output: Any
) -> None:
    if not mode.path or mode.path[-1] != path:
        return
    mode.path.pop()
    if not mode.path:
        mode.end(path, finished=output is not None)


def _interrupted(root: nn.Module) -> bool:
    """Whether the forward that seems to run is over: Ctrl-C leaves without calling any hook."""
    if torch.compiler.is_compiling():
        return False
    frame, calls = sys._getframe(), 0
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is root:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls <= 1


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = IN_PLACE_AT.get(func)
    if at is None:
        return False
    return bool(args[at]) if at < len(args) else bool(kwargs.get("inplace"))


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            return x.device.type
    return "cpu"


def _more(counts: Mapping[str, int], than: Mapping[str, int]) -> list[str]:
    return [
        f"{key}#{call}" for key, count in counts.items() for call in range(than.get(key, 0), count)
    ]


def mismatch_text(appeared: list[str], vanished: list[str], known: Sequence[str]) -> str:
    """A sentence on the operators that the plan does not know, and those that the model lacks."""
    parts = []
    if appeared:
        candidates = vanished or known
        named = [f"{name!r}{did_you_mean(name, candidates)}" for name in appeared[:8]]
        parts.append(f"the model calls {_listed(named, len(appeared))}, which the plan lacks")
    if vanished:
        named = [f"{name!r}{did_you_mean(name, appeared)}" for name in vanished[:8]]
        parts.append(f"the plan names {_listed(named, len(vanished))}, which the model lacks")
    return f"the plan does not fit the model: {'; and '.join(parts)}"


def _listed(named: list[str], count: int) -> str:
    more = count - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
