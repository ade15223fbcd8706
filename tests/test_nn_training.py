"""Rounded layers in training: compiled, checkpointed, distributed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from narrowgauge.nn import LayerFormats, MultiheadAttention, Quantizer, convert
from tests.ranks import run_ranks
from tests.test_nn_convert import MODELS, all_same, encoder_layer, everything

STORED = LayerFormats("e4m3", "e4m3", "e5m2")
SUMS = LayerFormats("e4m3", "e4m3", "e5m2", accumulate="bf16")
BLOCKS = LayerFormats("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e5m2")


class Classifier(nn.Module):
    """A body, and a head on the mean of what it gives."""

    def __init__(self, body: nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.body, self.channels_last = body, channels_last
        self.quantizer = Quantizer("e4m3", "e5m2")
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y.mean(1) if self.channels_last else y.mean((2, 3))
        result: Tensor = self.head(self.quantizer(y))
        return result


def classifier(make: Callable[[], nn.Module], formats: LayerFormats) -> Classifier:
    torch.manual_seed(0)
    return convert(Classifier(make(), make is encoder_layer), formats)


def losses(
    step: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, steps: int
) -> list[float]:
    torch.manual_seed(1)
    target = torch.arange(len(x)) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(step(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("make", "shape"), MODELS)
@pytest.mark.parametrize("formats", [STORED, SUMS, BLOCKS])
def test_the_loss_falls(
    make: Callable[[], nn.Module], shape: tuple[int, ...], formats: LayerFormats
) -> None:
    model = classifier(make, formats)
    x = torch.randn(6, *shape[1:])
    found = losses(model, model, x, 30)
    assert found[-1] < 0.6 * found[0], found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, about its internals
@pytest.mark.parametrize(("make", "shape"), MODELS)
@pytest.mark.parametrize("formats", [STORED, SUMS])
def test_compiled_it_gives_the_same_bits(
    make: Callable[[], nn.Module], shape: tuple[int, ...], formats: LayerFormats
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = convert(make(), formats), torch.randn(shape)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    assert all_same(everything(compiled, x), everything(model, x))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(compiled.eval()(x), model.eval()(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("formats", [STORED, SUMS])
def test_compiled_attention_takes_batches_of_any_size(formats: LayerFormats) -> None:
    torch._dynamo.reset()
    layer = MultiheadAttention(8, 2, batch_first=True, formats=formats)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    padding = torch.zeros(7, 5, dtype=torch.bool)
    padding[:, 3:] = True
    for batch in (2, 3, 7):
        x = torch.randn(batch, 5, 8)
        how = {"key_padding_mask": padding[:batch], "attn_mask": torch.zeros(5, 5)}
        assert torch.equal(compiled(x, x, x, **how)[0], layer(x, x, x, **how)[0])
        compiled(x, x, x)[0].sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(400)
def test_compiled_by_inductor_the_loss_falls() -> None:
    torch._dynamo.reset()
    make, shape = MODELS[0]
    model = classifier(make, SUMS)
    found = losses(torch.compile(model, fullgraph=True), model, torch.randn(6, *shape[1:]), 20)
    assert found[-1] < 0.8 * found[0], found


@pytest.mark.parametrize(("make", "shape"), MODELS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("formats", [STORED, SUMS, BLOCKS])
def test_checkpointing_gives_the_same_bits(
    make: Callable[[], nn.Module], shape: tuple[int, ...], reentrant: bool, formats: LayerFormats
) -> None:
    torch.manual_seed(0)
    model, x = convert(make(), formats).eval(), torch.randn(shape)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.model, x, use_reentrant=reentrant)
            return result

    expected = everything(model, x)
    assert all_same(everything(Checkpointed(), x), expected)


@pytest.mark.parametrize("rounding", ["nearest-even", "stochastic"])
def test_checkpointing_repeats_stochastic_rounding(rounding: str) -> None:
    """What is recomputed is rounded as it was, or gradients would belong to another output."""
    formats = LayerFormats("e2m1fn", "e2m1fn", rounding=rounding)
    model = convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), formats)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda *args: seen.append(args[2].detach()))
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=False)
    torch.manual_seed(5)
    out.sum().backward()
    assert torch.equal(seen[0], seen[1])


def train_on_ranks(which: int) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses of five steps; gradients of the rank's part alone, and as DDP makes them of all."""
    make, shape = MODELS[which]
    model = classifier(make, SUMS).eval()  # no dropout, no statistics of batches
    torch.manual_seed(2)
    batch = torch.randn(4, *shape[1:])
    part = batch.chunk(2)[torch.distributed.get_rank()]
    grads = []
    for each in (copy.deepcopy(model), DistributedDataParallel(model)):
        each(part).square().sum().backward()
        grads.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
    return losses(DistributedDataParallel(model), model, part, 5), *grads


@pytest.mark.parametrize("which", range(len(MODELS)), ids=["block", "encoder"])
def test_ddp_trains_converted_models(which: int) -> None:
    first, second = run_ranks(train_on_ranks, 2, which)
    assert all_same(first[2], second[2])
    assert all_same(first[2], [a / 2 + b / 2 for a, b in zip(first[1], second[1], strict=True)])
    assert first[0][-1] < first[0][0]
