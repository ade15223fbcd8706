"""Plans applied to unmodified models: what torch.autocast does, what nothing else reaches."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import OperatorPlan, quantize
from narrowgauge.operators import Recording, detach, record_operators
from tests.operator_models import (
    Blocks,
    Residual,
    Standard,
    blocks_batch,
    recorded,
    standard_batch,
)
from tests.ranks import run_ranks

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._forward_hooks_always_called,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
        )
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def planned_step(
    model: nn.Module,
    plan: OperatorPlan | None,
    x: Tensor,
    y: Tensor,
    called: nn.Module | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step; ``called`` is what is called, if it is not the model."""
    model.zero_grad()
    with plan.applied(model) if plan else nullcontext():
        loss = F.cross_entropy((model if called is None else called)(x).float(), y)
    loss.backward()
    return loss.item(), gradients(model)


def blocks_plan(model: nn.Module, format: str = "bf16") -> OperatorPlan:
    x, y = blocks_batch()
    recording = record_operators(model, lambda: F.cross_entropy(model(x).float(), y))
    return OperatorPlan.uniform(recording, format)


# --- what torch.autocast does


def standard_losses(
    dtype: torch.dtype, around: Callable[[nn.Module], AbstractContextManager[object]]
) -> list[float]:
    """Losses of steps of SGD within ``around(model)``; GradScaler if the dtype is float16."""
    torch.manual_seed(0)
    model = Standard()
    images, words, labels = standard_batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=256.0)
    losses = []
    for _ in range(4):
        with around(model):
            logits, inner = model(images, words)
            loss = F.cross_entropy(logits, labels) + inner
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def standard_plan(dtype: torch.dtype) -> OperatorPlan:
    model = Standard()
    images, words, labels = standard_batch()

    def run() -> Tensor:
        logits, inner = model(images, words)
        return F.cross_entropy(logits, labels) + inner

    return OperatorPlan.from_autocast_rules(record_operators(model, run), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rules_of_autocast_as_a_plan_train_with_its_losses_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    plan = standard_plan(dtype)
    ours = standard_losses(dtype, plan.applied)
    theirs = standard_losses(dtype, lambda _: torch.autocast("cpu", dtype))
    assert ours == theirs
    assert ours != standard_losses(torch.float32, lambda _: nullcontext())


def test_steps_of_gradscaler_within_the_block_are_no_operators_of_the_model() -> None:
    model = Residual()
    plan = OperatorPlan.uniform(recorded(model, X), "fp16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.fc.weight.clone()
    with plan.applied(model):
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model.fc.weight, before)


def test_a_compiled_model_is_recorded_as_the_one_inside() -> None:
    model = Blocks()
    x, y = blocks_batch()
    compiled = torch.compile(model, backend="aot_eager")
    found = record_operators(model, lambda: F.cross_entropy(compiled(x).float(), y))
    assert found.names == list(blocks_plan(model).names)


def test_a_plan_counts_inside_autocast() -> None:
    model = Residual()
    plan = OperatorPlan.uniform(recorded(model, X), "fp32")
    with torch.autocast("cpu", torch.bfloat16), plan.applied(model):
        assert model(X).dtype == torch.float32


# --- the model stays as it is


def test_a_plan_leaves_state_dict_pickle_and_hooks_as_they_were() -> None:
    model = Blocks()
    keys, hooks = list(model.state_dict()), hooks_of(model)
    handle = blocks_plan(model).attach(model)
    assert list(model.state_dict()) == keys
    x, _ = blocks_batch()
    copied = copy.deepcopy(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert model(x).dtype == torch.bfloat16
    assert copied(x).dtype == loaded(x).dtype == torch.float32  # copies are plain models
    handle.remove()
    handle.remove()
    assert hooks_of(model) == hooks
    assert model(x).dtype == torch.float32


def test_functional_operators_and_losses_follow_the_plan() -> None:
    model = Residual()
    run = lambda: F.mse_loss(model(X), X)  # noqa: E731
    names = {"fc::linear#0", "::relu#0", "::add#0", "::mse_loss#0"}
    plan = OperatorPlan.uniform(record_operators(model, run), "fp32")
    assert set(plan.names) == names
    for name in names:
        with plan.with_formats({name: "bf16"}).applied(model, recording=(seen := Recording())):
            run()
        outputs = {call.name: call.outputs[0].dtype for call in seen}
        assert {n for n, dtype in outputs.items() if dtype is torch.bfloat16} == {name}


def test_a_plan_that_is_attached_covers_the_forward_and_not_the_loss() -> None:
    model = Residual()
    plan = OperatorPlan.uniform(record_operators(model, lambda: F.mse_loss(model(X), X)), "bf16")
    handle = plan.attach(model)
    output = model(X)
    assert output.dtype == torch.bfloat16
    assert F.mse_loss(output.float(), X).dtype == torch.float32
    handle.use(plan.with_formats({"::add#0": "fp32"}))
    assert model(X).dtype == torch.float32
    detach(model)
    with pytest.raises(RuntimeError, match="the plan was removed from the model; attach one again"):
        handle.use(plan)


def test_two_plans_on_one_model_are_an_error_that_says_how_to_change_plans() -> None:
    model = nn.Sequential(Residual())
    plan = OperatorPlan.uniform(recorded(model, X), "bf16")
    with plan.applied(model), pytest.raises(RuntimeError, match=r"follows a plan already; leave"):
        plan.attach(model)
    handle = plan.attach(model)
    with pytest.raises(RuntimeError, match=r"call \.remove\(\) of what attach returned, or "):
        OperatorPlan({}).attach(model[0], mismatch="ignore")
    handle.remove()


def test_a_block_that_was_left_changes_no_plan_of_others() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plan = OperatorPlan.uniform(record_operators(model, lambda: model(x)), "bf16")
    with plan.applied(model) as applied:
        applied.use(plan.with_formats({"::linear#0": "fp16"}))
        assert model(x).dtype is torch.float16
    attached = plan.attach(model)
    with pytest.raises(RuntimeError, match="block is not entered"):
        applied.use(plan.with_formats({"::linear#0": "fp32"}))
    assert model(x).dtype is torch.bfloat16
    attached.remove()


def test_an_exception_inside_leaves_nothing_behind() -> None:
    class Failing(Residual):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.fails:
                raise KeyboardInterrupt
            return x

    model = Failing()
    plan = OperatorPlan.uniform(recorded(model, X), "bf16")
    hooks, model.fails = hooks_of(model), True
    handle = plan.attach(model)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.fails = False
    assert model(X).dtype == torch.bfloat16  # and names begin anew
    assert F.linear(X, model.fc.weight).dtype == torch.float32
    model.fails = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert not torch.overrides._get_current_function_mode_stack()
    with pytest.raises(KeyboardInterrupt), plan.applied(model):
        model(X)
    model.fails = False
    assert hooks_of(model) == hooks
    assert model(X).dtype == torch.float32


def test_another_model_and_another_thread_do_not_follow() -> None:
    model, other = Residual(), Residual()
    plan = OperatorPlan.uniform(recorded(model, X), "bf16")
    seen = []

    def elsewhere() -> None:
        seen.append(other(X).dtype)

    handle = plan.attach(model)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert model(X).dtype == torch.bfloat16
    assert other(X).dtype == torch.float32
    handle.remove()
    assert seen == [torch.float32]


# --- how models are used


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_follows_the_plan_of_training(mode: type[torch.no_grad]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    recording = recorded(model, X)
    plan = OperatorPlan.from_autocast_rules(recording, "bf16")
    model.eval()
    with plan.applied(model), mode():
        ours = model(X)
        ours = model(X)  # parameters that were cast before are still good
    with torch.autocast("cpu", torch.bfloat16), mode():
        assert torch.equal(ours, model(X))
    model.train()
    with plan.applied(model):
        assert model(X).requires_grad  # casts of inference do not stay


def test_a_parameter_that_changes_is_cast_anew() -> None:
    model = Residual()
    plan = OperatorPlan.uniform(recorded(model, X), "bf16")
    with plan.applied(model):
        before = model(X)
        with torch.no_grad():
            model.fc.weight.mul_(2.0)
        after = model(X)
    assert not torch.equal(before, after)


def test_shared_weights_and_modules_called_again_get_gradients_summed_in_float32() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(self.first(x)))

    model = Shared()
    recording = recorded(model, X)
    assert recording.names == [
        "first::linear#0", "second::linear#0", "first::linear#1", "::sum#0",
    ]  # fmt: skip
    plan = OperatorPlan.uniform(recording, "fp32").with_formats(
        dict.fromkeys(recording.names[:3], "bf16")
    )
    with plan.applied(model):
        model(X).sum().backward()
    weight = model.first.weight.detach()
    parts = [weight.bfloat16().requires_grad_() for _ in range(3)]
    h = X.bfloat16()
    for part in parts:
        h = F.linear(h, part)
    h.float().sum().backward()
    summed = torch.stack([part.grad.float() for part in parts])  # type: ignore[union-attr]
    got = model.first.weight.grad
    assert got is not None
    assert got.dtype is torch.float32
    # In some order of three float32 sums; a sum in bf16 would be off by 2**-9 of its size.
    assert torch.allclose(got, summed.sum(0), rtol=1e-6, atol=1e-6)


# --- simulated formats


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8", "e3m5"])
def test_operands_and_result_are_rounded_as_quantize_does(format: str) -> None:
    model = Residual()
    plan = OperatorPlan.uniform(recorded(model, X), "fp32").with_formats({"fc::linear#0": format})
    weight, bias = model.fc.weight.detach(), model.fc.bias.detach()
    linear = F.linear(*(quantize(x, format) for x in (X, weight, bias)))
    expected = X + F.relu(quantize(linear, format))
    with plan.applied(model):
        assert torch.equal(model(X), expected)


def test_a_pair_rounds_numbers_to_the_first_and_gradients_to_the_second_format() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    plan = OperatorPlan.uniform(recorded(model, X), "fp32")
    x = X.clone().requires_grad_()
    with plan.with_formats({"0::linear#0": "e4m3/e5m2"}).applied(model):
        output = model(x)
    narrow_x, narrow_w = quantize(X, "e4m3"), quantize(model[0].weight.detach(), "e4m3")
    assert torch.equal(output, quantize(narrow_x @ narrow_w.t(), "e4m3"))
    incoming = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    output.backward(incoming)
    gradient = quantize(incoming, "e5m2")
    assert x.grad is not None
    assert torch.equal(x.grad, quantize(gradient @ narrow_w, "e5m2"))
    assert torch.equal(model[0].weight.grad, quantize(gradient.t() @ narrow_x, "e5m2"))


def test_an_operator_that_writes_into_its_input_can_be_rounded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    recording = recorded(model, X)
    assert recording.names[1] == "1::relu_#0"
    plan = OperatorPlan.uniform(recording, "fp32").with_formats({"1::relu_#0": "e4m3"})
    expected = F.relu(quantize(model[0](X), "e4m3"))
    with plan.applied(model):
        assert torch.equal(model(X), expected)


# --- activation checkpoints


@pytest.mark.parametrize("format", ["bf16", "e4m3/e5m2"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("closure", [False, True])
def test_checkpoints_are_recomputed_in_the_same_formats(
    reentrant: bool, closure: bool, format: str
) -> None:
    x, y = blocks_batch()
    plain = Blocks(None, closure)
    plan = blocks_plan(plain, format)
    expected = planned_step(plain, plan, x, y)
    checkpointed = Blocks(reentrant, closure)
    hooks = hooks_of(checkpointed)
    assert blocks_plan(checkpointed, format).names == plan.names
    loss, found = planned_step(checkpointed, plan, x, y)  # backward runs outside of the block
    assert loss == expected[0]
    assert equal(found, expected[1])
    assert hooks_of(checkpointed) == hooks


# --- torch.compile


# Dynamo looks at .grad of a module's output where it goes on after a hook, and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_has_the_same_names_and_gradients_and_is_compiled_once() -> None:
    x, y = blocks_batch()
    x = x.detach()
    model = Blocks()
    plan = blocks_plan(model, "fp32").with_formats(
        {
            "blocks.0.attention::linear#0": "bf16",
            "blocks.1::add#1": "bf16",
            "head::linear#0": "bf16",
        }
    )
    loss, expected = planned_step(model, plan, x, y)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        again, found = planned_step(model, plan, x, y, compiled)
        assert again == loss
        assert equal(found, expected)
    assert counter.frame_count == 1
    plain, _ = planned_step(model, None, x, y)
    unplanned, _ = planned_step(model, None, x, y, compiled)  # the plan is not compiled in
    assert unplanned == plain != loss


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    x, y = blocks_batch()
    return (x.detach() * (rank + 1)).requires_grad_(), (y + rank) % 4


def ddp_step() -> tuple[list[str], dict[str, Tensor]]:
    torch.set_num_threads(1)
    x, y = batch_of(dist.get_rank())
    model = Blocks()
    wrapped = nn.parallel.DistributedDataParallel(model)
    plan = blocks_plan(model)
    with plan.applied(wrapped):
        loss = F.cross_entropy(wrapped(x).float(), y)
    loss.backward()
    return list(plan.names), gradients(model)


def test_ddp_has_the_same_names_and_averages_the_gradients_of_the_plan() -> None:
    plan = blocks_plan(Blocks())
    first, second = (planned_step(Blocks(), plan, *batch_of(rank))[1] for rank in (0, 1))
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    for names, found in run_ranks(ddp_step, 2):
        assert tuple(names) == plan.names
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[k], expected[k], rtol=1e-5, atol=1e-6) for k in found)


@pytest.mark.parametrize("format", ["e5m2", "e4m3/e5m2"])
def test_simulated_formats_under_torch_func_are_refused_by_name(format: str) -> None:
    model = nn.Linear(4, 2)
    plan = OperatorPlan.uniform(recorded(model, X), format)

    def loss(weight: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"weight": weight}, (X,)).sum()

    plan.attach(model)
    with pytest.raises(RuntimeError, match=f"in {format} was called under torch.func"):
        torch.func.grad(loss)(model.weight.detach())
