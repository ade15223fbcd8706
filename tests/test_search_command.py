"""``narrowgauge search``: a training in a file, from its first step to the plan and its report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from narrowgauge.cli import app
from narrowgauge.operators import OperatorPlan, record_operators
from narrowgauge.search import ScriptError, SearchStoppedError, Training, load, run, write_report
from narrowgauge.search.picture import cast_edges, colours, network
from narrowgauge.search.report import contenders, operators, training

EXAMPLE = Path(__file__).parent.parent / "examples" / "search_digits.py"
GOOD = """
import torch
def build():
    model = torch.nn.Linear(4, 2)
    parts = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss": lambda model, batch: model(batch).square().mean(),
        "batches": [torch.ones(3, 4)],
    }
"""


def script(folder: Path, change: str) -> str:
    """A file whose ``build`` returns the parts of a training after a change."""
    path = folder / "train.py"
    path.write_text(GOOD + f"    {change}\n    return parts\n")
    return f"{path}:build"


def test_a_file_describes_a_training(tmp_path: Path) -> None:
    found = load(script(tmp_path, "parts['held_out'] = [torch.zeros(3, 4)]"))
    with torch.no_grad():
        found.model.bias.zero_()
    assert found.evaluation() == 0.0
    assert found.model.training
    assert [batch.shape for batch in found.epoch()] == [(3, 4)]
    assert found.loss_of(torch.ones(3, 4)).requires_grad


def test_without_other_batches_those_of_the_training_are_evaluated(tmp_path: Path) -> None:
    found = load(script(tmp_path, "pass"))
    expected = found.loss_of(torch.ones(3, 4)).item()
    assert found.evaluation() == pytest.approx(expected)
    other = load(script(tmp_path, "parts['evaluate'] = lambda: 7"))
    assert other.evaluation() == 7.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("return 3", "returned int; it must return a dict with 'model', 'optimizer', 'loss'"),
        ("del parts['loss']", "returned a dict without 'loss'; needed: 'model'"),
        ("parts['losses'] = 1", "returned a dict with 'losses'; needed"),
        ("parts['model'] = 3", "'model' is int; it must be a torch.nn.Module"),
        ("parts['optimizer'] = None", "'optimizer' is NoneType; it must be a torch.optim.Opt"),
        ("parts['loss'] = 3", "'loss' is int; it must be a function, called as loss(model, batch)"),
        ("parts['evaluate'] = 3", "'evaluate' is int; it must be a function, called as evaluate()"),
        ("parts['batches'] = 3", "'batches' is int, which cannot be iterated"),
        ("parts['batches'] = iter([1])", "'batches' is list_iterator, which can be iterated only"),
        ("parts['held_out'] = parts['evaluate'] = print", "'held_out' is builtin_function"),
        ("parts.update(held_out=[1], evaluate=print)", "both 'held_out' and 'evaluate'"),
        ("raise KeyError('x')", "train.py:build() raised KeyError: 'x'\n"),
    ],
)
def test_what_does_not_describe_a_training_is_an_error(
    tmp_path: Path, change: str, words: str
) -> None:
    with pytest.raises(ScriptError, match=re.escape(words)):
        load(script(tmp_path, change))


def test_a_file_or_function_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    where = script(tmp_path, "pass")
    with pytest.raises(ScriptError, match=r"no function 'bild'.*did you mean 'build'"):
        load(where.replace(":build", ":bild"))
    with pytest.raises(ScriptError, match=r"there is no file '.*nowhere.py'; name one and its fun"):
        load(f"{tmp_path}/nowhere.py:build")
    text = tmp_path / "train.txt"
    text.write_text("")
    with pytest.raises(ScriptError, match=r"train.txt' is no Python file"):
        load(str(text))
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ScriptError, match=r"(?s)raised ModuleNotFoundError.*broken.py.*line 1"):
        load(f"{tmp_path}/broken.py")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: 3.0, "loss(model, batch) gave float; it must be one number"),
        (lambda model, batch: model(batch), "gave a tensor of shape (3, 2); it must"),
        (lambda model, batch: batch.sum(), "shape () that requires no gradient; it must"),
    ],
)
def test_a_loss_that_is_no_loss_is_an_error(
    tmp_path: Path, loss: Callable[..., Any], words: str
) -> None:
    model = nn.Linear(4, 2)
    described = Training(model, torch.optim.SGD(model.parameters(), 0.1), loss, [torch.ones(3, 4)])
    with pytest.raises(ScriptError, match=re.escape(words)):
        run(described, workdir=tmp_path)


def test_batches_that_give_nothing_are_an_error(tmp_path: Path) -> None:
    where = script(tmp_path, "parts['batches'] = []")
    with pytest.raises(ScriptError, match=r"batches \(list\) gave nothing"):
        run(load(where), workdir=tmp_path / "search")


class Small(nn.Module):
    """Two layers and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.norm(self.first(x))
        return self.head(x + F.gelu(x))


class Batches:
    """Batches that can be interrupted as by Ctrl-C."""

    def __init__(self, count: int, stop: int | None = None) -> None:
        self.count, self.stop, self.given = count, stop, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            self.given += 1
            if self.given == self.stop:
                raise KeyboardInterrupt
            x = torch.randn(16, 8, generator=generator)
            yield x, x[:, :4].argmax(1)


def small(batches: Batches) -> Training:
    """A training of the small network."""
    model = Small()
    return Training(
        model,
        torch.optim.SGD(model.parameters(), 0.05),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches,
    )


def test_an_interrupted_search_goes_on_to_a_plan_and_its_report(tmp_path: Path) -> None:
    """With simulated formats: what is judged depends on no time that is measured."""
    how = {"workdir": tmp_path, "formats": ["e4m3/e5m2"]}
    with pytest.raises(SearchStoppedError, match=r"stopped in epoch 1; .*goes on from") as stopped:
        run(small(Batches(24, stop=12)), **how)
    assert stopped.value.interrupted
    judged = [e for e in events(tmp_path) if e["event"] == "judged"]
    assert judged
    plan = run(small(Batches(24)), **how)
    assert [e for e in events(tmp_path) if e["event"] == "judged"][: len(judged)] == judged
    assert plan == OperatorPlan.load(tmp_path / "plan.json")
    assert set(plan.formats.values()) <= {"fp32", "e4m3/e5m2"}
    untouched = Batches(24)
    assert run(small(untouched), **how) == plan
    assert untouched.given == 0  # the search is over
    page = write_report(tmp_path).read_text(encoding="utf-8")
    for name in plan.names:
        assert name.replace("'", "&#x27;") in page
    assert "error e4m3/e5m2" in page
    assert "Whole training steps" not in page  # nothing was timed
    assert 'src="http' not in page
    assert matplotlib.image.imread(tmp_path / "network.png").shape[0] > 200


def test_epochs_that_do_not_suffice_can_be_added_to(tmp_path: Path) -> None:
    how = {"workdir": tmp_path, "formats": ["e4m3/e5m2"]}
    with pytest.raises(SearchStoppedError, match=r"after 1 epochs; .* more --epochs goes") as ended:
        run(small(Batches(6)), **how, epochs=1)
    assert not ended.value.interrupted
    assert [e["number"] for e in events(tmp_path) if e["event"] == "epoch"] == [1]
    run(small(Batches(12)), **how)
    assert [e["number"] for e in events(tmp_path) if e["event"] == "epoch"][:2] == [1, 2]


def events(folder: Path) -> list[dict[str, Any]]:
    """What the journal holds."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_the_example_is_searched_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGITS_BATCHES", "30")
    monkeypatch.syspath_prepend(str(tmp_path))  # so that sys.path is put back
    arguments = ["search", f"{EXAMPLE}:build", "--workdir", str(tmp_path / "work")]
    arguments += ["--output", str(tmp_path / "plan.json")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "Whole training steps" in first.output
    assert "Decision: " in first.output
    plan = OperatorPlan.load(tmp_path / "plan.json")
    described = load(str(EXAMPLE))
    plan.check(
        record_operators(described.model, lambda: described.loss_of(next(described.epoch())))
    )
    page = (tmp_path / "work" / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 1
    assert "blocks.0.depthwise::conv2d#0" in page
    assert "fp32 ms" in page
    assert "bf16 ms" in page


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    where = script(tmp_path, "pass")
    for arguments, words in (
        ([f"{tmp_path}/no.py"], "there is no file"),
        ([where, "--formats", "bf61"], "bf61"),
        ([where, "--formats", ","], "pass at least one"),
        ([where, "--epochs", "0"], "epochs is 0; at least 1 is needed"),
        ([where, "--memory-weight", "-1"], "memory_weight is -1.0"),
        ([where, "--output", str(tmp_path / "no" / "plan.json")], "lies in no folder that exists"),
        ([where, "--output", str(tmp_path)], "is a folder; name a file"),
    ):
        ended = CliRunner().invoke(app, ["search", *arguments, "--workdir", str(tmp_path / "w")])
        assert ended.exit_code == 2
        assert words in ended.output


def test_ctrl_c_is_one_sentence(tmp_path: Path) -> None:
    where = script(tmp_path, "parts['batches'] = type('B', (list,), {'__iter__': stopping})()")
    path = tmp_path / "train.py"
    path.write_text("def stopping(batches):\n    raise KeyboardInterrupt\n" + path.read_text())
    ended = CliRunner().invoke(app, ["search", where, "--workdir", str(tmp_path / "w")])
    assert ended.exit_code == 130
    assert "stopped in epoch 1; what was found is kept" in ended.output
    assert "Traceback" not in ended.output


def planned() -> OperatorPlan:
    """A plan as a search writes it, by hand: one narrow operator, in the middle of others."""
    names = ["a::linear#0", "a::relu_#0", "b.c::matmul#0", "::cross_entropy#0"]
    formats = dict(zip(names, ["fp32", "promote", "bf16", "fp32"], strict=True))
    signal = {"gradient_error": 0.004, "loss_change": 0.0, "overflow": 0, "underflow": 0}
    evidence = {
        name: {
            "seconds": {"fp32": 2e-3, "bf16": 5e-4},
            "casts": {"fp32 → bf16": 1e-4, "bf16 → fp32": 2e-4},
            "signals": {"bf16": {**signal, "gradient_error": error}},
            "excluded": {},
            "reason": f"because <{name}>",
        }
        for name, error in zip(names, [0.004, "infinite", 0.01, 0.2], strict=True)
    }
    row = {"noise": 0.01, "rounds": 8}
    about = {
        "decision": "plan",
        "reason": "faster",
        "formats": ["bf16"],
        "memory_weight": 0.5,
        "contenders": {
            "fp32": {"seconds": 0.02, "times_fp32": 1.0, "saved_bytes": 4000, **row},
            "autocast": {"seconds": 0.04, "times_fp32": 0.5, "saved_bytes": 2000, **row},
            "plan": {"seconds": 0.01, "times_fp32": 2.0, "saved_bytes": 1000, **row},
        },
        "not_tried": {"all-low": "3 operators were found harmful"},
        "edges": [[0, 1, 8], [1, 2, 8], [2, 3, 8], [0, 3, 8]],
        "casts": {"fp32 → bf16": [[8, 1e-5], [800, 2e-5]]},
        "cost": {"seconds": 5.0, "epoch_seconds": 4.0, "epochs": 1.25,
                 "one_by_one_epochs": 4, "one_by_one_seconds": 16.0},
    }  # fmt: skip
    return OperatorPlan(formats, outside=[names[3]], evidence=evidence, about=about)


def test_a_report_needs_nothing_but_the_files(tmp_path: Path) -> None:
    planned().save(tmp_path / "plan.json")
    judged = {"operators": {}, "gradient_error": 0, "loss_change": 0, "overflow": 0, "underflow": 0}
    check = {"passed": True, "reason": "", "evaluation": 0.5, "float32": 0.49, "band": 0.02}
    epoch = {"number": 1, "evaluation": 0.5, "seconds": 4, "steps": 9, "search_seconds": 5}
    journal: list[dict[str, Any]] = [
        {"event": "judged", **judged},
        {"event": "judged", **judged},
        {"event": "check", **check},
        {"event": "epoch", **epoch},
        {"event": "decided", "decision": "plan", "reason": "faster"},
    ]
    text = "".join(json.dumps(event) + "\n" for event in journal)
    (tmp_path / "journal.jsonl").write_text(text)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Decision: use the plan. Faster." in page
    assert "because &lt;b.c::matmul#0&gt;" in page
    assert "1.2 of its epochs" in page
    assert "all-low was not tried: 3 operators were found harmful." in page
    rows = training(journal).rows
    assert rows[0][:4] == ["1", "0.5", "4.0 s", "5.0 s"]
    assert rows[0][4].startswith("2 sets of operators judged; low precision kept up")
    assert rows[1][4] == "decided: use the plan"


def test_a_check_that_failed_before_the_end_is_told_by_its_reason() -> None:
    why = "in step 32 of its epoch, it turns the gradient by 0.2 of its length"
    failed = {"event": "check", "passed": False, "reason": why, "band": 0.0}
    row = training([{**failed, "evaluation": None, "float32": None}]).rows[0]
    assert row[-1] == f"low precision fell behind float32: {why}"


def test_the_tables_compare_with_float32_and_autocast() -> None:
    rows = {row[0]: row for row in contenders(planned()).rows}
    assert rows["plan"][1:4] == ["10 ms", "2.00 × ± 1.0%", "4.00 ×"]
    assert rows["plan"][-1] == "0.25 ×"
    by_name = {row[0]: row for row in operators(planned()).rows}
    row = by_name["a::relu_#0"]
    assert row[1:6] == ["promote", "2", "0.5", "0.2", "infinite"]
    assert by_name["::cross_entropy#0"][5] == "0.2"


def test_casts_lie_where_formats_meet() -> None:
    """What is written into its input has that input's format, and its consumer casts."""
    assert cast_edges(planned()) == [(1, 2), (2, 3)]
    picture = network(planned())
    assert "4 operators, 2 in fp32, 1 in promote, 1 in bf16" in picture.caption
    assert "cast on its way (2)" in picture.caption
    assert picture.dark is not None


def test_each_format_has_its_colour() -> None:
    found = colours(["bf16", "e4m3/e5m2", "fp32", "mxfp8_e4m3", "e4m3/e5m2"])
    assert list(found) == ["fp32", "bf16", "e4m3/e5m2", "mxfp8_e4m3"]
    assert len(set(found.values())) == 4


def test_a_plan_of_no_search_has_no_report(tmp_path: Path) -> None:
    OperatorPlan({"a::linear#0": "fp32"}).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="was not found by a search"):
        write_report(tmp_path)
