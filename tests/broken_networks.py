"""Four small networks that blanket bf16 or fp16 breaks, each by other operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CENTRES = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))


class LargeMean(nn.Module):
    """Subtracts a large constant: bf16 knows no difference between 1000 and 1002."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.prototypes = nn.Parameter(torch.randn(10, 64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x - 1000.0))
        code = self.second(hidden * hidden)
        return -torch.mean(torch.pow(code.unsqueeze(1) - self.prototypes, 2), -1)


class FoldedNorm(nn.Module):
    """Normalisation folded into a linear layer, as for deployment: its inputs are on raw scale."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise = nn.Linear(16, 16)
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 10)
        with torch.no_grad():
            self.normalise.weight.copy_(torch.eye(16))
            self.normalise.bias.fill_(-1000.0)
        self.normalise.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(self.normalise(x))))


class SquaredActivation(nn.Module):
    """Squares exceed fp16: the one operator makes them, the next one takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.third = nn.Linear(64, 10)
        with torch.no_grad():
            self.first.weight.mul_(500)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.third(F.relu(self.norm(self.second(hidden * hidden))))


class SmallDifferences(nn.Module):
    """Predicts small differences on a large offset; the loss subtracts the offset again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).squeeze(-1) * 1e-3 + 500.0


def small_differences_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.mean(torch.pow((output - target) * 1e3, 2))


def clusters(offset: float) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, 10, (count,), generator=generator)
        noise = 0.7 * torch.randn(count, 16, generator=generator)
        return CENTRES[label] + noise + offset, label

    return batch


def offsets(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 16, generator=generator)
    return x, (x[:, :8].sum(1) - x[:, 8:].sum(1)) * 1e-3 + 500.0


@dataclass(frozen=True)
class Case:
    network: type[nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    broken_in: str  # the format that breaks it everywhere at once
    culprits: frozenset[str]  # the operators by which it does

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def batches(self, count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator, 128) for _ in range(count)]

    def evaluate(self, model: nn.Module) -> float:
        """The loss of 2048 other samples, in float32."""
        x, y = self.batch(torch.Generator().manual_seed(99), 2048)
        with torch.no_grad():
            return self.loss(model(x), y).item()


CASES = {
    "large mean": Case(
        LargeMean, clusters(1000.0), F.cross_entropy, "bf16", frozenset({"::sub#0"})
    ),
    "folded norm": Case(
        FoldedNorm, clusters(1000.0), F.cross_entropy, "bf16", frozenset({"normalise::linear#0"})
    ),
    "squared activation": Case(
        SquaredActivation,
        clusters(0.0),
        F.cross_entropy,
        "fp16",
        frozenset({"::mul#0", "second::linear#0", "norm::layer_norm#0"}),
    ),
    "small differences": Case(
        SmallDifferences, offsets, small_differences_loss, "bf16", frozenset({"::add#0", "::sub#0"})
    ),
}
