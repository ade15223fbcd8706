"""``narrowgauge plan show``, ``diff`` and ``explain``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge import OperatorPlan
from narrowgauge.cli import app


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    signature = "linear(float32[2,4])"
    OperatorPlan(
        {"0::linear#0": "bf16", "1::linear#0": "bf16", "::add#0": "fp32"},
        signatures={"0::linear#0": signature, "1::linear#0": signature},
        evidence={"::add#0": {"gradient error": 0.125, "reason": "loss changed"}},
    ).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def said(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_show_groups_operators_by_signature_and_gives_evidence(plan: Path) -> None:
    code, text = said("show", plan)
    assert code == 0
    assert "0::linear#0 and 1 more" in text
    assert "gradient error: 0.125, reason: loss changed" in text


def test_diff_lists_what_differs_and_says_so_by_its_exit_code(plan: Path) -> None:
    assert said("diff", plan, plan)[0] == 0
    other = plan.with_name("other.json")
    OperatorPlan.load(plan).with_formats({"::add#0": "bf16"}).save(other)
    code, text = said("diff", plan, other)
    assert code == 1
    assert "::add#0" in text
    assert "linear" not in text


def test_explain_says_why_and_knows_near_names(plan: Path) -> None:
    code, text = said("explain", "::add#0", plan)
    assert code == 0
    assert "loss changed" in text
    code, text = said("explain", "0::liner#0", plan)
    assert code == 2
    assert "did you mean '0::linear#0'" in text


@pytest.mark.parametrize("content", [None, "{", '{"kind": "other"}'])
def test_a_bad_file_is_one_sentence_and_exit_code_2(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    for words in (["show", path], ["diff", path, path], ["explain", "::add#0", path]):
        code, text = said(*words)
        assert code == 2
        assert "bad.json" in text
        assert "Traceback" not in text
