"""The search in a training loop: what it finds, what it repairs, what it costs, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import OperatorPlan, OperatorSearch
from narrowgauge.operators import Recording, record_operators
from tests.broken_networks import CASES, Case

# Memory counts for everything and time for nothing: so the outcome depends on no clock.
BY_MEMORY = 1e4


class Training:
    """A small classifier and a user's loop around it."""

    def __init__(self, *, seed: int = 0, scaler: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaler)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(256, 1, 4, 4, generator=generator)
        self.y = (self.x.flatten(1) @ torch.randn(16, 10, generator=generator)).argmax(1)

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            value = F.cross_entropy(self.model(self.x), self.y).item()
        self.model.train()
        return value

    def step(self, search: OperatorSearch, begin: int) -> float:
        x, y = self.x[begin : begin + 16], self.y[begin : begin + 16]
        with search.step((x, y)):
            loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss.item()

    def run(self, search: OperatorSearch, epochs: int) -> list[float]:
        values = []
        for _ in range(search.epoch, epochs):
            for begin in range(0, 256, 16):
                self.step(search, begin)
            values.append(search.end_epoch(self.evaluate))
        return values


def searched(
    folder: Path, formats: list[str], *, epochs: int = 4, **options: Any
) -> tuple[Training, OperatorSearch, list[float]]:
    training = Training(scaler="fp16" in formats)
    options = {"seed_band": 0.5, **options}
    search = OperatorSearch(
        training.model, training.optimizer, formats, workdir=folder / "search", **options
    )
    return training, search, training.run(search, epochs)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "search" / "journal.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


# --- in the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [["bf16"], ["fp16"], ["e4m3/e5m2"], ["bf16", "fp16"]])
def test_a_search_ends_in_a_plan_and_the_training_goes_on(
    tmp_path: Path, formats: list[str]
) -> None:
    _training, search, values = searched(
        tmp_path, formats, memory_weight=BY_MEMORY, gradient_bound=0.5, epochs=5
    )
    assert search.finished
    assert search.decision in ("plan", "all-low")
    assert set(search.plan.formats.values()) & set(formats)
    assert values[-1] < 0.6 * values[0]  # every step trained the model
    loaded = OperatorPlan.load(tmp_path / "search" / "plan.json")
    assert loaded == search.plan
    for name in loaded.names:
        assert loaded.evidence[name]["reason"]
    assert len(events(tmp_path, "check")) == 1
    assert events(tmp_path, "check")[0]["passed"]


def test_after_the_search_a_step_follows_the_plan_and_nothing_else(tmp_path: Path) -> None:
    training, search, _ = searched(tmp_path, ["bf16"], memory_weight=BY_MEMORY)
    seen = []
    hook = training.model[5].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    training.step(search, 0)
    hook.remove()
    training.evaluate()
    assert search.plan.formats["5::linear#0"] == "bf16"
    assert seen == [torch.bfloat16]
    number = len(list(search.plan.names))
    assert training.model(training.x).dtype is torch.float32
    assert number == 6
    assert not training.model[5]._forward_hooks
    assert not training.model[5]._forward_pre_hooks


def test_the_search_trains_as_float32_does_while_it_judges(tmp_path: Path) -> None:
    training, plain = Training(), Training()
    search = OperatorSearch(
        training.model, training.optimizer, ["bf16"], workdir=tmp_path / "search"
    )
    torch.manual_seed(5)
    judged = [training.step(search, 16 * (i % 16)) for i in range(8)]
    assert search.stage in ("screen", "time")
    torch.manual_seed(5)
    finished = OperatorSearch.__new__(OperatorSearch)
    finished.step = lambda batch: torch.enable_grad()  # type: ignore[assignment, method-assign]
    assert judged == [plain.step(finished, 16 * (i % 16)) for i in range(8)]
    ours, theirs = training.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_float32_wins_without_an_epoch_if_nothing_beats_it(tmp_path: Path) -> None:
    training = Training()
    search = OperatorSearch(
        training.model,
        training.optimizer,
        ["bf16"],
        memory_weight=1.0,
        gradient_bound=1e-9,
        workdir=tmp_path / "search",
    )
    training.run(search, 1)
    assert search.finished
    assert search.decision == "fp32"
    assert set(search.plan.formats.values()) == {"fp32", "promote"}
    assert (
        search.plan.about["reason"]
        == "each operator is harmful in every format, or too slow for any plan"
    )
    assert not events(tmp_path, "check")


def test_a_winner_that_leaves_the_band_is_given_up_and_the_shadow_goes_on(tmp_path: Path) -> None:
    training = Training()
    search = OperatorSearch(
        training.model,
        training.optimizer,
        ["bf16"],
        memory_weight=BY_MEMORY,
        workdir=tmp_path / "search",
        overhead=0.0,
    )
    while search.stage != "check":
        training.run(search, search.epoch + 1)
    for begin in range(0, 256, 16):
        training.step(search, begin)
    before = training.model[5].weight.clone()
    answers = iter([1.0, 0.5, 0.4, 0.6, 0.5])  # of the winner, of the shadow, in more steps
    assert search.end_epoch(lambda: next(answers)) == 0.5
    assert not torch.equal(before, training.model[5].weight)
    assert search.decision == "fp32"
    assert "an epoch of another failed" in search.plan.about["reason"]
    (check,) = search.plan.about["checks"]
    assert check["passed"] is False
    assert check["evaluation"] == 1.0
    assert check["float32"] == 0.5


class Odd(nn.Module):
    """Operators for which torch has no kernel in bf16: alone, after one in bf16, or in autocast."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.lstm = kind, nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.kind == "quantile":
            return torch.quantile(h, 0.5, dim=1)
        if self.kind == "fft":
            return torch.fft.rfft(h).abs()
        if self.kind == "index_add_":
            return torch.zeros(4, 8).index_add_(0, torch.arange(4), h)
        if self.kind == "sparse":
            return torch.sparse.mm(torch.eye(4).to_sparse(), h)
        return self.lstm(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory_weight", [0.0, BY_MEMORY])
@pytest.mark.parametrize("kind", ["quantile", "fft", "index_add_", "sparse", "lstm"])
def test_what_torch_cannot_compute_in_a_format_is_not_taken_and_ends_no_training(
    tmp_path: Path, kind: str, memory_weight: float
) -> None:
    torch.manual_seed(0)
    model = Odd(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    search = OperatorSearch(
        model, optimizer, workdir=tmp_path / "search", memory_weight=memory_weight, seed_band=0.5
    )
    while not search.finished and search.epoch < 4:
        for _ in range(25):
            with search.step():
                (model(torch.randn(4, 8)) - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        search.end_epoch(lambda: 1.0)
    assert search.plan.formats.get("::quantile#0", "fp32") == "fp32"
    if kind == "quantile" and not memory_weight:
        excluded = search.plan.evidence["::quantile#0"]["excluded"]
        assert excluded == {"bf16": "torch cannot compute it in this format"}


def test_the_cost_is_told_beside_that_of_one_by_one(tmp_path: Path) -> None:
    _, search, _ = searched(tmp_path, ["bf16"], memory_weight=BY_MEMORY, epochs=6)
    cost = search.plan.about["cost"]
    assert cost["one_by_one_epochs"] == 6
    assert cost["one_by_one_seconds"] == pytest.approx(6 * cost["epoch_seconds"])
    assert cost["epochs"] == pytest.approx(cost["seconds"] / cost["epoch_seconds"])
    told = events(tmp_path, "epoch")
    assert [e["number"] for e in told] == [1, 2, 3, 4, 5, 6]
    assert all(e["seconds"] > 0 for e in told)
    judged = events(tmp_path, "judged")  # five signatures alone, all together twice
    assert len(judged) == 7
    assert told[-1]["search_seconds"] == told[-2]["search_seconds"]  # nothing after the decision


# --- repairs -------------------------------------------------------------------------------------


def trained(case: Case, plan: Callable[[Recording], OperatorPlan], steps: int = 120) -> float:
    """The evaluation, in float32, of a training under a plan."""
    model = case.model()
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.broken_in == "fp16")
    batches = case.batches(steps)
    x, y = batches[0]
    chosen = plan(record_operators(model, lambda: case.loss(model(x), y)))
    for x, y in batches:
        with chosen.applied(model):
            loss = case.loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return case.evaluate(model)


@pytest.mark.usefixtures("steady_clock")
@pytest.mark.parametrize("name", CASES)
def test_what_blanket_narrowing_breaks_is_repaired_without_being_told_where(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.broken_in == "fp16")
    search = OperatorSearch(
        model,
        optimizer,
        [case.broken_in],
        memory_weight=BY_MEMORY,
        overhead=9.0,
        workdir=tmp_path / "search",
    )
    batches = iter(case.batches(360))
    while not search.finished:
        for _ in range(60):
            x, y = next(batches)
            with search.step((x, y)):
                loss = case.loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        search.end_epoch(lambda: case.evaluate(model))
    exact = trained(case, lambda recording: OperatorPlan.uniform(recording, "fp32"))
    blanket = trained(case, lambda recording: OperatorPlan.uniform(recording, case.broken_in))
    assert blanket > 2 * exact
    narrow = {name for name, format in search.plan.formats.items() if format == case.broken_in}
    assert narrow
    assert narrow.isdisjoint(case.culprits)
    assert trained(case, lambda recording: search.plan) < 1.2 * exact


# --- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"formats": []}, r"formats is \[\]; pass at least one in a list"),
        ({"formats": "bf16"}, "formats is 'bf16'; pass at least one in a list"),
        ({"formats": ["fp32"]}, "formats names 'fp32', which is no narrow format"),
        ({"formats": ["bf16", "e4m3"]}, "native formats are timed, simulated ones cannot be"),
        ({"gradient_formats": "bf16"}, "gradient_formats is 'bf16'; pass a list"),
        ({"seed_band": float("nan")}, "seed_band is nan; allowed: a number from 0, None"),
        ({"memory_weight": -1.0}, r"memory_weight is -1\.0; allowed: a number from 0"),
        ({"overhead": float("nan")}, "overhead is nan; allowed: a number from 0"),
        ({"gradient_bound": 0}, "gradient_bound is 0; allowed: a number above 0"),
        ({"gradient_formats": ["e8m20"]}, "cannot travel between ranks"),
    ],
)
def test_options_without_sense_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    training = Training()
    with pytest.raises(ValueError, match=text):
        OperatorSearch(training.model, training.optimizer, workdir=tmp_path / "search", **options)
    assert not (tmp_path / "search").exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_is_no_training_is_refused(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(TypeError, match=r"model is int; it must be a torch\.nn\.Module"):
        OperatorSearch(3, training.optimizer, workdir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer is str; it must be a torch\.optim\.Optimizer"):
        OperatorSearch(training.model, "adam", workdir=tmp_path)  # type: ignore[arg-type]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="a Linear, has no parameter that requires a gradient"):
        OperatorSearch(frozen, training.optimizer, workdir=tmp_path)
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="module '0' is in TorchScript"):
        OperatorSearch(scripted, training.optimizer, workdir=tmp_path)
    with pytest.raises(TypeError, match=r"stateful is \[3\]; pass a list of what has a state_dict"):
        OperatorSearch(training.model, training.optimizer, workdir=tmp_path, stateful=[3])
    with pytest.raises(TypeError, match="model is compiled; search on the model itself"):
        OperatorSearch(
            torch.compile(training.model, backend="eager"), training.optimizer, workdir=tmp_path
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["good", None, torch.ones(2), (1.0, 2.0)])
def test_an_evaluation_that_is_no_number_ends_no_epoch(tmp_path: Path, value: Any) -> None:
    training = Training()
    search = OperatorSearch(training.model, training.optimizer, workdir=tmp_path / "search")
    training.step(search, 0)
    text = f"evaluate.. gave {type(value).__name__}, .* must give one number"
    with pytest.raises(TypeError, match=text):
        search.end_epoch(lambda: value)
    assert search.epoch == 0
    assert search.end_epoch(lambda: torch.tensor(2)) == 2.0  # type: ignore[arg-type,return-value]
    assert search.epoch == 1


def test_steps_within_steps_and_within_autocast_are_refused(tmp_path: Path) -> None:
    training = Training()
    search = OperatorSearch(training.model, training.optimizer, workdir=tmp_path / "search")
    with pytest.raises(RuntimeError, match=r"search\.step\(\) was entered within search\.step"):  # noqa: SIM117
        with search.step():
            training.step(search, 0)
    with pytest.raises(RuntimeError, match=r"end_epoch\(\) was called within search\.step"):  # noqa: SIM117
        with search.step():
            search.end_epoch(lambda: 1.0)
    assert search.epoch == 0
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"under torch\.autocast; leave autocast out of the loop"),
    ):
        training.step(search, 0)
    with pytest.raises(RuntimeError, match=r"the step ended without loss\.backward\(\)"):  # noqa: SIM117
        with search.step():
            training.model(training.x)
    training.step(search, 0)  # and goes on


def test_what_is_not_known_yet_is_not_told(tmp_path: Path) -> None:
    training = Training()
    search = OperatorSearch(
        training.model, training.optimizer, memory_weight=1.0, workdir=tmp_path / "search"
    )
    with pytest.raises(RuntimeError, match="no step was made yet"):
        _ = search.harmless
    with pytest.raises(RuntimeError, match="pass gradient_formats="):
        _ = search.gradient_policy
    for begin in range(0, 96, 16):
        training.step(search, begin)
    text = "is not over after 0 epochs: operators are judged, 4 of about 7 sets. Train on, or start"
    with pytest.raises(RuntimeError, match=text):
        _ = search.plan
    assert search.decision == ""
