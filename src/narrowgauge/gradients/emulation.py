"""The sum of gradients as N nodes would make it, on one process.

What would a cluster have given whose nodes add gradients *in* a narrow format, in this order? The
collectives of this library add in float32 and only send narrow numbers; here every partial sum is
rounded as well, as on hardware that sums what it receives. One process takes the nodes'
micro-batches one after the other, so a laptop stands for 256 nodes; the price is their time, and
for some orders the memory of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor, nn

from narrowgauge.formats import BlockFormat, FloatFormat, FormatLike, IntFormat, format_of
from narrowgauge.gradients.orders import (
    LOWEST_EXPONENT,
    PIECE,
    OrderLike,
    Ring,
    check_order,
    make_order,
    powers_of_two,
)
from narrowgauge.gradients.policy import parameter_formats
from narrowgauge.kernels import operators
from narrowgauge.ledger import round_off_sums
from narrowgauge.scaling import largest_exponents, needs_scale, shared_exponents

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_NODES = 4096  # of which shared scales leave room for the sum


class NodeSum:
    """The sum over nodes of one flat vector that is made of tensors, in one format.

    Args:
        sizes: numbers of elements of the tensors.
        nodes: how many vectors will be pushed.
        format: as in :func:`emulate_all_reduce`, as are ``op``, ``order``, ``compensated``,
            ``scale`` and ``published``.
        device: of the vectors.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        nodes: int,
        format: FloatFormat | IntFormat,
        *,
        op: str,
        order: OrderLike,
        compensated: bool,
        scale: str | None,
        published: bool,
        device: torch.device,
    ) -> None:
        scale = scale if needs_scale(format) else None
        self._sizes, self._nodes, self._format = list(sizes), nodes, format
        self._divide_first = published and op == "mean"
        self._divide_last = not published and op == "mean"
        self._shared = scale == "shared"
        numel = sum(sizes)
        whole = scale == "local" or order not in ("sequential", "tree") or not numel
        self._pieces = [numel] if whole else [min(PIECE, numel - i) for i in range(0, numel, PIECE)]
        # Elements that do not depend on each other are summed piece by piece, in the cache.
        self._make_orders = [
            partial(
                make_order, order, nodes, sizes if whole else [piece], format,
                compensated=compensated, local=scale == "local", device=device,
            )
            for piece in self._pieces
        ]  # fmt: skip
        self._group = order[1] if isinstance(order, tuple) else nodes
        self._order, self._device = order, device
        self.reset()

    def reset(self) -> None:
        """Forget what was pushed."""
        self._pushed = 0
        self._buffers: dict[int, Tensor] = {}
        self._orders = [make() for make in self._make_orders]
        self._ring = self._orders[0] if isinstance(self._orders[0], Ring) else None
        # Shared scales are known once all nodes have been seen, so their vectors wait: in the ring,
        # which holds them anyway, or here.
        self._waiting: list[Tensor] = []
        self._peaks: Tensor | None = None

    def buffer(self) -> Tensor:
        """Memory for the next node's float32 vector, to be filled and pushed; used again later."""
        if self._order == "tree" and not self._shared:  # which holds some, and lets others go
            return torch.empty(sum(self._sizes), device=self._device)
        index = self._pushed
        if not self._shared or self._ring is not None:  # the first one of a sum becomes the sum
            index = min(1, index % int(self._group))
        if index not in self._buffers:
            self._buffers[index] = torch.empty(sum(self._sizes), device=self._device)
        return self._buffers[index]

    def push(self, gradient: Tensor) -> None:
        """The next node's float32 vector; its memory is handed over until the result is there."""
        self._pushed += 1
        if self._divide_first:
            gradient.div_(self._nodes)
        if self._shared:
            # Bits of magnitudes: as integers NaN is the largest of all.
            parts = gradient.split(self._sizes)
            peaks = torch.cat([operators.largest_magnitudes(part, 0) for part in parts])
            self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks)
        if self._shared and self._ring is None:
            self._waiting.append(gradient)
        else:
            for order, piece in zip(self._orders, gradient.split(self._pieces), strict=True):
                order.push(piece)

    def result(self) -> Tensor:
        """The reduced vector, float32. What is pushed next belongs to another sum."""
        scales: Tensor | None = self._scales() if self._shared else None
        if self._ring is not None:
            self._ring.scales = None if scales is None else scales.float()
        if scales is not None and self._ring is None:
            narrow = scales.float().split(self._pieces)
            waiting = [gradient.split(self._pieces) for gradient in self._waiting]
            for index, order in enumerate(self._orders):
                for pieces in waiting:
                    order.push(pieces[index].mul_(narrow[index]))
        total = torch.cat([order.result().double() for order in self._orders])
        self._waiting, self._peaks, self._pushed = [], None, 0
        if scales is not None:
            total /= scales
        if self._divide_last:
            total /= self._nodes
        return total.float()

    def _scales(self) -> Tensor:
        """APS's scales, one for each element, equal within a tensor; float64."""
        assert self._peaks is not None
        agreed = largest_exponents(self._peaks, self._nodes)
        exponents = shared_exponents(agreed, self._format, LOWEST_EXPONENT)
        sizes = torch.tensor(self._sizes, device=exponents.device)
        return powers_of_two(exponents).repeat_interleave(sizes)


def _sum_format(format: FormatLike) -> FloatFormat | IntFormat:
    parsed = format_of(format)
    if isinstance(parsed, BlockFormat):
        raise ValueError(
            f"format is {parsed.name}, a block format, whose sums are not emulated; use "
            f"{parsed.element.name} with scale='local', a power of two for each tensor and message"
        )
    if not parsed.signed:
        raise ValueError(f"format is {parsed.name}, which has no sign; use a signed one")
    return parsed


def _check(nodes: int, op: str, order: object, scale: object, published: bool) -> None:
    if not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"{nodes} nodes; allowed: 1 to {MOST_NODES}")
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; allowed: 'mean', 'sum'")
    if scale not in ("local", "shared", None):
        raise ValueError(f"scale is {scale!r}; allowed: 'local', 'shared' (APS as published), None")
    check_order(order, nodes)
    if published and (order != "sequential" or scale == "local"):
        raise ValueError(
            f"published=True with order={order!r} and scale={scale!r}; what was published sums one "
            "rank after the other, order='sequential', with scale='shared' (APS) or None"
        )


@overload
def emulate_all_reduce(
    stacked: Tensor,
    format: FormatLike,
    *,
    op: str = ...,
    order: OrderLike = ...,
    compensated: bool = ...,
    scale: str | None = ...,
    published: bool = ...,
) -> Tensor: ...


@overload
def emulate_all_reduce(
    stacked: Sequence[Tensor],
    format: FormatLike,
    *,
    op: str = ...,
    order: OrderLike = ...,
    compensated: bool = ...,
    scale: str | None = ...,
    published: bool = ...,
) -> list[Tensor]: ...


def emulate_all_reduce(
    stacked: Tensor | Sequence[Tensor],
    format: FormatLike,
    *,
    op: str = "mean",
    order: OrderLike = "sequential",
    compensated: bool = False,
    scale: str | None = None,
    published: bool = False,
) -> Tensor | list[Tensor]:
    """What N nodes would get that sum their gradients in a narrow format.

    Each node casts its gradient to the format; each addition gives the exact sum of two numbers of
    the format, rounded once to it (to nearest, ties to even).

    Args:
        stacked: float32, bfloat16 or float16 of shape ``(N, …)``, one gradient per node, N at most
            4096; or a sequence of such, reduced as one vector as DDP does with a bucket.
        format: of gradients and sums: any scalar format. Overflow gives infinity where the format
            has one, else the largest number.
        op: ``"mean"``: the sum, divided by N in float32; or ``"sum"``.
        order: in which order nodes are summed.

            - ``"sequential"``: 0, 1, …, N−1.
            - ``"ring"``: the vector is cut into N chunks of equal length (the last ones may be
              shorter or empty); chunk ``c`` is summed from node ``c`` on, and round to ``c - 1``.
            - ``"tree"``: neighbours in pairs, pairs of pairs, …; who has no neighbour moves up.
            - ``("hierarchical", k)``: groups of k nodes sequentially, then their sums in a ring.
        compensated: Kahan's summation, each node passing on what was lost besides the sum.
        scale: ``None``; ``"shared"``: APS as published, one power of two per tensor under which no
            partial sum of any node can overflow (if its largest number is at least 2**-9, so that
            the power is a float32); ``"local"``: every message, partial sums included,
            is scaled by the largest power of two under which its own largest magnitude stays
            finite, per tensor (in a ring: per tensor and chunk).
        published: sum as CPD, the authors' simulator, does, without its faults: the gradients are
            divided by N *first*, in float32 (it divides the loss), and summed sequentially.

    Returns:
        The reduced gradient, of shape ``stacked.shape[1:]`` and the dtype of ``stacked``; a list if
        a sequence was given.

    A NaN or infinity makes a scaled tensor NaN throughout; without a scale, it spreads as sums do.
    With local scales a sum beyond float32's range comes out infinite or NaN.

    Raises:
        TypeError: not tensors, or of another dtype.
        ValueError: no or too many nodes; an unknown order, scale or op; a block format; sequences
            whose numbers of nodes differ; ``published`` with another order or local scales.

    Source: APS and CPD (arXiv 1911.08907), sections 3 and 4.
    """
    tensors = [stacked] if isinstance(stacked, Tensor) else list(stacked)
    if not tensors:
        return []
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(f"stacked holds a {type(each).__name__}; it must hold tensors")
        if each.dtype not in _DTYPES:
            raise TypeError(f"stacked is {each.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
        if each.dim() == 0:
            raise ValueError("stacked has no dimension; the first one counts the nodes")
    nodes = len(tensors[0])
    if any(len(each) != nodes for each in tensors):
        raise ValueError(f"stacked holds gradients of {[len(each) for each in tensors]} nodes")
    _check(nodes, op, order, scale, published)
    reduction = NodeSum(
        [each[0].numel() for each in tensors],
        nodes,
        _sum_format(format),
        op=op,
        order=order,
        compensated=compensated,
        scale=scale,
        published=published,
        device=tensors[0].device,
    )
    sizes = [each[0].numel() for each in tensors]
    for node in range(nodes):
        gradient = reduction.buffer()
        for each, part in zip(tensors, gradient.split(sizes), strict=True):
            part.view(each.shape[1:]).copy_(each[node].detach())
        reduction.push(gradient)
    parts = reduction.result().split(sizes)
    reduced = [
        part.view(each.shape[1:]).to(each.dtype) for part, each in zip(parts, tensors, strict=True)
    ]
    return reduced[0] if isinstance(stacked, Tensor) else reduced


class EmulatedNodes:
    """Trains one model as n nodes would that sum their gradients in a narrow format.

    Every backward pass stands for one node; after the n-th, ``.grad`` holds what all nodes get::

        nodes = EmulatedNodes(model, 8, "e5m2", order="ring", scale="shared")
        for images, labels in micro_batches:
            loss_function(model(images), labels).backward()
            if nodes.collect():
                optimizer.step()
                optimizer.zero_grad()

    The gradients are those of one bucket: the order's chunks are cut from all parameters of a
    format together, scales are per parameter.

    Args:
        model: any module; the parameters that require a gradient now take part.
        n: number of nodes, 1 to 4096.
        format: as in :func:`emulate_all_reduce`, as are ``order``, ``compensated``, ``scale`` and
            ``published``.
        keep: parameters or modules whose gradients are summed in another format, e.g. ``{"fc":
            "fp32"}``: see :func:`~narrowgauge.gradients.parameter_formats`.
        measure_error: also sum in float64 and set :attr:`round_off_error`.

    Attributes:
        n: number of nodes.
        formats: the format of each parameter's gradient, by name.
        steps: how many times all nodes have been summed.
        round_off_error: of the last sum against the exact one: the mean of |exact − summed| /
            |exact| over elements with exact ≠ 0 (arXiv 1911.08907); ``None`` if not measured.

    Memory: ``scale="shared"`` keeps n gradients until all are there, and so does the ring; else one
    sum, a tree's levels of them, or one per group. Between steps nothing is kept, so there is
    nothing to save with a checkpoint.

    Raises:
        TypeError: ``model`` is no module, or a parameter of another dtype than float32, bfloat16
            and float16.
        ValueError: as :func:`emulate_all_reduce`; a key of ``keep`` that matches no parameter; a
            model without parameters that require a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        n: int,
        format: FormatLike = "e5m2",
        *,
        order: OrderLike = "sequential",
        compensated: bool = False,
        scale: str | None = None,
        published: bool = False,
        keep: Mapping[str, FormatLike] | None = None,
        measure_error: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n is {n!r}; it must be an int, the number of nodes")
        _check(n, "mean", order, scale, published)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("model has no parameter that requires a gradient")
        for name, parameter in named.items():
            if parameter.dtype not in _DTYPES:
                raise TypeError(
                    f"parameter {name!r} is {parameter.dtype}; allowed: "
                    f"{', '.join(map(str, _DTYPES))}"
                )
        self.n = n
        self.formats = parameter_formats(named, format, keep, check=_sum_format)
        self.steps = 0
        self.round_off_error: float | None = None
        groups: dict[tuple[FloatFormat | IntFormat, torch.device], list[nn.Parameter]] = {}
        for name, parameter in named.items():
            groups.setdefault((self.formats[name], parameter.device), []).append(parameter)
        self._groups = [
            (format, device, group, [p.numel() for p in group])
            for (format, device), group in groups.items()
        ]
        self._sums = [
            NodeSum(
                sizes, n, format, op="mean", order=order, compensated=compensated, scale=scale,
                published=published, device=device,
            )
            for format, device, _, sizes in self._groups
        ]  # fmt: skip
        self._exact: list[Tensor | None] = [None] * len(self._groups)
        self._collected = 0
        self._measures_error = measure_error
        self._model, self._taken = model, {id(parameter) for parameter in named.values()}

    def reset(self) -> None:
        """Forget the nodes collected since the last sum."""
        self._collected = 0
        self._exact = [None] * len(self._groups)
        for node_sum in self._sums:
            node_sum.reset()

    def collect(self) -> bool:
        """Take the model's gradients as the next node's, and leave none.

        Returns:
            Whether this was the n-th node: then ``.grad`` of every parameter is the nodes' mean.
            Parameters that a node did not use count as zeros, as in DDP. Sparse gradients become
            dense.

        Raises:
            RuntimeError: no parameter has a gradient; was ``backward()`` called? Or a parameter
                requires one that did not when this object was made.

        If this raises, also because a gradient cannot be copied, no node has been counted.
        """
        self._refuse_unfrozen()
        if all(p.grad is None for _, _, group, _ in self._groups for p in group):
            raise RuntimeError(
                f"no parameter has a gradient (node {self._collected} of {self.n}); call "
                "backward() before each collect()"
            )
        gradients = [node_sum.buffer() for node_sum in self._sums]
        for gradient, (_, _, group, sizes) in zip(gradients, self._groups, strict=True):
            for parameter, part in zip(group, gradient.split(sizes), strict=True):
                if parameter.grad is None:
                    part.zero_()
                else:
                    grad = parameter.grad.detach()
                    part.view(parameter.shape).copy_(grad.to_dense() if grad.is_sparse else grad)
        # All are copied; only now is anything taken.
        for index, gradient in enumerate(gradients):
            for parameter in self._groups[index][2]:
                parameter.grad = None
            if self._measures_error:
                exact = self._exact[index]
                self._exact[index] = gradient.double() if exact is None else exact.add_(gradient)
            self._sums[index].push(gradient)
        self._collected += 1
        if self._collected < self.n:
            return False
        self._reduce()
        self.steps += 1
        self._collected = 0
        self._exact = [None] * len(self._groups)
        return True

    def _refuse_unfrozen(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._taken:
                raise RuntimeError(
                    f"parameter {name!r} requires a gradient, but did not when EmulatedNodes was "
                    "made, so nobody sums what the nodes add to it; make EmulatedNodes after "
                    "unfreezing, or freeze it"
                )

    def _reduce(self) -> None:
        errors = []
        for node_sum, exact, (_, _, group, sizes) in zip(
            self._sums, self._exact, self._groups, strict=True
        ):
            reduced = node_sum.result()
            if exact is not None:
                errors.append(round_off_sums(exact.div_(self.n).float(), reduced))
            for parameter, part in zip(group, reduced.split(sizes), strict=True):
                if parameter.requires_grad:  # may have been frozen since
                    parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        count = sum(elements for _, elements in errors)
        self.round_off_error = sum(total for total, _ in errors) / count if count else None
