"""Small networks whose operators are named, planned and recorded in tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.operators import Recording, record_operators


class Standard(nn.Module):
    """One of each of torch's standard layers, and the functions that models use between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.groups = nn.GroupNorm(4, 16)
        self.prelu = nn.PReLU()
        self.up = nn.ConvTranspose2d(16, 16, 2)
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.words = nn.Embedding(10, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.layer_norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and a loss computed inside the model."""
        h = self.relu(self.norm(self.conv(images)))
        h = h + self.prelu(self.groups(self.depthwise(h)))
        h = F.pad(self.pool(self.up(h)), (1, 1, 1, 1), mode="reflect")
        pooled = self.average(h).flatten(1)
        z = torch.cat([h.flatten(2).transpose(1, 2), self.words(words)], 1)
        z = self.encoder(z)
        z = z + self.attention(z, z, z)[0]
        z = self.layer_norm(F.gelu(F.softmax(z @ z.transpose(1, 2) / 4.0, -1) @ z) + z)
        o = F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None]).squeeze(1)
        return self.head(self.dropout(o.mean(1) + pooled)), F.mse_loss(o, z)


def standard_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Images, words and labels."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(4, 3, 16, 16, generator=generator),
        torch.randint(0, 10, (4, 5), generator=generator),
        torch.randint(0, 10, (4,), generator=generator),
    )


class Block(nn.Module):
    """Attention and a small network, each with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide, self.narrow, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and something more."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.narrow(F.relu(self.wide(x))))


class Blocks(nn.Module):
    """Two blocks, the first of which is called again at the end; parts may be checkpointed."""

    def __init__(self, reentrant: bool | None = None, closure: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)
        self.reentrant, self.closure = reentrant, closure

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for block in self.blocks:
            part: Callable[[Tensor], Tensor] = block
            if self.closure:

                def part(x: Tensor, block: nn.Module = block) -> Tensor:
                    return F.softmax(block(x) * 2.0 + x, -1)

            if self.reentrant is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(self.blocks[0](x)).mean(1)


def blocks_batch() -> tuple[Tensor, Tensor]:
    """Input that requires grad, as reentrant checkpoints need it, and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 8, generator=generator).requires_grad_()
    return x, torch.randint(0, 4, (3,), generator=generator)


class Residual(nn.Module):
    """The smallest model with an operator that no module names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` plus its image."""
        return x + F.relu(self.fc(x))


def recorded(model: nn.Module, *inputs: Tensor) -> Recording:
    """The operators of a forward whose outputs are summed."""
    return record_operators(model, lambda: model(*inputs).sum())
