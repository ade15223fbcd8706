"""The DDP hook: what plain DDP gives, in narrow formats, whatever DDP does with its buckets."""

from __future__ import annotations

import os
import signal
import time
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
from narrowgauge.codec import packed_size
from narrowgauge.gradients import parameter_formats
from tests.ranks import Raised, run_ranks

# On the loopback, compression would turn to float32 by itself.
compress = partial(narrowgauge.gradients.compress, adapt=False)


class Network(nn.Module):
    """A bit of everything: weights of uneven sizes, a parameter nobody uses, a named last layer."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(20, 131), nn.ReLU(), nn.Linear(131, 57), nn.ReLU())
        self.fc = nn.Linear(57, 10)
        self.unused = nn.Linear(30, 30) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(self.body(x))
        return result


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward(
    format: str | None,
    settings: dict[str, Any],
    options: dict[str, Any],
    steps: int = 3,
    accumulate: int = 0,
) -> tuple[list[dict[str, torch.Tensor | None]], list[dict[str, Any]]]:
    """Gradients of each step, with DDP ``settings`` and compression ``options``; the ledger."""
    network = Network(unused="find_unused_parameters" in settings)
    model = DistributedDataParallel(network, **settings)
    compression = None
    if format is not None:
        compression = compress(model, format, **options)
    gradients = []
    for step in range(steps):
        model.zero_grad()
        with model.no_sync():
            for micro in range(accumulate):
                model(data(dist.get_rank(), 100 + 10 * step + micro)).square().sum().backward()
        model(data(dist.get_rank(), step)).square().sum().backward()
        gradients.append(
            {k: None if g is None else g.clone() for k, g in gradients_of(network).items()}
        )
    return gradients, compression.ledger.steps if compression else []


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.01},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.01},
    "unused parameters": {"find_unused_parameters": True},
}


def close(ours: list[Any], plain: list[Any], tolerance: float) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            if gradient is None or theirs[name] is None:
                assert gradient is theirs[name], name
                continue
            error = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30)
            assert error <= tolerance, (name, float(error))


def same_bits(results: list[Any]) -> None:
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            for name, gradient in mine.items():
                if gradient is not None:
                    assert torch.equal(gradient, first[name]), name


def all_settings(accumulate: int) -> dict[str, Any]:
    return {
        name: (backward("e4m3", s, {}, 3, accumulate)[0], backward(None, s, {}, 3, accumulate)[0])
        for name, s in SETTINGS.items()
        if not (accumulate and "static_graph" in s)  # DDP itself has no no_sync in its first step
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [0, 2])
def test_gradients_are_those_of_ddp_up_to_rounding(world_size: int, accumulate: int) -> None:
    results = run_ranks(all_settings, world_size, accumulate)
    for setting in results[0]:
        same_bits([result[setting][0] for result in results])
        ours, plain = results[0][setting]
        close(ours, plain, 0.0 if world_size == 1 else 0.06)


def kept(format: str) -> Any:
    options = {"keep": {"fc": "fp32", "*.bias": "bf16"}}
    return backward(format, {}, options)[0], backward(None, {}, {})[0]


def test_kept_parameters_stay_wide() -> None:
    results = run_ranks(kept, 2, "e3m0")
    for ours, plain in results:
        for step in range(3):
            for name, gradient in ours[step].items():
                error = float((gradient - plain[step][name]).norm() / plain[step][name].norm())
                if name.startswith("fc."):
                    assert error < 1e-6, name
                elif name.endswith(".bias"):
                    assert error < 0.01, name
                else:
                    assert 0.02 < error < 0.5, name


def other_dtypes() -> list[torch.Tensor]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = nn.Linear(20, 30)
            self.second = nn.Linear(30, 10).bfloat16()
            self.third = nn.Linear(10, 10).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.third(self.second(self.first(x).bfloat16()).double())
            return result

    model = DistributedDataParallel(Mixed())
    compress(model, "e5m2")
    model(data(dist.get_rank(), 0)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_parameters_of_several_dtypes_are_reduced() -> None:
    first, second = run_ranks(other_dtypes, 2)
    assert [g.dtype for g in first] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [
        torch.float64
    ] * 2
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.abs().sum() > 0


def one_bad_gradient() -> bool:
    model = DistributedDataParallel(Network())
    compress(model, "e4m3fn")
    loss = model(data(dist.get_rank(), 0)).square().sum()
    (loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    return all(
        not bool(p.grad.isfinite().all())
        for p in model.module.fc.parameters()
        if p.grad is not None
    )


def test_an_overflowed_gradient_is_seen_by_every_rank() -> None:
    assert run_ranks(one_bad_gradient, 3) == [True] * 3


def ledger_of(format: str, every: int) -> tuple[list[dict[str, Any]], int]:
    _, steps = backward(format, {}, {"measure_error_every": every}, steps=4)
    return steps, sum(p.numel() for p in Network().parameters())


def test_ledger_counts_bytes_seconds_and_error() -> None:
    for steps, numel in run_ranks(ledger_of, 2, "e5m2", 2):
        assert [step["step"] for step in steps] == [0, 1, 2, 3]
        for step in steps:
            assert step["movement"] == "gradients"
            assert numel <= step["bytes_sent"] <= numel * 1.01
            assert step["codec_seconds"] > 0
            assert step["wire_seconds"] > 0
        assert [step["round_off_error"] is None for step in steps] == [False, True, False, True]
        assert 0.001 < steps[0]["round_off_error"] < 0.2


def test_wide_gradients_have_no_round_off_error() -> None:
    for steps, _ in run_ranks(ledger_of, 3, "fp32", 1):
        assert all(step["round_off_error"] < 1e-6 for step in steps)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "int4@64"])
def test_the_ledger_counts_scales_of_blocks(name: str) -> None:
    sizes = [parameter.numel() for parameter in Network().parameters()]
    # An exponent byte per tensor comes on top, and the plan's fingerprint of 8 bytes.
    whole = sum(packed_size(size, name) + 1 for size in sizes) + 8
    for steps, _ in run_ranks(ledger_of, 2, name, 1):
        assert all(step["bytes_sent"] == whole for step in steps)
        assert all(0.01 < step["round_off_error"] < 1 for step in steps)


def train(format: str | None) -> list[float]:
    network = Network()
    model = DistributedDataParallel(network)
    if format is not None:
        compress(model, format, keep={"fc": "fp32"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(30):
        x = data(dist.get_rank(), step)
        loss = (model(x)[:, :5] - x[:, :5]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_down_as_with_plain_ddp() -> None:
    plain = run_ranks(train, 2, None)
    for format, tolerance in (("e4m3", 0.02), ("mxfp8_e4m3", 0.08), ("nvfp4", 0.08)):
        ours = run_ranks(train, 2, format)
        assert ours[0][-1] < ours[0][0] / 1.2
        assert ours[0][-1] == pytest.approx(plain[0][-1], rel=tolerance)


def uneven_inputs() -> list[torch.Tensor]:
    network = Network()
    model = DistributedDataParallel(network, bucket_cap_mb=0.01)
    compress(model, "e4m3")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(data(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def test_join_lets_ranks_run_out_of_inputs() -> None:
    first, second = run_ranks(uneven_inputs, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def reentrant_checkpoint() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    class Checkpointed(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=True)
            result: torch.Tensor = self.fc(hidden)
            return result

    results = []
    for format in ("e4m3", None):
        network = Checkpointed()
        model = DistributedDataParallel(network, bucket_cap_mb=0.01, static_graph=True)
        if format:
            compress(model, format)
        for step in range(3):
            model.zero_grad()
            x = data(dist.get_rank(), step).requires_grad_()
            model(x).square().sum().backward()
        results.append([p.grad for p in network.parameters() if p.grad is not None])
    return results[0], results[1]


def test_gradients_survive_reentrant_checkpoints() -> None:
    for ours, plain in run_ranks(reentrant_checkpoint, 2):
        assert len(ours) == len(plain)
        for mine, theirs in zip(ours, plain, strict=True):
            assert (mine - theirs).norm() <= 0.06 * theirs.norm()


# -- what goes wrong ---------------------------------------------------------------------------


def die_in_backward(measure_error_every: int) -> None:
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.01)
    compress(
        model,
        "e5m2",
        timeout=timedelta(seconds=20),
        measure_error_every=measure_error_every,
    )
    for step in range(5):
        output = model(data(dist.get_rank(), step)).square().sum()
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        output.backward()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("measure_error_every", [0, 1])
def test_a_rank_killed_mid_step_fails_the_others_readably(
    world_size: int, measure_error_every: int
) -> None:
    results = run_ranks(die_in_backward, world_size, measure_error_every, catch=True)
    for rank, result in enumerate(results):
        if rank == 1:
            assert result is None
            continue
        assert isinstance(result, Raised)
        assert result.type_name == "CollectiveError"
        assert "Look at the output of rank" in result.message
        assert result.seconds < 20


def fall_silent() -> None:
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.01)
    compress(model, "e5m2", timeout=timedelta(seconds=2), measure_error_every=1)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            time.sleep(8)
            return
        model(data(dist.get_rank(), step)).square().sum().backward()


def test_the_timeout_holds_while_the_error_is_measured() -> None:
    waiting, _ = run_ranks(fall_silent, 2, catch=True)
    assert isinstance(waiting, Raised)
    assert waiting.type_name == "CollectiveError"
    assert "summing float32 with rank 1: no answer within 2 s" in waiting.message
    assert waiting.seconds < 7


def disagree() -> None:
    model = DistributedDataParallel(Network())
    compress(model, ("e5m2", "e4m3")[dist.get_rank()])


def test_ranks_with_different_formats_all_raise_when_attached() -> None:
    for result in run_ranks(disagree, 2, catch=True):
        assert isinstance(result, Raised)
        assert "format is e4m3 on rank 1, e5m2 on rank 0" in result.message


def bad_arguments() -> list[str]:
    model = DistributedDataParallel(Network())
    messages = []
    for arguments, keywords in (
        (("e4m3fm",), {}),
        (("e5m2",), {"scale": "global"}),
        (("e5m2",), {"keep": {"fcc": "fp32"}}),
        (("e5m2",), {"keep": {"fc": "fp99"}}),
        (("e5m2",), {"keep": {"fc": "nvfp4"}, "scale": None}),
        (("e5m2",), {"measure_error_every": -1}),
        (("e5m2",), {"message_bytes": 0}),
    ):
        try:
            compress(model, *arguments, **keywords)  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    compress(model, "e5m2")
    try:
        compress(model, "e5m2")
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_bad_arguments_are_refused_by_name() -> None:
    (messages,) = run_ranks(bad_arguments, 1)
    wanted = [
        "format 'e4m3fm' is unknown; did you mean 'e4m3fn'?",
        "scale is 'global'; allowed: 'local', 'shared'",
        "keep names 'fcc', which matches no parameter; did you mean 'fc'?",
        "format 'fp99' is unknown",
        "scale is None, but nvfp4 brings a scale per block",
        "measure_error_every is -1; allowed: whole numbers from 0",
        "message_bytes is 0; allowed: whole numbers from 1",
        "can only be called once",
    ]
    assert len(messages) == len(wanted)
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="model is a Linear; wrap it first"):
        compress(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_keep_takes_names_modules_and_patterns_first_match_wins() -> None:
    names = ["fc.weight", "fc.bias", "fc2.weight", "conv.bias", "conv.weight"]
    formats = parameter_formats(
        names, "e4m3", {"fc": "fp32", "*.bias": "bf16", "conv.weight": "int8"}
    )
    assert {name: format.name for name, format in formats.items()} == {
        "fc.weight": "fp32",
        "fc.bias": "fp32",
        "fc2.weight": "e4m3",
        "conv.bias": "bf16",
        "conv.weight": "int8",
    }


def test_keep_of_another_type_is_refused() -> None:
    for keep, text in (
        (["fc"], "keep is list; it must be a dict from names to formats, such as"),
        ([], "keep is list; it must be a dict from names to formats, such as"),
        ({0: "fp32"}, "keep has the key 0, which is int; it must be a str: a parameter's name, a"),
    ):
        with pytest.raises(TypeError, match=text):
            parameter_formats(["fc.weight"], "e4m3", keep)  # type: ignore[arg-type]
