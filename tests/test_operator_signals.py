"""What operators do to a step, judged in float32; steps that are made again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import OperatorPlan, quantize
from narrowgauge.operators import Recording, record_operators
from narrowgauge.operators.replay import ReplayError, StepTape
from narrowgauge.operators.shadow import Shadow
from narrowgauge.operators.signals import Judge, Signal, gradient_errors, narrowest

# --- signals -------------------------------------------------------------------------------------


def taped(model: nn.Module, loss: Any) -> StepTape:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tape = StepTape(model, optimizer)
    with tape:
        loss().backward()
    return tape


class Product(nn.Module):
    """The loss is (w · x)², so its gradient is 2 (w · x) x."""

    def __init__(self, weight: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(self.weight, x).sum().square()


def judged(model: nn.Module, x: Tensor, formats: dict[str, str]) -> tuple[Signal, Judge]:
    tape = taped(model, lambda: model(x))
    recording = record_operators(model, lambda: model(x))
    judge = Judge(model, tape, OperatorPlan.uniform(recording, "fp32"), [*set(formats.values())])
    return judge.signal(formats), judge


def test_a_signal_is_the_relative_error_of_gradient_and_loss() -> None:
    # e3m2 rounds 1.1 to 1.0 and keeps 2 and 3, so 1.1 · 2 + 1 · 3 = 5.2 becomes 5.
    signal, judge = judged(Product([1.1, 1.0]), torch.tensor([2.0, 3.0]), {"::mul#0": "e3m2"})
    assert judge.loss == pytest.approx(5.2**2)
    assert signal.loss_change == pytest.approx((5.2**2 - 5.0**2) / 5.2**2, rel=1e-5)
    assert signal.gradient_error == pytest.approx((5.2 - 5.0) / 5.2, rel=1e-5)
    assert (signal.overflow, signal.underflow) == (0, 0)
    assert not judge.usable or judge.gradients[0] is not None


def test_overflow_and_underflow_are_counted_and_infinite() -> None:
    x = torch.tensor([1e3, 1e-9, 2.0])
    signal, _ = judged(Product([100.0, 1.0, 1.0]), x, {"::mul#0": "fp16"})
    assert signal.overflow == 1  # the product 1e5
    assert signal.underflow == 2  # 1e-9, and its product
    assert signal.gradient_error == math.inf
    assert signal.loss_change == math.inf


def test_a_judge_leaves_the_training_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    tape = taped(model, lambda: model(x).sum())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    recording = record_operators(model, lambda: model(x).sum())
    judge = Judge(model, tape, OperatorPlan.uniform(recording, "fp32"))
    assert judge.signal({"0::linear#0": "bf16"}).gradient_error > 0
    assert judge.loss == tape.loss  # the same dropout
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for ours, p, made in zip(gradients, model.parameters(), judge.gradients, strict=True):
        assert p.grad is not None
        assert made is not None
        assert torch.equal(ours, p.grad)
        assert torch.equal(ours, made)


def test_a_step_without_a_gradient_judges_nothing() -> None:
    _, judge = judged(Product([0.0, 0.0]), torch.ones(2), {"::mul#0": "bf16"})
    assert not judge.usable


def test_errors_of_gradients_are_those_of_what_travels() -> None:
    gradient = torch.tensor([1.0, 1.1, -0.3])
    (errors,) = gradient_errors({"w": gradient}, ["e3m2", "bf16", "fp32"]).values()
    scaled = quantize(gradient * 8, "e3m2") / 8  # 1.1 · 8 is below the largest number, 14
    expected = (scaled - gradient).norm() / gradient.norm()
    assert errors["e3m2"] == pytest.approx(expected.item(), rel=1e-5)
    assert errors["fp32"] == 0
    assert 0 < errors["bf16"] < errors["e3m2"]
    assert gradient_errors({"w": torch.zeros(3)}, ["e3m2"]) == {"w": {"e3m2": 0.0}}
    with pytest.raises(ValueError, match="cannot travel between ranks"):
        gradient_errors({"w": gradient}, ["e8m20"])


def test_the_narrowest_format_within_the_bound_is_taken() -> None:
    errors = {
        "a": {"e3m0": 0.2, "e5m2": 0.05, "bf16": 0.002},
        "b": {"e3m0": 0.09, "e5m2": 0.05, "bf16": 0.002},
        "c": {"e3m0": 0.9, "e5m2": 0.5, "bf16": 0.2},
    }
    found = narrowest(errors, ["bf16", "e5m2", "e3m0"], 0.1)
    assert found == {"a": "e5m2", "b": "e3m0", "c": "fp32"}


# --- steps made again ----------------------------------------------------------------------------


def loops() -> Iterator[tuple[str, Any]]:
    def plain(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def clipped(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
        loss = F.mse_loss(model(x * 2), x[:, :1]) + 0.1 * model(x).abs().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def scaled(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    total = torch.zeros(1)

    def logged(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
        loss = model(x).square().mean()
        nonlocal total
        total += loss.detach()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()

    yield from {"plain": plain, "clipped": clipped, "scaled": scaled, "logged": logged}.items()


@pytest.mark.parametrize(("kind", "loop"), list(loops()))
@pytest.mark.parametrize("fused", [False, True])
def test_a_shadow_trains_as_the_training_does(kind: str, loop: Any, fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    loop(model, optimizer, scaler, torch.randn(8, 4))  # the optimizer's state is there
    shadow = Shadow(model, optimizer)
    for _ in range(5):
        tape = StepTape(model, optimizer)
        with tape:
            loop(model, optimizer, scaler, torch.randn(8, 4))
        assert tape.stepped
        assert tape.scaled == (kind == "scaled")
        with shadow.in_place():
            assert tape.step_again() == tape.loss
    ours = {name: value.clone() for name, value in model.state_dict().items()}
    shadow.exchange()
    for name, value in model.state_dict().items():
        assert torch.equal(ours[name], value), name


def test_a_step_that_cannot_be_made_again_says_why() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepTape(model, optimizer) as tape:
        model(torch.ones(1, 2))
    with pytest.raises(ReplayError, match=r"the step ended without loss\.backward\(\)"):
        tape.check()
    outside = model(torch.ones(1, 2))
    with (
        pytest.raises(
            ReplayError, match=r"of shape \(1, 1\) and AddmmBackward0 comes from outside"
        ),
        StepTape(model, optimizer),
    ):
        outside.sum().backward()


@dataclass
class Output:
    """What a model may return: a type that torch knows nothing of."""

    logits: Tensor


class InParts(nn.Module):
    """Two parts that the loop calls by themselves, and an output that is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Output:
        return Output(self.decoder(self.encoder(x).relu()))


def test_a_shadow_has_all_that_the_optimizers_of_the_step_train() -> None:
    torch.manual_seed(0)
    model, scale = InParts(), nn.Parameter(torch.ones(1))  # of the loss, not of the model
    optimizers = [
        torch.optim.SGD([*model.encoder.parameters(), scale], 0.1, momentum=0.9),
        torch.optim.Adam(model.decoder.parameters(), 0.01),
    ]
    shadow = Shadow(model, *optimizers)
    for _ in range(3):
        tape = StepTape(model, *optimizers)
        with tape:
            (model(torch.randn(8, 4)).logits * scale - 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with shadow.in_place():
            assert tape.step_again() == tape.loss
    trained = [*model.parameters(), scale]
    ours = [p.detach().clone() for p in trained]
    shadow.exchange()
    for p, our in zip(trained, ours, strict=True):
        assert torch.equal(p, our)


def by_hand(kind: str, p: nn.Parameter) -> None:
    """What a loop may do to a parameter besides its optimizer, such as clipping weights."""
    with torch.no_grad():
        if kind == "itself":
            p.clamp_(-0.05, 0.05)
        elif kind == "data":
            p.data.mul_(0.9)
        elif kind == "new data":
            p.data = p.data.clamp(-0.05, 0.05)
        elif kind == "view":
            p[:1].div_(p.norm())
        else:
            p[:1] = 0.1


@pytest.mark.parametrize("kind", ["itself", "data", "new data", "view", "item"])
@pytest.mark.parametrize("early", [False, True])
def test_a_shadow_follows_what_the_loop_does_to_parameters_by_hand(kind: str, early: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shadow = Shadow(model, optimizer)
    for _ in range(4):
        tape = StepTape(model, optimizer)
        with tape:
            if early:
                by_hand(kind, model.weight)
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not early:
                by_hand(kind, model.weight)
        weight = model.weight.detach().clone()
        tape.gradients()
        assert torch.equal(model.weight, weight)  # they are made again, the writing is not
        with shadow.in_place():
            tape.step_again()
    shadow.exchange()
    assert torch.equal(model.weight, weight)


def test_parts_of_the_model_that_the_loop_calls_have_the_names_of_a_plan() -> None:
    model = InParts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> Tensor:
        return model.decoder(model.encoder(torch.ones(2, 4)).relu()).square().mean()

    tape = StepTape(model, optimizer)
    with tape:
        run().backward()
    recording = Recording()
    tape.gradients(lambda: OperatorPlan({}).applied(model, mismatch="ignore", recording=recording))
    assert recording.names == record_operators(model, run).names
    assert recording.names[0] == "encoder::linear#0"


class Doubled(torch.autograd.Function):
    """What only its author knows the gradient of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 7


def test_an_autograd_function_in_the_loss_is_refused_and_in_the_model_is_not() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(super().forward(x))  # type: ignore[no-untyped-call,no-any-return]

    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(1, 2)
    with (
        pytest.raises(ReplayError, match=r"DoubledBackward comes from .* autograd\.Function"),
        StepTape(model, optimizer),
    ):
        Doubled.apply(model(x)).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    tape = StepTape(model, optimizer)
    with tape:
        model(x).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 2), 7.0))
    found = tape.gradients()[1][0]
    assert found is not None
    assert torch.equal(found, model.weight.grad)


def test_a_step_of_another_kind_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.Adam(model.parameters())
    for step, message in (
        (lambda: other.step(), r"another optimizer, Adam; pass it to OperatorSearch\(…, stateful="),
        (lambda: optimizer.step(lambda: 1.0), "SGD.step was given a closure"),
        (
            lambda: model(torch.ones(2, 2)).backward(torch.ones(2, 1)),
            r"of shape \(2, 1\); the loss",
        ),
    ):
        with pytest.raises(ReplayError, match=message), StepTape(model, optimizer):
            step()


def test_between_steps_the_loop_may_zero_gradients_and_nothing_else() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shadow = Shadow(model, optimizer)
    for set_to_none in (True, False):
        for exchanged in (False, True):  # on both
            with shadow.in_place() if exchanged else contextlib.nullcontext():
                model(torch.ones(2, 2)).sum().backward()
        shadow.leave()
        optimizer.zero_grad(set_to_none)
        shadow.follow()
        with shadow.in_place():
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    shadow.leave()
    optimizer.step()
    with pytest.raises(ReplayError, match=r"a parameter of shape \(1, 2\) was changed between"):
        shadow.follow()
    shadow.leave()
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(ReplayError, match=r"a gradient of shape \(1, 2\) was changed between"):
        shadow.follow()
