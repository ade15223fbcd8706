from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge import kernels
from narrowgauge.cli import app
from narrowgauge.formats import known_formats

runner = CliRunner()


def test_formats_lists_every_known_format() -> None:
    result = runner.invoke(app, ["formats"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for name in known_formats():
        assert name in result.output


def test_formats_shows_one_format_and_its_values() -> None:
    result = runner.invoke(app, ["formats", "e3m0"])
    assert result.exit_code == 0
    assert "3 exponent bits (bias 3), 0 mantissa bits" in result.output
    assert "Magnitudes above 12" in result.output
    for value in ("0.25", "0.5", "8", "∞", "-∞"):
        assert value in result.output.split("Codes and values of e3m0:")[1]


@pytest.mark.parametrize("name", ["e8m0", "int4", "mxfp4_e2m1", "e2m1fn", "e4m3fnuz"])
def test_formats_shows_values_of_other_kinds(name: str) -> None:
    result = runner.invoke(app, ["formats", name])
    assert result.exit_code == 0
    assert "Codes and values of" in result.output


def test_wide_formats_have_properties_but_no_list_of_values() -> None:
    result = runner.invoke(app, ["formats", "e5m7"])
    assert result.exit_code == 0
    assert "Codes and values" not in result.output


def test_unknown_format_is_one_sentence_and_exit_code_2() -> None:
    result = runner.invoke(app, ["formats", "e4m3fm"])
    assert result.exit_code == 2
    assert "format 'e4m3fm' is unknown; did you mean 'e4m3fn'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_names_the_kernels_in_use() -> None:
    result = runner.invoke(app, ["doctor"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for part in (
        "kernels",
        "threads",
        "torch",
        "gloo",
        "scikit-learn",
        "Fashion-MNIST",
        "iproute2",
    ):
        assert part in result.output
    assert kernels.backend() in result.output


def test_demo_says_how_to_get_data_that_is_not_there(tmp_path: Path) -> None:
    for data, complaint in (
        ("no-such-folder", "neither a known data set"),
        (str(tmp_path), "has no train-images-idx3-ubyte"),
    ):
        result = runner.invoke(app, ["demo", "--data", data, "--output", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert complaint in result.stderr
        assert "narrowgauge demo --data FOLDER" in result.stderr


def test_demo_refuses_ranks_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--ranks", "3", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "cannot be shared equally by 3 ranks" in result.stderr


def test_version_is_shown() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"narrowgauge {version('narrowgauge')}\n"


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_a_format_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(name: str) -> None:
        raise error(f"{name} is [/b] refused")

    monkeypatch.setattr("narrowgauge.cli.format_of", refuse)
    result = runner.invoke(app, ["formats", "e4m3"])
    assert result.exit_code == 2
    assert result.stderr == "e4m3 is [/b] refused\n"


def test_output_that_knows_only_ascii_gets_question_marks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge.cli", "formats", "e3m0"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"-?" in done.stdout  # -∞


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
@pytest.mark.parametrize("arguments", [["formats"], ["--version"]])
def test_output_that_cannot_be_written_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "narrowgauge.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "the output cannot be written: No space left on device\n"


def test_doctor_reports_missing_packages() -> None:
    program = (
        "import sys; sys.modules.update(sklearn=None, matplotlib=None); sys.argv[1:] = ['doctor']; "
        "from narrowgauge.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install scikit-learn" in done.stdout
    assert "pip install matplotlib" in done.stdout
