"""Networks of a size that two cores train in about a tenth of a second a step, and their data."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list:
    """A convolution with batch normalisation."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Residual(nn.Module):
    """A block of ResNet: two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(), *convolution(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out."""
        return F.relu(self.body(x) + self.shortcut(x))


class ResNetLike(nn.Module):
    """Three stages of residual blocks on 32 × 32 images."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(32, 32, 1), (32, 64, 2), (64, 128, 2)]
        self.stem = nn.Sequential(*convolution(3, 32, 3), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(*width) for width in widths))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, 32, 32) to 10 logits."""
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Inverted(nn.Module):
    """A block of MobileNetV2: widen, depthwise, narrow; a shortcut where shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        hidden = inputs * expand
        self.body = nn.Sequential(
            *convolution(inputs, hidden, 1),
            nn.ReLU6(),
            *convolution(hidden, hidden, 3, stride, groups=hidden),
            nn.ReLU6(),
            *convolution(hidden, outputs, 1),
        )
        self.same = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out."""
        return x + self.body(x) if self.same else self.body(x)


class MobileNetLike(nn.Module):
    """Inverted residual blocks, three of them with a depthwise convolution of stride 2."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [(16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.stem = nn.Sequential(*convolution(3, 16, 3), nn.ReLU6())
        self.blocks = nn.Sequential(*(Inverted(*block) for block in blocks))
        self.top = nn.Sequential(*convolution(64, 256, 1), nn.ReLU6())
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, height, width) to 10 logits."""
        x = self.top(self.blocks(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A layer of a transformer; attention in one call or written by hand."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention over (batch, length, width)."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) in and out."""
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class LanguageModel(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, fused: bool, layers: int = 4, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, fused) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to logits (batch, length, 256)."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def images(side: int, batch: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Random images whose class is a pattern in them."""
    patterns = torch.randn(10, 3, side, side, generator=torch.Generator().manual_seed(5))

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, 10, (batch,), generator=generator)
        noise = torch.randn(batch, 3, side, side, generator=generator)
        return 0.1 * patterns[label] + noise, label

    return make


def text(batch: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Pieces of the standard library's own source."""
    import argparse
    import decimal
    import inspect
    import typing

    source = "".join(inspect.getsource(module) for module in (argparse, decimal, typing))
    data = torch.tensor(list(source.encode("utf-8")))

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        begin = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
        both = torch.stack([data[at : at + length + 1] for at in begin.tolist()])
        return both[:, :-1], both[:, 1:]

    return make


def vectors(width: int, batch: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Noisy points around ten centres."""
    centres = torch.randn(10, width, generator=torch.Generator().manual_seed(5))

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, 10, (batch,), generator=generator)
        return 0.2 * centres[label] + torch.randn(batch, width, generator=generator), label

    return make


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the last dimension."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Network:
    """What the benchmark trains."""

    make: Callable[[], nn.Module]
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    pictures: bool = False


def mlp() -> nn.Module:
    """Four wide layers."""
    sizes = [256, 1024, 1024, 1024]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


NETWORKS = {
    "resnet": Network(ResNetLike, images(32, 32), pictures=True),
    "mobilenet": Network(MobileNetLike, images(64, 16), pictures=True),
    "lm": Network(lambda: LanguageModel(True), text(8, 128)),
    "lm-by-hand": Network(lambda: LanguageModel(False), text(8, 128)),
    "mlp": Network(mlp, vectors(256, 256)),
}
