"""A training that a file of the user's describes: ``train.py:build``.

``build()`` takes nothing and returns a dict, so that the file need not import anything of ours::

    def build():
        model = Net()
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            "batches": DataLoader(train_set, 64, shuffle=True),  # one epoch each time
            "held_out": DataLoader(test_set, 64),                # or "evaluate": a function
        }

The trade-off: loops with more to them (accumulated gradients, several optimizers) do not fit; they
use ``narrowgauge.operators.OperatorSearch`` themselves.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_NEEDED = ("model", "optimizer", "loss", "batches")
_ALLOWED = (*_NEEDED, "held_out", "evaluate")
_UNSEEN = 50  # training batches that are evaluated where no others are given


class ScriptError(Exception):
    """The file does not describe a training; the message says what it lacks."""


@dataclass(frozen=True)
class Training:
    """What ``build()`` describes.

    Args:
        model: to be trained, perhaps in ``DistributedDataParallel``; not compiled.
        optimizer: of its parameters.
        loss: of the model on a batch, a scalar: ``loss(model, batch)``.
        batches: iterated once per epoch.
        held_out: batches to evaluate on; ``None``: the first 50 of ``batches``.
        evaluate: the evaluation, the lower the better, instead of the mean loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Iterable[Any]
    held_out: Iterable[Any] | None = None
    evaluate: Callable[[], float] | None = None

    def loss_of(self, batch: object) -> Tensor:
        """The loss on a batch, to go backward from.

        Raises:
            ScriptError: it is no scalar, or does not depend on a parameter.
        """
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"a tensor of shape {tuple(loss.shape)}"
                got += "" if loss.requires_grad else " that requires no gradient"
            raise ScriptError(
                f"loss(model, batch) gave {got}; it must be one number, computed by the model, "
                "such as torch.nn.functional.cross_entropy(model(x), y)"
            )
        return loss

    def epoch(self) -> Iterator[Any]:
        """The batches of one epoch.

        Raises:
            ScriptError: there is none.
        """
        batch = None
        for batch in self.batches:
            yield batch
        if batch is None:
            raise ScriptError(
                f"batches ({type(self.batches).__name__}) gave nothing; it is iterated once per "
                "epoch and must give at least one batch each time"
            )

    def evaluation(self) -> float:
        """Of the model as it is, in evaluation mode; its mode is put back.

        Raises:
            ScriptError: it is no number, or there is nothing to evaluate on.
        """
        training = self.model.training
        self.model.eval()
        try:
            if self.evaluate is not None:
                value = self.evaluate()
                try:
                    return float(value)
                except (TypeError, ValueError, RuntimeError):
                    raise ScriptError(
                        f"evaluate() gave {type(value).__name__}, {str(value)[:40]!r}; it must "
                        "give one number, the lower the better"
                    ) from None
            batches = self.held_out
            if batches is None:
                batches = itertools.islice(self.batches, _UNSEEN)
            with torch.no_grad():
                losses = [float(self.loss(self.model, batch)) for batch in batches]
        finally:
            self.model.train(training)
        if not losses:
            raise ScriptError("held_out gave nothing; it must give at least one batch each time")
        return sum(losses) / len(losses)


def load(where: str) -> Training:
    """Imports a file and calls its function.

    Args:
        where: ``"train.py:build"``; without a colon, the function is ``build``. The file's folder
            is put on ``sys.path``, as ``python train.py`` does.

    Raises:
        ScriptError: there is no such file or function, it raised, or what it returned does not
            describe a training.
    """
    path, colon, function = where.rpartition(":")
    if not colon or function.endswith(".py"):
        path, function = where, "build"
    module = _imported(Path(path))
    build = getattr(module, function, None)
    if not callable(build):
        known = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(function, known, n=1)
        raise ScriptError(
            f"{path} has no function {function!r}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
            + "; name one as in train.py:build, that returns a dict with "
            + ", ".join(map(repr, _NEEDED))
        )
    return _checked(_called(build, f"{path}:{function}()"), f"{path}:{function}()")


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise ScriptError(
            f"there is no file {str(path)!r}; name one and its function, such as train.py:build"
        )
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ScriptError(f"{str(path)!r} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that loader processes can find its classes
    loader = spec.loader
    _called(lambda: loader.exec_module(module), str(path))
    return module


def _called(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except Exception as error:
        own = traceback.extract_tb(error.__traceback__)[1:]  # without this line
        lines = "".join(traceback.format_list([f for f in own if "importlib" not in f.filename]))
        raise ScriptError(f"{what} raised {type(error).__name__}: {error}\n{lines}") from error


def _checked(parts: object, where: str) -> Training:
    if not isinstance(parts, dict):
        raise ScriptError(
            f"{where} returned {type(parts).__name__}; it must return a dict with "
            + ", ".join(map(repr, _NEEDED))
        )
    missing = [name for name in _NEEDED if name not in parts]
    unknown = [name for name in parts if name not in _ALLOWED]
    if missing or unknown:
        raise ScriptError(
            f"{where} returned a dict "
            + " and ".join(
                [f"without {', '.join(map(repr, missing))}"] * bool(missing)
                + [f"with {', '.join(map(repr, unknown))}"] * bool(unknown)
            )
            + f"; needed: {', '.join(map(repr, _NEEDED))}; may be there: 'held_out', 'evaluate'"
        )
    for name, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not isinstance(parts[name], kind):
            raise ScriptError(
                f"{where}: {name!r} is {type(parts[name]).__name__}; it must be a "
                f"torch.{'nn.Module' if name == 'model' else 'optim.Optimizer'}"
            )
    for name in ("loss", "evaluate"):
        if not callable(parts[name] if name == "loss" else parts.get(name, len)):
            signature = "loss(model, batch)" if name == "loss" else "evaluate()"
            raise ScriptError(
                f"{where}: {name!r} is {type(parts[name]).__name__}; it must be a function, "
                f"called as {signature}"
            )
    for name in ("batches", "held_out"):
        value = parts.get(name, ())
        if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
            raise ScriptError(
                f"{where}: {name!r} is {type(value).__name__}, which cannot be iterated; give a "
                "list or a DataLoader"
            )
        if isinstance(value, Iterator):
            raise ScriptError(
                f"{where}: {name!r} is {type(value).__name__}, which can be iterated only once; "
                "give a list or a DataLoader, which begins anew in each epoch"
            )
    if "held_out" in parts and "evaluate" in parts:
        raise ScriptError(f"{where} gives both 'held_out' and 'evaluate'; give one of them")
    return Training(**parts)
