"""A second training on the same steps, such as one in float32 beside one under a plan."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.operators.replay import ReplayError


class Shadow:
    """A second training on the same steps: parameters, buffers and optimizer state of its own.

    It begins where the training is now. Each step of the training is made again on the shadow's
    numbers, which are put in place for that time only; so both see the same batches in the same
    order with the same random numbers.

    Args:
        model: the model in training.
        optimizers: of its parameters, and perhaps of others, as those of a loss.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._parameters: list[Tensor] = list(
            dict.fromkeys([*inner.parameters(), *(p for group in groups for p in group)])
        )
        self._tensors = [*self._parameters, *inner.buffers()]
        self._data = [tensor.detach().clone() for tensor in self._tensors]
        self._gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        self._states: list[Any] = [_copied_state(optimizer) for optimizer in optimizers]
        self._left: list[tuple[int, Tensor, Tensor | None, int]] = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The shadow's numbers in the place of the training's, for the length of the context."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """The shadow becomes the training, and the training the shadow."""
        for position, tensor in enumerate(self._tensors):
            tensor.data, self._data[position] = self._data[position], tensor.data
        for position, parameter in enumerate(self._parameters):
            parameter.grad, self._gradients[position] = (
                self._gradients[position],
                parameter.grad,
            )
        for position, optimizer in enumerate(self._optimizers):
            optimizer.state, self._states[position] = self._states[position], optimizer.state

    def leave(self) -> None:
        """A step is over on both; what the loop does until the next one is its own."""
        self._left = [
            (
                p._version,
                p.detach().double().sum(),
                p.grad,
                -1 if p.grad is None else p.grad._version,
            )
            for p in self._parameters
        ]

    def follow(self) -> None:
        """The next step begins: gradients that the loop set to zero meanwhile are zero here too.

        Raises:
            ReplayError: the loop changed parameters or gradients in another way.
        """
        for position, (version, total, gradient, of_gradient) in enumerate(self._left):
            parameter = self._parameters[position]
            now = parameter.grad
            moved = parameter._version != version and not torch.equal(
                parameter.detach().double().sum(), total
            )
            if not moved and now is gradient and (now is None or now._version == of_gradient):
                continue
            if moved or (now is not None and bool(now.any())):
                raise ReplayError(
                    f"{'a parameter' if moved else 'a gradient'} of shape {tuple(parameter.shape)} "
                    "was changed between two steps; optimizer.step(), backward() and what else "
                    "changes them must be called within search.step()"
                )
            self._gradients[position] = None if now is None else torch.zeros_like(now)
        self._left = []


def _copied_state(optimizer: torch.optim.Optimizer) -> Any:
    state = type(optimizer.state)(optimizer.state.default_factory)
    for parameter, values in optimizer.state.items():
        state[parameter] = copy.deepcopy(values)
    return state
