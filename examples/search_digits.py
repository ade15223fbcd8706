"""What ``narrowgauge search`` takes: a file whose function describes a training.

    narrowgauge search examples/search_digits.py:build --workdir search-digits

A small network with depthwise convolutions learns scikit-learn's digits. ``build`` returns a plain
dict and imports nothing of narrowgauge. ``DIGITS_BATCHES`` limits the batches of an epoch.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Separable(nn.Module):
    """A depthwise convolution, a pointwise one, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, width) in and out."""
        return x + F.relu(self.norm(self.pointwise(self.depthwise(x))))


class Net(nn.Module):
    """Reads images of 8 × 8 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(Separable(width), nn.MaxPool2d(2), Separable(width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to 10 logits."""
        x = self.blocks(self.stem(images))
        return self.head(x.mean((2, 3)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of the model on images and labels."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build() -> dict[str, object]:
    """Model, optimizer, loss, and batches: one epoch each time they are iterated."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(images[:1536], labels[:1536])
    limit = int(os.environ.get("DIGITS_BATCHES", "48"))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(train, range(32 * limit)), 32, shuffle=True
    )
    model = Net()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "loss": loss,
        "batches": loader,
        "held_out": [(images[1536:], labels[1536:])],
    }
