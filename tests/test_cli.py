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


PREDICT = ["predict", "--model", "resnet50", "--nodes", "256", "--bandwidth", "10gbit"]


def test_predict_ends_with_the_verdict(tmp_path: Path) -> None:
    figure = tmp_path / "steps.png"
    result = runner.invoke(app, [*PREDICT, "--output", str(figure)], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    for text in ("ResNet-50 at 10 Gbit/s", "ResNet-50 on 256 nodes", "78.51 ms a step, estimated"):
        assert text in result.output
    assert "e5m2 is worth it" in result.output.splitlines()[-1]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_predict_counts_the_steps_of_a_two_level_reduction() -> None:
    arguments = ["--algorithm", "two-level", "--group-size", "16", "--compute-ms", "60"]
    result = runner.invoke(app, [*PREDICT, *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert [
        line for line in result.output.splitlines() if line.startswith("256") and " 90 " in line
    ]
    assert "Computation: 60 ms a step." in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "alexnet"], "model is 'alexnet'; allowed: resnet50, vgg16"),
        (["--nodes", "5000"], "nodes is 5000; allowed: 1 to 4096"),
        (["--bandwidth", "quick"], "bandwidth is 'quick'; allowed"),
        (["--format", "tf32"], "format 'tf32' cannot travel"),
        (["--calibration", "nowhere.json"], "nowhere.json cannot be read"),
        (["--calibration", "pyproject.toml"], "pyproject.toml holds no calibration"),
        (["--algorithm", "two-level", "--group-size", "7"], "does not divide 256 nodes"),
    ],
)
def test_what_predict_refuses_is_one_sentence(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, [*PREDICT, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_calibration_feeds_a_prediction(tmp_path: Path) -> None:
    file = str(tmp_path / "link.json")
    command = [sys.executable, "-m", "narrowgauge.cli", "calibrate", "--nproc", "2"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--output", file], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "The link between 2 ranks" in done.stdout
    arguments = ["predict", "--model", "gpt2", "--nodes", "2", "--calibration", file]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert "GPT-2 small on 2 nodes at" in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there are no ranks; pass --nproc 2, or start it on every node with torchrun"),
        (["--nproc", "1"], "1 rank has no link to measure"),
        (["--nproc", "2", "--repeats", "0"], "repeats is 0; at least 1 is needed"),
    ],
)
def test_what_calibrate_refuses_is_one_sentence(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
