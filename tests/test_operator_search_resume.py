"""A search that is interrupted anywhere goes on; a folder of another search is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowgauge import OperatorSearch
from narrowgauge.operators.search.workdir import read_journal
from tests.test_operator_search import BY_MEMORY, Training

EPOCHS, STEPS = 5, 16

pytestmark = pytest.mark.usefixtures("steady_clock")


class Interrupted(Exception):
    """What stops a training; no handler of the library may swallow it."""


def begin(folder: Path, seed: int = 0) -> tuple[Training, OperatorSearch]:
    training = Training(seed=seed)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    search = OperatorSearch(
        training.model,
        training.optimizer,
        ["bf16"],
        workdir=folder,
        memory_weight=BY_MEMORY,
        seed_band=9.0,
        gradient_formats=["e5m2"],
        stateful=[scheduler],
    )
    training.scheduler = scheduler  # type: ignore[attr-defined]
    return training, search


def run(folder: Path, stop: int | None = None) -> tuple[Training, OperatorSearch, list[str]]:
    """The whole training, or so many steps; every start after the first has other weights."""
    training, search = begin(folder, seed=0 if not folder.exists() else 7)
    stages, done = [], 0
    for _ in range(search.epoch, EPOCHS):
        for place in range(STEPS):
            if done == stop:
                raise Interrupted
            training.step(search, 16 * place)
            stages.append(search.stage)
            done += 1
        training.scheduler.step()  # type: ignore[attr-defined]
        search.end_epoch(training.evaluate)
    return training, search, stages


@pytest.fixture(scope="module")
def whole(
    steady_clock: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OperatorSearch, list[str], Path]:
    folder = tmp_path_factory.mktemp("whole") / "search"
    torch.manual_seed(0)
    _, search, stages = run(folder)
    assert set(stages) == {"screen", "time", "check", "done"}
    return search, stages, folder


@pytest.mark.parametrize("stage", ["screen", "time", "check", "done"])
def test_a_search_that_is_interrupted_in_a_stage_ends_with_an_equal_plan(
    whole: tuple[OperatorSearch, list[str], Path], tmp_path: Path, stage: str
) -> None:
    uninterrupted, stages, _ = whole
    folder = tmp_path / "search"
    within = [step for step, at in enumerate(stages) if at == stage]
    stop = within[len(within) // 2] + 1
    with pytest.raises(Interrupted):
        run(folder, stop)
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"event": "judged", "operat')  # the process died while it wrote
    judged = [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "judged"]
    _, search, _ = run(folder)
    assert search.finished
    assert search.epoch == EPOCHS
    assert search.plan.formats == uninterrupted.plan.formats
    assert search.decision == uninterrupted.decision
    assert search.gradient_policy == uninterrupted.gradient_policy
    events = read_journal(folder / "journal.jsonl")
    assert [e for e in events if e["event"] == "judged"][: len(judged)] == judged
    if stage != "screen":  # nothing is found twice
        assert len(judged) == sum(e["event"] == "judged" for e in events)


@pytest.mark.parametrize("last", ["operators", "screened", "contenders", "tried", "check"])
def test_any_line_of_the_journal_may_be_the_last_before_the_power_fails(
    whole: tuple[OperatorSearch, list[str], Path], tmp_path: Path, last: str
) -> None:
    folder = tmp_path / "search"
    folder.mkdir()
    lines = (whole[2] / "journal.jsonl").read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["event"] for line in lines]
    kept = [
        line
        for line, kind in zip(lines[: kinds.index(last) + 1], kinds, strict=False)
        if kind != "epoch"
    ]
    (folder / "journal.jsonl").write_text("".join(kept))  # and no snapshot
    _, search, _ = run(folder)
    assert search.epoch == EPOCHS
    assert search.plan.formats == whole[0].plan.formats


def test_a_training_goes_on_from_the_end_of_its_last_epoch(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path / "search", STEPS + 3)
    shutil.copytree(tmp_path / "search", tmp_path / "again")
    at_the_end = torch.load(tmp_path / "search" / "snapshot.pt", weights_only=True)
    training, search = begin(tmp_path / "again", seed=7)
    assert search.epoch == 1
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, at_the_end["model"][name])
    assert training.scheduler.last_epoch == 1  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), at_the_end["random"][0])


def test_a_finished_search_applies_its_plan_when_it_is_started_again(
    whole: tuple[OperatorSearch, list[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(whole[2], tmp_path / "search")
    training, search = begin(tmp_path / "search", seed=7)
    assert search.finished
    assert search.epoch == EPOCHS
    assert search.plan == whole[0].plan
    seen = []
    training.model[5].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    training.step(search, 0)
    assert seen == [torch.bfloat16]


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "search")
    training = Training()
    with pytest.raises(ValueError, match=r"holds a search with formats=\['bf16'\], not \['fp16'\]"):
        OperatorSearch(training.model, training.optimizer, ["fp16"], workdir=tmp_path / "search")
    other = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"with memory_weight=10000\.0, not 0\.0; name another"):
        OperatorSearch(other, torch.optim.SGD(other.parameters(), 0.1), workdir=tmp_path / "search")


def test_a_model_with_other_operators_is_refused_at_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path / "search", 3)
    training, search = begin(tmp_path / "search")
    training.model[2] = nn.GELU()
    with pytest.raises(ValueError, match="a model with other operators; name another workdir"):
        training.step(search, 0)


def test_a_snapshot_that_is_damaged_or_of_another_training_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with pytest.raises(Interrupted):
        run(folder, STEPS + 1)
    training, _ = begin(folder)
    options = {"workdir": folder, "memory_weight": BY_MEMORY, "gradient_formats": ["e5m2"]}
    with pytest.raises(ValueError, match=r"with 1 objects in stateful=, and now there are 0; pass"):
        OperatorSearch(training.model, training.optimizer, **options)  # type: ignore[arg-type]
    adam = torch.optim.Adam(training.model.parameters())
    stateful = [torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)]
    with pytest.raises(ValueError, match="with the optimizer SGD, and now it is Adam; pass"):
        OperatorSearch(training.model, adam, stateful=stateful, **options)  # type: ignore[arg-type]
    renamed = nn.ModuleDict({"other": training.model})
    with pytest.raises(ValueError, match=r"holds a search with parameters=\{'0.*, not \{'other"):
        OperatorSearch(renamed, training.optimizer, stateful=stateful, **options)  # type: ignore[arg-type]
    path = folder / "snapshot.pt"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no snapshot"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"no whole snapshot of a search: .* Put back a copy"):
            begin(folder)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="it lacks 'optimizer'"):
        begin(folder)
    path.write_bytes(whole)
    torch.save({**torch.load(path), "model": {}}, path)
    with pytest.raises(
        ValueError, match=r"is of another training; name another workdir: (.|\n)*Missing key"
    ):
        begin(folder)
    path.unlink()
    with pytest.warns(UserWarning, match=r"no snapshot.pt, although 1 epochs .* begins anew"):
        assert begin(folder)[1].epoch == 0


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    path = tmp_path / "search" / "journal.jsonl"
    path.write_text('shopping list\n{"event": "epoch"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is b'shopping list', no event of a search"):
        begin(tmp_path / "search")
    assert path.read_text().startswith("shopping list")


def test_an_event_that_lacks_a_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "settings"}\n{"event": "epoch", "steps": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*, which lacks 'seconds'; name another work"):
        read_journal(path)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="no event of a search; name another workdir"):
        read_journal(path)


def test_a_workdir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(TypeError, match="workdir is 3; it must be the path of a folder"):
        OperatorSearch(training.model, training.optimizer, workdir=3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"workdir is '.*file', which is a file; name a folder"):
        OperatorSearch(training.model, training.optimizer, workdir=tmp_path / "file")


def test_a_torn_last_line_is_cut_off_and_all_before_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for torn in ['{"event": "b', '{"event": "b"}', "\x00\x00"]:
        path.write_text(json.dumps({"event": "a", "x": float("inf")}) + "\n" + torn)
        assert read_journal(path) == [{"event": "a", "x": float("inf")}]
        assert path.read_text() == '{"event": "a", "x": Infinity}\n'
