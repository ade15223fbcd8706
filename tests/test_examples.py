"""The examples run, resume, and say what they lack."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from torch import nn

from narrowgauge import OperatorPlan
from narrowgauge.search import write_report
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, status: int = 0) -> str:
    """What it prints, on a wide terminal."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_accuracy_study_resumes_and_draws(tmp_path: Path) -> None:
    how = ["--data", "digits", "--steps", "3", "--seeds", "1", "--out", str(tmp_path)]
    run("aps_accuracy.py", *how, "--only", "nodes8-e4m3-none$")
    path = tmp_path / "runs.jsonl"
    first = path.read_text().splitlines()
    assert [json.loads(line)["key"] for line in first] == ["nodes8-e4m3-none"]
    path.write_text("\n".join([*first, '{"key": "cut o']))  # as a killed program may leave it
    printed = run("aps_accuracy.py", *how, "--only", "nodes8-(fp32|e4m3-none$|e5m2-aps)")
    lines = path.read_text().splitlines()
    assert lines[0] == first[0]
    keys = {json.loads(line)["key"] for line in lines[2:]}
    assert keys == {"nodes8-fp32", "nodes8-e5m2-aps", "nodes8-fp32-lars", "nodes8-e5m2-aps-lars"}
    assert "4/4" in printed
    assert "paper: ResNet-50, ImageNet, 256 nodes" in printed
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_the_accuracy_study_leaves_out_what_is_no_result_and_draws_what_there_is(
    tmp_path: Path,
) -> None:
    """No run is left to do, so that only the lines, tables and figure are worked on."""
    study = runpy.run_path(str(EXAMPLES / "aps_accuracy.py"))
    settings = study["Settings"]("digits", 3)
    good = {"settings": vars(settings), "seed": 0, "key": "nodes8-fp32", "accuracy": 0.5}
    bad: list[object] = [None, [], 3]
    for change in ({"seed": None}, {"seed": [1]}, {"accuracy": "high"}, {"accuracy": None},
                   {"key": None}, {"key": "round-off"}, {"key": "round-off", "errors": {"4": 1}},
                   {"key": "round-off", "errors": 3}):  # fmt: skip
        bad.append({**good, "seed": 7, **change})
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (*bad, good, *bad)))
    results = study["Results"](path, settings)
    assert results.by_key == {"nodes8-fp32": {0: good}}
    study["tables"](results, "digits")
    how = ["--data", "digits", "--steps", "3", "--seeds", "1", "--out", str(tmp_path)]
    assert "accuracy.png" in run("aps_accuracy.py", *how, "--only", "nodes8-fp32$")
    shape = matplotlib.image.imread(tmp_path / "accuracy.png").shape
    assert shape[:2] == (432, 480)  # one panel
    (tmp_path / "accuracy.png").unlink()
    path.write_text(json.dumps({**good, "key": "nodes8-fp32-lars"}))
    assert "accuracy.png" not in run("aps_accuracy.py", *how, "--only", "nodes8-fp32-lars")


def test_the_accuracy_study_says_which_data_it_needs() -> None:
    printed = run("aps_accuracy.py", "--data", "nowhere", status=1)
    assert "'nowhere' is neither a known data set" in printed


@pytest.mark.slow
def test_the_ddp_study_trains_on_ranks_resumes_and_compares(tmp_path: Path) -> None:
    how = ["--data", "digits", "--steps", "3", "--out", str(tmp_path)]
    run("ddp_accuracy.py", *how, "--seeds", "1", "--only", "images-2ranks-float32")
    path = tmp_path / "runs.jsonl"
    first = path.read_text().splitlines()
    assert len(first) == 1
    foreign = ["[]", '{"task": []}', first[0].replace('"images"', '"sounds"'), '{"task": "ima']
    path.write_text("\n".join([*first, *foreign]))
    only = "images-2ranks-(float32|e2m1fn@32-feedback)|text-2ranks-float32"
    printed = run("ddp_accuracy.py", *how, "--seeds", "2", "--only", only)
    assert "5/5" in printed  # three times two seeds, and one was there
    lines = path.read_text().splitlines()
    assert lines[:5] == [*first, *foreign]
    runs = [json.loads(line) for line in lines[5:]]
    assert {(run["task"], run["method"], run["seed"]) for run in runs} == {
        ("images", "float32", 1),
        ("images", "e2m1fn@32-feedback", 0),
        ("images", "e2m1fn@32-feedback", 1),
        ("text", "float32", 0),
        ("text", "float32", 1),
    }
    assert all(run["steps"] == 3 and run["seconds"] > 0 for run in runs)
    sent = {run["method"]: run["bytes_sent_per_step"] for run in runs if run["task"] == "images"}
    assert sent["e2m1fn@32-feedback"] < sent["float32"] / 7
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary[1]["method"] == "e2m1fn@32-feedback"
    assert summary[1]["verdict"] in ("within", "better", "worse")
    assert [row["verdict"] for row in summary[::2]] == ["", ""]  # float32 itself
    assert "e2m1fn@32, error feedback" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_ddp_study_ends_when_a_rank_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import ddp_accuracy as study, torch.distributed as dist, typer\n"
        "def attach(method, model):\n"
        "    if dist.get_rank() == 1:\n"
        "        raise ValueError('out of luck')\n"
        "    return lambda: 0.0\n"
        "study.attach = attach\n"
        "if __name__ == '__main__':\n"
        "    typer.run(study.main)\n"
    )
    how = ["--data", "digits", "--steps", "2", "--seeds", "1", "--out", str(tmp_path / "out")]
    printed = run(str(broken), *how, "--only", "images-2ranks-float32", status=1)
    assert "ValueError: out of luck" in printed
    assert "rank 1 of 2 failed" in printed
    assert not (tmp_path / "out" / "accuracy.png").exists()


def test_a_new_format_takes_one_file() -> None:
    printed = run("new_format.py", "--steps", "2")
    assert "e3m2b5finite: 6 bits, 0.015625 to 7" in printed
    assert "become [0.3125, 1.0, -2.5, 7.0]" in printed
    assert printed.count("%") == 11


PAGES = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["emulation.md", "new_format.md"])
def test_what_the_pages_show_runs(page: str) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def on_each_rank(page: str, folder: str) -> None:
    """Run what a page shows with the names it takes for granted."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import narrowgauge

    warnings.simplefilter("ignore")
    pixels = torch.randint(0, 255, (24, 3, 8, 8), dtype=torch.uint8)
    labels = torch.randint(0, 10, (24,))
    shown: dict[str, Any] = {
        "torch": torch,
        "narrowgauge": narrowgauge,
        "DataLoader": DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "criterion": nn.CrossEntropyLoss(),
        "model": nn.Sequential(nn.Flatten(), nn.Linear(192, 10)),
        "dataset": TensorDataset(pixels, labels),
        "device": "cpu",
        "loader": [(pixels.float() / 255, labels)] * 3,
        "folder": folder,
        "path": f"{folder}/state-{torch.distributed.get_rank()}.pt",
    }
    text = (PAGES / page).read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        if "feed.load_state_dict" in code:
            shown["state"] = {"feed": shown["feed"].state_dict()}
        code = code.replace("range(90)", "range(1)").replace(", num_workers=4", "")
        exec(code, shown)


@pytest.mark.parametrize("page", ["inputs.md", "parameters.md"])
def test_what_the_pages_of_movements_show_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    run_ranks(on_each_rank, 2, page, str(tmp_path))


class Attention(nn.Module):
    """Two layers that call a softmax, in modules named as in the page on operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Weights()}) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["attn"](x) @ x
        logits: torch.Tensor = self.head(x)
        return logits


class Weights(nn.Module):
    """The softmax of a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(x @ x.transpose(0, 1), -1)


@pytest.mark.parametrize("page", ["operators.md", "search.md"])
def test_what_the_pages_on_operators_show_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Attention()
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(6)]
    x, y = batches[0]
    shown: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss_fn": nn.functional.cross_entropy,
        "loader": batches,
        "epochs": 8,
        "evaluate": lambda: nn.functional.cross_entropy(model(x), y).item(),
        "x": x,
        "y": y,
    }
    text = (PAGES / page).read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], shown)
    assert OperatorPlan.load("plan.json").names
    if page == "search.md":
        assert 'write_report("search")`, from `narrowgauge.search`' in text
        assert write_report("search").is_file()


@pytest.mark.slow
def test_the_study_of_sharded_training_resumes(tmp_path: Path) -> None:
    how = ["--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    run("sharded_lm.py", *how, "--only", "fp32")
    first = (tmp_path / "runs.jsonl").read_text()
    printed = run("sharded_lm.py", *how, "--only", "fp32,int4")
    assert (tmp_path / "runs.jsonl").read_text().startswith(first)
    assert "1/1" in printed
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in rows] == ["fp32", "int4"]
    assert abs(rows[0]["loss"] - rows[1]["loss"]) < 0.1


@pytest.mark.slow
def test_a_language_model_trains_alike_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    how = ["--steps", "4", "--seeds", "1", "--out", str(tmp_path)]
    run("fsdp_lm.py", *how, "--only", "fp32,int8@64")
    rows = json.loads((tmp_path / "results.json").read_text())
    found = {(row["place"], row["format"]): row for row in rows}
    narrow = [found[place, "int8@64"] for place in ("ddp", "fsdp")]
    assert narrow[0]["losses"] == pytest.approx(narrow[1]["losses"], rel=1e-3)
    wide = found["fsdp", "fp32"]["bytes_sent"]
    assert 0.25 * wide < narrow[1]["bytes_sent"] < 0.28 * wide
