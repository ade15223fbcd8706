"""Formats in space and time, error feedback, and what else the hook promises around them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge
from narrowgauge.collectives.link import Link, message_bytes_for
from narrowgauge.gradients import Hybrid, Schedule, parameter_formats
from tests.ranks import Raised, run_ranks

compress = partial(narrowgauge.gradients.compress, adapt=False)

SLOW = Link(1e-4, 1e6, 1e9, 1e-4, 1e6)
FAST = Link(1e-4, 1e9, 1e9, 1e-5, 1e11)


class Network(nn.Module):
    """Two layers, of which the last is called ``fc``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 30), nn.ReLU())
        self.fc = nn.Linear(30, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(self.body(x))
        return result


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return (model(data(dist.get_rank(), step)) ** 2).mean()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_gradients(step: int, world_size: int) -> list[torch.Tensor]:
    """What float32 DDP gives, made in one process."""
    network = Network()
    for rank in range(world_size):
        ((network(data(rank, step)) ** 2).mean() / world_size).backward()
    return gradients_of(network)


# -- patterns and schedules ------------------------------------------------------------------------


def test_patterns_give_each_parameter_the_first_format_that_matches() -> None:
    names = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
    formats = parameter_formats(names, {"fc": "fp32", "*.bias": "bf16", "*": "e4m3"})
    assert [formats[name].name for name in names] == ["e4m3", "bf16", "fp32", "fp32"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: parameter_formats(["a", "b"], {"a": "e5m2"}), ValueError, "no format for 'b'"),
        (lambda: parameter_formats(["a"], {"x": "e5m2", "*": "e4m3"}), ValueError, "names 'x'"),
        (lambda: parameter_formats(["a"], {0: "e5m2"}), TypeError, "has the key 0, which is int"),  # type: ignore[dict-item]
        (lambda: parameter_formats(["a"], "e5m2", ["a"]), TypeError, "keep is list"),  # type: ignore[call-overload]
        (lambda: Schedule({3: "e5m2"}), ValueError, "one must begin at 0"),
        (lambda: Schedule({0: "fp32", -1: "e5m2"}), ValueError, "whole numbers from 0"),
        (lambda: Schedule({0: "fp32"}, "batch"), ValueError, "allowed: 'step', 'epoch'"),  # type: ignore[arg-type]
        (lambda: Hybrid([]), ValueError, "pass at least one"),
        (lambda: Hybrid("e5m2"), ValueError, "in a list"),
        (lambda: Hybrid(bound=0), ValueError, "it must be positive"),
        (lambda: Hybrid(every=0), ValueError, "a number of steps from 1"),
    ],
)
def test_bad_policies_are_refused_by_name(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def scheduled(unit: Any) -> list[list[str]]:
    model = DistributedDataParallel(Network())
    stages = {0: "fp32", 2: {"fc": "bf16", "*": "e4m3"}}
    compression = compress(model, Schedule(stages, unit))
    seen = []
    for step in range(4):
        compression.set_epoch(step)
        loss_of(model, step).backward()
        seen.append([format.name for format in compression.formats.values()])
    assert compression.ledger.entries[0].bytes_sent > 3 * compression.ledger.entries[3].bytes_sent
    return seen


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_schedules_change_the_formats_on_time(unit: str) -> None:
    for seen in run_ranks(scheduled, 2, unit):
        assert seen[:2] == [["fp32"] * 6] * 2
        assert seen[2:] == [["e4m3"] * 4 + ["bf16"] * 2] * 2


def measured(bound: float) -> list[list[str]]:
    model = DistributedDataParallel(Network())
    hybrid = Hybrid(["fp32", "int4", "e4m3", "bf16"], bound=bound, every=2)
    compression = compress(model, hybrid, keep={"fc.bias": "fp32"})
    seen = []
    for step in range(3):
        loss_of(model, step).backward()
        seen.append([format.name for format in compression.formats.values()])
    return seen


@pytest.mark.parametrize(("bound", "wanted"), [(1.0, "int4"), (0.003, "bf16"), (1e-9, "fp32")])
def test_the_narrowest_format_within_the_bound_is_chosen_alike_on_all_ranks(
    bound: float, wanted: str
) -> None:
    first, second = run_ranks(measured, 2, bound)
    assert first == second
    assert first[0] == [wanted] * 5 + ["fp32"]


# -- error feedback --------------------------------------------------------------------------------


def fed_back(format: str, feedback: bool, steps: int) -> list[torch.Tensor]:
    """Sum of the averaged gradients of one and the same batch over many steps."""
    model = DistributedDataParallel(Network())
    compress(model, format, error_feedback=feedback)
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, 0).backward()
        total = [t + g for t, g in zip(total, gradients_of(model), strict=True)]
    return total


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("format", ["e2m1fn", "e3m0", "int4", "e2m1fn@32", "int4@16"])
def test_error_feedback_loses_nothing_over_time(format: str, world_size: int) -> None:
    steps = 40
    exact = mean_gradients(0, world_size)
    with_feedback, without = (
        run_ranks(fed_back, world_size, format, feedback, steps) for feedback in (True, False)
    )
    for gradients in with_feedback:
        for own, first in zip(gradients, with_feedback[0], strict=True):
            assert own.equal(first)

    def error(gradients: list[torch.Tensor]) -> float:
        lost = [(g / steps - e).norm() / e.norm() for g, e in zip(gradients, exact, strict=True)]
        return float(torch.stack(lost).max())

    assert error(with_feedback[0]) < 0.25 * error(without[0])
    assert error(with_feedback[0]) < 0.05


def overflow_once() -> list[torch.Tensor]:
    model = DistributedDataParallel(Network())
    compress(model, "int4@16", error_feedback=True)
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, step)
        (loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss).backward()
        if step == 1:
            assert not all(g.isfinite().all() for g in gradients_of(model))
    return gradients_of(model)


def test_residuals_outlive_a_step_that_is_not_finite() -> None:
    for gradients in run_ranks(overflow_once, 2):
        assert all(gradient.isfinite().all() for gradient in gradients)


def train(model: nn.Module, begin: int, end: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def save_and_go_on(path: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(Network())
    hybrid = Hybrid(["int4@16", "e4m3"], bound=0.5, every=3)
    compression = compress(model, hybrid, error_feedback=True)
    train(model, 0, 4)
    with pytest.raises(RuntimeError, match=r"call consolidate_state_dict\(\) on every rank"):
        compression.state_dict()
    compression.consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save([model.module.state_dict(), compression.state_dict()], path)
    train(model, 4, 8)
    return [p.detach().clone() for p in model.parameters()]


def resume(path: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(Network())
    hybrid = Hybrid(["int4@16", "e4m3"], bound=0.5, every=3)
    compression = compress(model, hybrid, error_feedback=True)
    state, compression_state = torch.load(path)
    model.module.load_state_dict(state)
    compression.load_state_dict(compression_state)
    train(model, 4, 8)
    return [p.detach().clone() for p in model.parameters()]


def test_a_resumed_training_has_the_bits_of_the_uninterrupted_one(tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint.pt")
    went_on = run_ranks(save_and_go_on, 2, path)[0]
    for resumed in run_ranks(resume, 2, path):
        for own, theirs in zip(resumed, went_on, strict=True):
            assert own.equal(theirs)


def residual_mean(path: str, save: bool) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(Network())
    compression = compress(model, "int4@16", error_feedback=True)
    if save:
        train(model, 0, 3)
        compression.consolidate_state_dict()
        state = compression.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, path)
        return state["residuals"]  # type: ignore[no-any-return]
    compression.load_state_dict(torch.load(path))
    compression.consolidate_state_dict()
    return compression.state_dict()["residuals"]  # type: ignore[no-any-return]


def test_residuals_keep_their_mean_when_the_world_size_changes(tmp_path: Any) -> None:
    path = str(tmp_path / "state.pt")
    saved = run_ranks(residual_mean, 2, path, True)[0]
    assert any(residual.any() for residual in saved.values())
    for loaded in run_ranks(residual_mean, 3, path, False):
        for name, residual in loaded.items():
            torch.testing.assert_close(residual, saved[name])


def load_other_states() -> list[str]:
    model = DistributedDataParallel(Network())
    plain, feeding = (
        compress(model, "int4", error_feedback=feedback, register=False)
        for feedback in (False, True)
    )
    feeding.consolidate_state_dict()
    state = feeding.state_dict()
    texts = []
    for compression, loaded in (
        (plain, state),
        (feeding, plain.state_dict()),
        (feeding, {**state, "residuals": {"fc.weight": torch.zeros(3)}}),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011, the text is looked at below
            compression.load_state_dict(loaded)
        texts.append(str(error.value))
    return texts


def test_states_of_another_compression_are_refused_by_name() -> None:
    for texts in run_ranks(load_other_states, 2):
        assert "error_feedback=False; attach it as it was" in texts[0]
        assert "error_feedback=True; attach it as it was" in texts[1]
        assert "residuals are of other parameters than the model's, first 'body.0" in texts[2]


# -- adapting --------------------------------------------------------------------------------------


def adapted(link: Link) -> tuple[int, list[str]]:
    model = DistributedDataParallel(Network())
    compression = narrowgauge.gradients.compress(model, "e4m3", link=link)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(model, step).backward()
    texts = [str(warning.message) for warning in caught]
    return compression.ledger.entries[-1].bytes_sent, [t for t in texts if "sent in float32" in t]


def test_a_format_that_does_not_pay_gives_way_to_float32_and_it_is_said_once() -> None:
    numel = sum(parameter.numel() for parameter in Network().parameters())
    for rank, (sent, texts) in enumerate(run_ranks(adapted, 2, FAST)):
        assert sent >= 4 * numel
        assert len(texts) == (1 if rank == 0 else 0)
        if rank == 0:
            assert f"{numel:,} numbers are sent in float32: they take" in texts[0]
    for sent, texts in run_ranks(adapted, 2, SLOW):
        assert numel <= sent < 1.1 * numel
        assert not texts


def measures_the_link() -> Link | None:
    model = DistributedDataParallel(Network())
    compression = narrowgauge.gradients.compress(model, "e4m3")
    loss_of(model, 0).backward()
    return compression.link


def test_the_link_is_measured_when_attached_and_equal_on_all_ranks() -> None:
    first, second = run_ranks(measures_the_link, 2)
    assert isinstance(first, Link)
    assert first == second


def all_reduced_adapting() -> tuple[list[float], int]:
    tensors = [torch.full((1000,), float(dist.get_rank())), torch.ones(3)]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        narrowgauge.all_reduce(tensors, "e5m2", adapt=True)
    tensor = torch.full((3,), 1 + dist.get_rank() * 2.0**-10)
    narrowgauge.all_reduce(tensor, "e5m2")  # does not adapt: 1 + 2**-11 is no e5m2
    return [tensors[0][0].item(), tensor[0].item()], len(tensors)


def test_a_plain_all_reduce_adapts_when_asked_only() -> None:
    for numbers, _ in run_ranks(all_reduced_adapting, 2):
        assert numbers == [0.5, 1.0]


@pytest.mark.parametrize(
    ("bytes_per_second", "size"),
    [(1e6, 1 << 19), (125e6, 1 << 19), (250e6, 1 << 20), (1.25e9, 1 << 21), (1e11, 1 << 21)],
)
def test_messages_grow_with_the_bandwidth(bytes_per_second: float, size: int) -> None:
    assert message_bytes_for(Link(1e-4, bytes_per_second, 1e9, 1e-4, 1e9)) == size


# -- around the hook -------------------------------------------------------------------------------


def chained() -> tuple[list[int], list[torch.Tensor]]:
    model = DistributedDataParallel(Network())
    compression = compress(model, "bf16", register=False)
    seen: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        seen.append(bucket.buffer().numel())

        def double(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return future.value().mul_(2)

        return compression.hook(state, bucket).then(double)

    hook.__annotations__ = {
        "bucket": dist.GradBucket,  # type: ignore[attr-defined]
        "return": torch.futures.Future[torch.Tensor],
    }
    model.register_comm_hook(None, hook)
    loss_of(model, 0).backward()
    return seen, gradients_of(model)


def test_a_hook_of_the_users_own_can_call_ours() -> None:
    for seen, gradients in run_ranks(chained, 2):
        assert seen == [sum(parameter.numel() for parameter in Network().parameters())]
        for own, exact in zip(gradients, mean_gradients(0, 2), strict=True):
            torch.testing.assert_close(own, 2 * exact, rtol=0.02, atol=1e-4)


def disturbed() -> None:
    model = DistributedDataParallel(Network())
    compress(model, "e4m3", check_every=1)
    train(model, 0, 2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.body[2].bias[3] += 1e-6
    loss_of(model, 2).backward()


def test_a_parameter_that_differs_between_ranks_is_named_on_all() -> None:
    for result in run_ranks(disturbed, 2, catch=True):
        assert isinstance(result, Raised)
        assert "parameter 'body.2.bias' has other bits on rank 1 than on rank 0" in result.message


def scaled_and_clipped() -> tuple[list[float], list[torch.Tensor]]:
    model = DistributedDataParallel(Network())
    compress(model, "e5m2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in model.parameters()]


def test_gradient_scalers_skip_a_step_on_all_ranks_alike() -> None:
    (scales, parameters), other = run_ranks(scaled_and_clipped, 2)
    assert scales == other[0] == [2.0**10, 2.0**9, 2.0**9]
    for own, theirs in zip(parameters, other[1], strict=True):
        assert own.equal(theirs)
        assert own.isfinite().all()


def two_models() -> list[list[torch.Tensor]]:
    models = [DistributedDataParallel(Network()) for _ in range(2)]
    for model, format in zip(models, ("bf16", "e4m3"), strict=True):
        compress(model, format)
    (loss_of(models[0], 0) + loss_of(models[1], 1)).backward()  # in one backward pass
    return [gradients_of(model) for model in models]


def test_several_models_may_be_compressed() -> None:
    for results in run_ranks(two_models, 2):
        for step, gradients in enumerate(results):
            for own, exact in zip(gradients, mean_gradients(step, 2), strict=True):
                torch.testing.assert_close(own, exact, rtol=0.08, atol=3e-3)


def uneven(format: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.005)
    compress(model, format, measure_error_every=2)
    with model.join():
        for step in range(3 + 3 * dist.get_rank()):
            model.zero_grad()
            loss_of(model, step).backward()
    return gradients_of(model)


def test_schedules_count_the_same_steps_while_ranks_run_out_of_inputs() -> None:
    first, second = run_ranks(uneven, 2, Schedule({0: "fp32", 4: "e4m3"}))
    for own, theirs in zip(first, second, strict=True):
        assert own.shape == theirs.shape


def on_two_levels() -> tuple[list[torch.Tensor], Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model = DistributedDataParallel(Network())
    compression = compress(model, "e4m3", inside="host")
    loss_of(model, 0).backward()
    return gradients_of(model), compression.ledger.entries[0].levels


def test_the_ledger_has_steps_and_bytes_per_level() -> None:
    numel = sum(parameter.numel() for parameter in Network().parameters())
    for gradients, levels in run_ranks(on_two_levels, 4):
        for own, exact in zip(gradients, mean_gradients(0, 4), strict=True):
            torch.testing.assert_close(own, exact, rtol=0.08, atol=3e-3)
        assert levels["between"]["steps"] == 1
        assert numel / 2 <= levels["between"]["bytes_sent"] <= numel / 2 + 60
        assert levels["inside"]["bytes_sent"] >= 4 * numel


def compiled() -> list[torch.Tensor]:
    model = DistributedDataParallel(Network())
    compress(model, "bf16")
    compiled_model = torch.compile(model, backend="aot_eager")
    loss_of(compiled_model, 0).backward()
    return gradients_of(model)


def test_compiled_models_are_compressed() -> None:
    for gradients in run_ranks(compiled, 2):
        for own, exact in zip(gradients, mean_gradients(0, 2), strict=True):
            torch.testing.assert_close(own, exact, rtol=0.02, atol=1e-3)


def compiled_inside() -> dict[str, str]:
    network = torch.compile(Network(), backend="aot_eager")
    compression = compress(DistributedDataParallel(network), "e5m2", keep={"fc": "fp32"})
    return {name: format.name for name, format in compression.formats.items()}


def test_compiled_modules_keep_the_names_of_their_parameters() -> None:
    for formats in run_ranks(compiled_inside, 2):
        assert formats["fc.weight"] == "fp32"
        assert formats["body.0.weight"] == "e5m2"


def refused_alone() -> None:
    model = DistributedDataParallel(Network())
    compress(model, "e5m2" if dist.get_rank() else "nosuch", timeout=timedelta(seconds=20))


def test_settings_that_one_rank_refuses_are_an_error_on_all() -> None:
    first, second = run_ranks(refused_alone, 2, catch=True)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert "format 'nosuch' is unknown" in first.message
    assert "rank 0 refused its arguments: format 'nosuch' is unknown" in second.message
    assert second.seconds < 15


def mistaken() -> list[str]:
    model = DistributedDataParallel(Network())
    texts = []
    for arguments in (
        {"format": 3},
        {"format": "e5m2", "check_every": True},
        {"format": "int4", "error_feedback": True, "inside": 2},
        {"format": "e5m2", "inside": 3},
        {"format": {"fc": "e5m2"}},
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            compress(model, **arguments)  # type: ignore[arg-type]
        texts.append(str(error.value))
    compress(model, "e5m2")  # the group is still in order
    loss_of(model, 0).backward()
    return texts


def test_mistakes_are_refused_by_name_and_leave_the_group_in_order() -> None:
    for texts in run_ranks(mistaken, 2):
        for text, part in zip(
            texts,
            [
                "format is a int; allowed: a format or its name, a dict of patterns",
                "check_every is True; allowed: whole numbers from 0",
                "error_feedback keeps what each rank's own gradient lost",
                "inside is 3, but groups of that many cannot be made of 2 ranks",
                "format names no format for 'body.0.weight' and 3 more",
            ],
            strict=True,
        ):
            assert part in text


# -- what an adversary found -----------------------------------------------------------------------


def half_used(format: str) -> list[torch.Tensor]:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = (nn.Linear(4, 1, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            result: torch.Tensor = self.always(x) + (self.sometimes(x) if both else 0)
            return result

    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    compress(model, format, error_feedback=True)
    total = torch.zeros(1, 4)
    for step in range(40):
        model.zero_grad(set_to_none=False)
        model(torch.tensor([[1.0, 0.3, 0.07, -0.2]]), step % 2 == 0).sum().backward()
        total += model.module.sometimes.weight.grad
    return [total]


def test_residuals_wait_while_nobody_uses_their_parameter() -> None:
    for (total,) in run_ranks(half_used, 2, "int4"):
        torch.testing.assert_close(total, torch.tensor([[20.0, 6, 1.4, -4]]), atol=0.2, rtol=0)


def hybrid_after(kind: str) -> list[str]:
    model = DistributedDataParallel(Network())
    scale = None if kind == "too large" else "local"
    compression = compress(model, Hybrid(["e4m3", "fp32"], bound=1.0, every=100), scale=scale)
    seen = []
    for step in range(2):
        model.zero_grad()
        loss = loss_of(model, step)
        if kind == "too large":
            loss = loss * 1e8
        elif step == 0:
            loss = loss * float("inf")
        loss.backward()
        seen.append(compression.formats["fc.weight"].name)
    return seen


def test_a_format_that_overflows_is_out_of_bounds() -> None:
    assert run_ranks(hybrid_after, 2, "too large") == [["fp32", "fp32"]] * 2


def test_a_step_that_is_not_finite_is_measured_again_in_the_next() -> None:
    assert run_ranks(hybrid_after, 2, "not finite") == [["fp32", "e4m3"]] * 2


def reentrant() -> int:
    model = DistributedDataParallel(
        nn.Sequential(*[Reentrant() for _ in range(6)]), bucket_cap_mb=0.02
    )
    compression = compress(model, "e4m3")
    for _ in range(3):
        model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    return len(compression.ledger.steps)


class Reentrant(nn.Module):
    """A layer whose activations are computed again in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return result


def test_a_backward_pass_with_others_inside_is_one_step() -> None:
    assert run_ranks(reentrant, 2) == [3, 3]


def nothing_on_two_levels() -> None:
    narrowgauge.all_reduce(torch.empty(0), "e4m3", inside=2)
    narrowgauge.all_reduce([], "e4m3", inside=2)


def test_nothing_may_be_reduced_on_two_levels() -> None:
    run_ranks(nothing_on_two_levels, 4)


def more_mistakes() -> list[str]:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    texts = []
    model = DistributedDataParallel(Network())
    compression = compress(model, "e5m2", register=False)
    for call in (
        lambda: compress(DistributedDataParallel(Complex()), "bf16"),
        lambda: compress(model, "e5m2", timeout=5),
        lambda: compress(model, "e5m2", timeout=timedelta(0)),
        lambda: compress(model, "e5m2", link="x"),
        lambda: compress(model, "e5m2", ledger="x"),
        lambda: compression.set_epoch(-1),
        lambda: compression.load_state_dict({}),
        lambda: narrowgauge.all_reduce(None, "e5m2"),  # type: ignore[arg-type]
        lambda: narrowgauge.all_reduce(torch.ones(3).to_sparse(), "e5m2"),
        lambda: Schedule([0]),  # type: ignore[arg-type]
        lambda: Hybrid(bound="x"),  # type: ignore[arg-type]
        lambda: Hybrid(5),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_more_mistakes_are_refused_by_name() -> None:
    for texts in run_ranks(more_mistakes, 2):
        for text, part in zip(
            texts,
            [
                "parameter 'w' is torch.complex64; allowed: floating dtypes",
                "timeout is 5; allowed: a datetime.timedelta",
                "timeout is 0:00:00; it must be longer than 0",
                "link is 'x'; allowed: a Link, or None",
                "ledger is 'x'; allowed: a Ledger, or None",
                "epoch is -1; allowed: whole numbers from 0",
                "the state lacks 'step', 'epoch', 'formats', 'residuals'",
                "tensors is NoneType; allowed: a tensor, or several",
                "a tensor is torch.sparse_coo; allowed: dense ones",
                "stages is list; it must be a dict from steps or epochs",
                "bound is 'x'; it must be positive",
                "formats is 5; pass at least one, in a list",
            ],
            strict=True,
        ):
            assert part in text
