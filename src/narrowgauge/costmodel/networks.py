"""Networks as a cost model sees them: parameter tensors and work, layer by layer.

Made from the hyperparameters of their papers, so that no weights and no other library are needed.
A multiplication and an addition count as two operations; normalisations and activations as none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layer:
    """Parameter tensors that get their gradients at the same time.

    Attributes:
        sizes: numbers in each parameter tensor.
        work: share of the time of a pass, in any unit common to the network; where a network is
            built in, operations of the forward pass per sample.
    """

    sizes: tuple[int, ...]
    work: float


@dataclass(frozen=True)
class Network:
    """A network, its layers in the order of the forward pass.

    Attributes:
        name: for people.
        layers: see :class:`Layer`.
        forward_operations: of one sample, or ``None`` where unknown.
    """

    name: str
    layers: tuple[Layer, ...]
    forward_operations: float | None = None

    @property
    def numel(self) -> int:
        """Numbers in all parameters."""
        return sum(sum(layer.sizes) for layer in self.layers)


def network_of(model: str | nn.Module) -> Network:
    """The network of a built-in name, or of any module.

    A module does not say how long its layers take: it is assumed that they take time in proportion
    to their parameters, which is right for linear layers, too much for the last layers of a
    convolutional network and for embeddings.

    Raises:
        ValueError: an unknown name, or a module without parameters that get gradients.
        TypeError: neither a name nor a module.
    """
    if isinstance(model, nn.Module):
        seen: set[int] = set()
        layers = []
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            sizes = tuple(p.numel() for p in own if id(p) not in seen)
            seen |= {id(p) for p in own}
            if sizes:
                layers.append(Layer(sizes, float(sum(sizes))))
        if not layers:
            raise ValueError(
                f"the {type(model).__name__} has no parameters that get gradients; there is "
                "nothing to send"
            )
        return Network(type(model).__name__, tuple(layers))
    if not isinstance(model, str):
        raise TypeError(
            f"model is a {type(model).__name__}; allowed: a torch.nn.Module, or one of "
            f"{', '.join(NETWORKS)}"
        )
    if model not in NETWORKS:
        raise ValueError(
            f"model is {model!r}; allowed: {', '.join(NETWORKS)}, or, in Python, any "
            "torch.nn.Module"
        )
    name, make = NETWORKS[model]
    layers = make()
    return Network(name, tuple(layers), sum(layer.work for layer in layers))


def _convolution(kernel: int, inputs: int, outputs: int, side: int, *, bias: bool = False) -> Layer:
    """A square convolution whose output is ``side`` numbers wide and high."""
    weights = kernel * kernel * inputs * outputs
    return Layer((weights, outputs) if bias else (weights,), 2.0 * weights * side * side)


def _linear(inputs: int, outputs: int, rows: int = 1) -> Layer:
    return Layer((inputs * outputs, outputs), 2.0 * inputs * outputs * rows)


def _resnet50() -> list[Layer]:
    """ResNet-50 (K. He et al., arXiv 1512.03385), the stride in the 3x3 convolution; 224x224."""
    layers = [_convolution(7, 3, 64, 112), Layer((64, 64), 0.0)]
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            before = side
            if stage and not block:
                side //= 2
            shapes = [
                (1, inputs, width, before),
                (3, width, width, side),
                (1, width, 4 * width, side),
            ]
            if not block:
                shapes.append((1, inputs, 4 * width, side))  # the shortcut
            for kernel, ins, outs, out_side in shapes:
                layers += [_convolution(kernel, ins, outs, out_side), Layer((outs, outs), 0.0)]
            inputs = 4 * width
    return [*layers, _linear(2048, 1000)]


def _vgg16() -> list[Layer]:
    """VGG-16 (K. Simonyan and A. Zisserman, arXiv 1409.1556), without normalisation; 224x224."""
    layers = []
    inputs, side = 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(_convolution(3, inputs, width, side, bias=True))
            inputs = width
        side //= 2
    return [*layers, _linear(512 * 7 * 7, 4096), _linear(4096, 4096), _linear(4096, 1000)]


def _transformer_block(width: int, tokens: int) -> list[Layer]:
    """Attention, a hidden layer four times as wide, two normalisations."""
    attention = Layer((), 4.0 * tokens * tokens * width)
    return [
        Layer((width, width), 0.0),
        *(_linear(width, width, tokens) for _ in range(3)),
        attention,
        _linear(width, width, tokens),
        Layer((width, width), 0.0),
        _linear(width, 4 * width, tokens),
        _linear(4 * width, width, tokens),
    ]


def _bert_large() -> list[Layer]:
    """BERT-large, uncased, encoder and pooler (J. Devlin et al., arXiv 1810.04805); 512 tokens."""
    width, tokens = 1024, 512
    layers = [Layer((30522 * width, 512 * width, 2 * width), 0.0), Layer((width, width), 0.0)]
    for _ in range(24):
        layers += _transformer_block(width, tokens)
    return [*layers, _linear(width, width)]


def _gpt2() -> list[Layer]:
    """GPT-2 small (A. Radford et al., 2019), 1024 tokens; the last layer shares the embedding."""
    width, tokens, vocabulary = 768, 1024, 50257
    layers = [Layer((vocabulary * width, 1024 * width), 0.0)]
    for _ in range(12):
        layers += _transformer_block(width, tokens)
    return [*layers, Layer((width, width), 2.0 * tokens * vocabulary * width)]


NETWORKS: dict[str, tuple[str, Callable[[], list[Layer]]]] = {
    "resnet50": ("ResNet-50", _resnet50),
    "vgg16": ("VGG-16", _vgg16),
    "bert-large": ("BERT-large", _bert_large),
    "gpt2": ("GPT-2 small", _gpt2),
}
"""The built-in networks: key, name for people, and their layers."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that DDP reduces together.

    Attributes:
        numel: numbers in it.
        ready: share of the backward pass after which the last of them is there.
    """

    numel: int
    ready: float


def buckets_of(network: Network, first_bytes: int = 1 << 20, bytes: int = 25 << 20) -> list[Bucket]:
    """The buckets of DDP in the order in which it reduces them.

    Since its second step DDP fills buckets in the order in which gradients arrive, here from the
    last layer to the first. One is closed by the tensor that brings it to its size: ``first_bytes``
    of float32 for the first, ``bytes`` for the others.
    """
    total_work = math.fsum(layer.work for layer in network.layers)
    buckets: list[Bucket] = []
    numel, done = 0, 0.0
    for layer in reversed(network.layers):
        done += layer.work
        for size in reversed(layer.sizes):
            numel += size
            if 4 * numel >= (bytes if buckets else first_bytes):
                buckets.append(Bucket(numel, min(1.0, done / total_work)))
                numel = 0
    if numel:
        buckets.append(Bucket(numel, 1.0))
    return buckets
