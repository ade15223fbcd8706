"""Nested batches: taken apart into tensors and a skeleton, cut by samples, put together again.

A skeleton is the batch with a :class:`Leaf` in place of every tensor. It says nothing about how
many samples there are, so it stays the same from batch to batch and is sent once. What is no tensor
(strings, numbers) stays in the skeleton.

How samples are told from other dimensions: the first dimension of every tensor is the sample's,
unless it has none (0-d tensors go to all ranks). A list or tuple of as many elements as there are
samples is cut too, if its elements hold no tensors or tensors that cannot be cut themselves (such
as images of different sizes, one per sample). Where a list could be read both ways (a last batch of
two samples, say, with two lists of names), batches before it decide.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from narrowgauge.inputs.split import Share


class BatchError(ValueError):
    """A batch cannot be cut into samples."""


@dataclass(frozen=True)
class Leaf:
    """Stands for a tensor in a skeleton.

    Attributes:
        index: its number among the tensors.
        dtype: of the tensor.
        shape: without the dimension of samples.
        has_rows: whether there is one.
        channels_last: whether its memory is in channels_last order (4 or 5 dimensions).
    """

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_rows: bool
    channels_last: bool

    def byte_count(self, rows: int) -> int:
        """Bytes of the tensor when there are ``rows`` samples."""
        return self.dtype.itemsize * math.prod(self.shape) * (rows if self.has_rows else 1)

    def tensor(self, memory: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor of ``rows`` samples that lies at the beginning of ``memory`` (uint8)."""
        shape = (rows, *self.shape) if self.has_rows else self.shape
        if self.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        typed = _over(memory.untyped_storage(), self.dtype, 0, shape)
        return typed.movedim(-1, 1) if self.channels_last else typed


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as uint8; it shares it."""
    size = tensor.numel() * tensor.element_size()
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return _over(tensor.untyped_storage(), torch.uint8, begin, (size,))


def _over(
    storage: torch.UntypedStorage, dtype: torch.dtype, begin: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """A contiguous tensor over memory that exists; unlike ``view``, of any dtype and of no size."""
    strides = torch.empty(shape, device="meta").stride()
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return torch.Tensor.set_(empty, storage, begin, shape, strides)


def rebuild(tree: Any, function: Callable[[Any, str], Any], path: str = "batch") -> Any:
    """A copy of ``tree`` with ``function(leaf, path)`` in place of whatever is no container.

    Containers are dicts (of any kind), lists, tuples, named tuples and dataclasses; they keep their
    types.
    """
    if not _is_container(tree):
        return function(tree, path)
    return _with_values(tree, lambda value, inner: rebuild(value, function, inner), path)


def _is_container(tree: Any) -> bool:
    if isinstance(tree, (Mapping, list, tuple)):
        return True
    return dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Leaf))


def _with_values(tree: Any, change: Callable[[Any, str], Any], path: str) -> Any:
    """A copy of a container with its values replaced by ``change(value, path)``, one level down."""
    if isinstance(tree, (list, tuple)):
        elements = [change(value, f"{path}[{n}]") for n, value in enumerate(tree)]
        return type(tree)(*elements) if hasattr(tree, "_fields") else type(tree)(elements)
    if isinstance(tree, Mapping):
        items = {key: change(tree[key], f"{path}[{key!r}]") for key in tree}
        if type(tree) is dict:
            return items
        if not isinstance(tree, MutableMapping):
            return type(tree)(items)  # type: ignore[call-arg]
        mapping = copy.copy(tree)  # a defaultdict keeps its default
        for key, value in items.items():
            mapping[key] = value
        return mapping
    clone = copy.copy(tree)
    for own in dataclasses.fields(tree):
        value = change(getattr(tree, own.name), f"{path}.{own.name}")
        object.__setattr__(clone, own.name, value)  # also where it is frozen
    return clone


def fill(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch whose skeleton and tensors these are."""
    return rebuild(
        skeleton, lambda leaf, _: tensors[leaf.index] if isinstance(leaf, Leaf) else leaf
    )


def leaves_of(skeleton: Any) -> list[Leaf]:
    """The leaves of a skeleton, by their numbers."""
    found: list[Leaf] = []
    rebuild(skeleton, lambda leaf, _: found.append(leaf) if isinstance(leaf, Leaf) else None)
    return sorted(found, key=lambda leaf: leaf.index)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in a nested batch."""
    found: list[torch.Tensor] = []
    rebuild(tree, lambda leaf, _: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


def byte_count(tree: Any) -> int:
    """Bytes of all tensors in a nested batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tree))


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor that has one.

    Raises:
        BatchError: no tensor has a dimension, and there is no list either.
    """
    tensor = next((tensor for tensor in tensors_of(batch) if tensor.ndim), None)
    if tensor is not None:
        return tensor.shape[0]
    if isinstance(batch, list):
        return len(batch)
    raise BatchError(
        f"the source gave {_described(batch)}, which has no tensor with a dimension of samples; "
        "give tensors whose first dimension counts samples, in tuples, dicts or dataclasses"
    )


@dataclass
class Habits:
    """What batches have shown of their lists, by path: it decides where one could mean both.

    Attributes:
        columns: paths of lists with more or fewer elements than there were samples.
        per_sample: paths of lists with one element per sample.
    """

    columns: set[str] = field(default_factory=set)
    per_sample: set[str] = field(default_factory=set)


def cut(
    batch: Any, total: int, share: Share, habits: Habits | None = None
) -> tuple[Any, list[torch.Tensor]]:
    """The skeleton and the tensors of what a share holds of a batch of ``total`` samples.

    Tensors are views of the batch where they can be: where no sample is repeated and samples lie
    one behind the other.

    Args:
        batch: as it was read.
        total: samples in it.
        share: what to cut out.
        habits: of the batches before; this one adds its own.

    Raises:
        BatchError: a tensor has another first dimension than ``total``, or is of a kind that cannot
            travel, or nothing can be cut, or it could be in two ways; it names the place.
    """
    knife = _Knife(total, share, habits or Habits())
    skeleton = knife.cut(batch, "batch")
    if not knife.has_cut and not knife.takes_all:
        raise BatchError(
            f"the source gave {_described(batch)} in which nothing counts samples, so every rank "
            "would get all of it; give tensors whose first dimension counts samples, in tuples, "
            "dicts or dataclasses"
        )
    return skeleton, knife.tensors


class _Knife:
    def __init__(self, total: int, share: Share, habits: Habits) -> None:
        self.tensors: list[torch.Tensor] = []
        self.has_cut = False
        self.takes_all = share.indices == list(range(total))
        self._total = total
        self._share = share
        self._habits = habits

    def cut(self, tree: Any, path: str) -> Any:
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            return self._cut_sequence(tree, path)
        if _is_container(tree):
            return _with_values(tree, self.cut, path)
        return self._leaf(tree, path, whole=False)

    def _cut_sequence(self, tree: Any, path: str) -> Any:
        habits = self._habits
        if tree and len(tree) != self._total:
            habits.columns.add(path)
        per_sample = len(tree) == self._total and path not in habits.columns
        if per_sample and not tensors_of(tree):
            self._check_not_square(tree, path)
            return self._elements(tree, path)
        before = len(self.tensors)
        try:
            columns = _with_values(tree, self.cut, path)
        except BatchError:
            if not per_sample:
                raise
        else:
            if not (per_sample and path in habits.per_sample):
                return columns
        del self.tensors[before:]
        return self._elements(tree, path)

    def _check_not_square(self, tree: Any, path: str) -> None:
        """Raise if a list could hold a list per sample or a list per field, and none showed."""
        square = all(isinstance(each, (list, tuple)) and len(each) == self._total for each in tree)
        if square and path not in self._habits.per_sample and not self.takes_all:
            raise BatchError(
                f"{path} has {self._total} elements of {self._total} elements each, and the batch "
                f"holds {self._total} samples: it could be one per sample, or one per field. Give "
                "fields in a dict, or what belongs to a sample in an object of its own"
            )

    def _elements(self, tree: Any, path: str) -> Any:
        """The elements that belong to the share, each as a whole."""
        self.has_cut = True
        self._habits.per_sample.add(path)
        return type(tree)(
            rebuild(tree[n], lambda leaf, where: self._leaf(leaf, where, True), f"{path}[{n}]")
            for n in self._share.indices
        )

    def _leaf(self, leaf: Any, path: str, whole: bool) -> Any:
        if isinstance(leaf, numpy.ndarray):
            raise BatchError(
                f"{path} is a numpy array; make it a tensor in collate_fn (torch.from_numpy)"
            )
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            raise BatchError(
                f"{path} is {_described(leaf)}; allowed: dense tensors, not sparse, nested or "
                "quantized ones. Give its parts (values, indices, lengths) as tensors"
            )
        if leaf.device.type != "cpu":
            raise BatchError(
                f"{path} is on {leaf.device}; leave it on the CPU in the source: the feed brings "
                "each rank its own part to its device"
            )
        tensor = leaf.detach()
        if leaf.is_complex() or leaf.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        has_rows = not whole and tensor.ndim > 0
        if has_rows:
            if tensor.shape[0] != self._total:
                raise BatchError(
                    f"{path} has shape {tuple(tensor.shape)}, but the batch holds {self._total} "
                    f"samples: its first dimension must be {self._total}. What belongs to the "
                    "whole batch can be a 0-d tensor, a number or a string; what belongs to one "
                    "sample, an element of a list with one element per sample"
                )
            tensor = self._rows(tensor)
            self.has_cut = True
        channels_last = _is_channels_last(tensor)
        shape = tuple(tensor.shape[has_rows:])
        self.tensors.append(tensor if channels_last else tensor.contiguous())
        return Leaf(len(self.tensors) - 1, tensor.dtype, shape, has_rows, channels_last)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        share = self._share
        own = tensor[share.start : share.start + share.count]
        if share.rows == share.count:
            return own
        repeated = torch.tensor(share.indices[share.count :], device="cpu")
        raw = tensor.contiguous()
        if raw.dtype.itemsize == 1 and raw.dtype != torch.bool:
            raw = raw.view(torch.uint8)  # float8 has no index_select
            return torch.cat([own.view(torch.uint8), raw[repeated]]).view(tensor.dtype)
        return torch.cat([own, raw[repeated]])


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.ndim not in (4, 5) or tensor.is_contiguous():
        return False
    order = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=order)


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor ({thing.layout}, {thing.dtype}, on {thing.device})"
    return f"a {type(thing).__name__}"
