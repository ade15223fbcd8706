"""A number format that no hardware has, tried in one file.

A 6-bit float is made up and followed through all that training does with numbers: what it can
hold, layers whose operands and accumulators use it, gradients summed in it over 8 nodes. At the
end stands a format that is not even a float: a table of 16 numbers.

    python examples/new_format.py        # half a minute
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import narrowgauge
from narrowgauge.gradients import EmulatedNodes
from narrowgauge.nn import LayerFormats, convert

# Three exponent bits as in e3m2, but all codes are numbers, and the bias is chosen so that the
# largest is 7: activations and weights seldom need more.
MINE = narrowgauge.FloatFormat(exponent_bits=3, mantissa_bits=2, bias=5, specials="finite")
# Accumulators need more bits; 10 of them, as no hardware has either.
SUMS = narrowgauge.FloatFormat(exponent_bits=5, mantissa_bits=4)
WAYS = {
    "float32": None,
    f"operands {MINE}": LayerFormats(weights=MINE, activations=MINE),
    f"operands {MINE}, sums {MINE}": LayerFormats(
        weights=MINE, activations=MINE, gradients="e5m2", accumulate=MINE,
        backward=narrowgauge.MatmulBackward(accumulate=SUMS),
    ),
    f"operands {MINE}, sums {SUMS}": LayerFormats(
        weights=MINE, activations=MINE, gradients="e5m2", accumulate=SUMS
    ),
    f"operands {MINE}, sums {SUMS}, Kahan": LayerFormats(
        weights=MINE, activations=MINE, gradients="e5m2", accumulate=SUMS, compensated=True
    ),
}  # fmt: skip


class FromTable(nn.Module):
    """Rounds to the nearest of any numbers at all; the gradient passes straight through."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.numbers = torch.tensor(sorted(numbers))
        self.borders = (self.numbers[1:] + self.numbers[:-1]) / 2

    def forward(self, x: Tensor) -> Tensor:
        """The nearest number for each element."""
        rounded = self.numbers[torch.bucketize(x.detach(), self.borders)]
        return x + (rounded - x).detach()


class Network(nn.Module):
    """Two layers, with a place to round what is between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.between = between or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.last(self.between(torch.relu(self.first(x))))


def train(model: nn.Module, steps: int, gradients: str) -> float:
    """Test accuracy after training as 8 nodes would that sum their gradients in a format."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    training, test = order[:1437], order[1437:]
    nodes = EmulatedNodes(model, 8, gradients, order="ring", scale="shared")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        for some in training[torch.randint(len(training), (128,))].view(8, 16):
            cross_entropy(model(images[some]), labels[some]).backward()
            nodes.collect()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model(images[test]).argmax(1) == labels[test]).float().mean())


def main() -> None:
    """Show what the format holds, and what it does to training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    console = Console()
    console.print(f"{MINE}: {MINE.bits} bits, {MINE.smallest:g} to {MINE.largest:g}, of which")
    console.print(", ".join(f"{x:g}" for x in MINE.values()[:32].tolist()))
    x = torch.tensor([0.3, 1.1, -2.6, 100.0])
    console.print(f"{x.tolist()} become {narrowgauge.quantize(x, MINE).tolist()}")
    packed = narrowgauge.encode(x, MINE)
    console.print(f"packed: {packed.numel()} bytes, {[f'{byte:08b}' for byte in packed.tolist()]}")

    table = Table("layers", "gradients, 8 nodes", "accuracy")
    for name, formats in WAYS.items():
        for gradients in ("fp32", MINE.name):
            torch.manual_seed(0)
            model = Network()
            if formats is not None:
                convert(model, formats)
            table.add_row(name, gradients, f"{train(model, steps, gradients):.1%}")
    torch.manual_seed(0)
    levels = [0.0, *(2.0 ** (i / 2) for i in range(-8, 7))]  # logarithms of 4 bits
    accuracy = train(Network(FromTable(levels)), steps, MINE.name)
    table.add_row("activations from a table of 16", MINE.name, f"{accuracy:.1%}")
    console.print(table)


if __name__ == "__main__":
    main()
