"""The demo with real ranks, few steps; resuming; and that signals leave no rank behind."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from narrowgauge.demo import DataError, Settings, run
from narrowgauge.demo.data import load_images
from narrowgauge.demo.results import finished
from narrowgauge.demo.settings import variants
from narrowgauge.demo.training import Network, ring_bytes

DEMO = [sys.executable, "-m", "narrowgauge.cli", "demo"]


def start(output: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEMO, "--output", str(output), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        start_new_session=True,  # as a shell does: its ranks are found by the session's number
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the demo did not end in time; it printed:\n{output}")
    return output


def results(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def alive_in_session(session: int) -> list[str]:
    """Command lines of the session's processes that have not ended (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended while we looked
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_demo_trains_compares_reports_and_resumes(tmp_path: Path) -> None:
    few = ("--steps", "16", "--seeds", "1")
    process = start(tmp_path, *few)
    printed = finish(process)
    assert process.returncode == 0, printed
    for variant in variants("local"):
        assert variant.label in printed
    by_variant = {entry["variant"]: entry for entry in results(tmp_path)}
    assert set(by_variant) == {variant.key for variant in variants("local")}
    elements = sum(parameter.numel() for parameter in Network().parameters())
    for variant in variants("local"):
        entry = by_variant[variant.key]
        sent = entry["bytes_sent_per_step"]
        # Two ranks: one message each, payload plus at most 5 % for headers and scales.
        assert isinstance(sent, float)
        assert 1 <= sent / ring_bytes(elements, variant.bits, 2) < 1.05
        assert isinstance(entry["environment"], dict)
        if variant.key != "float32":
            assert isinstance(entry["round_off_error"], float)
    for name in ("report.html", "loss.png", "accuracy.png"):
        assert (tmp_path / name).stat().st_size > 10_000

    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]) + lines[-1][:50])  # cut short
    process = start(tmp_path, *few)
    printed = finish(process)
    assert process.returncode == 0, printed
    assert "6 of 7 runs are in" in printed
    assert (tmp_path / "results.jsonl").read_text().startswith("".join(lines[:-1]))

    printed_here = io.StringIO()
    console = Console(file=printed_here, width=160)
    run(Settings(steps=16), seeds=1, output=tmp_path, console=console)  # starts no ranks
    assert "All runs are in" in printed_here.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_leave_no_rank_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--steps", "100000", "--seeds", "1")
    progress = tmp_path / "logs" / "progress.jsonl"
    deadline = time.monotonic() + 60
    while not (progress.exists() and progress.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running = alive_in_session(process.pid)
    assert len(running) >= 3, running  # the parent and two ranks, mid-run
    process.send_signal(number)
    printed = finish(process)
    assert process.returncode == 128 + number, printed
    assert f"Stopped by {number.name}; all ranks have ended." in re.sub(r"\s+", " ", printed)
    assert "Traceback" not in printed
    deadline = time.monotonic() + 5
    while alive_in_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive_in_session(process.pid) == []


def test_settings_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="ranks is 0"):
        Settings(ranks=0)
    with pytest.raises(ValueError, match="steps is 1"):
        Settings(steps=1)
    with pytest.raises(ValueError, match="scale is 'global'; allowed: 'local', 'shared'"):
        Settings(scale="global")  # type: ignore[arg-type]


def test_learning_rate_rises_holds_and_falls() -> None:
    settings = Settings(steps=100, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[20:50] == [1.0] * 30
    assert 0 < rates[99] < 0.05
    assert rates[50:] == sorted(rates[50:], reverse=True)


def test_digits_are_split_without_overlap() -> None:
    images = load_images("digits")
    assert images.train_images.shape == (1437, 1, 8, 8)
    assert images.test_images.shape == (360, 1, 8, 8)
    assert float(images.train_images.max()) == 1.0
    assert torch.equal(images.test_labels, load_images("digits").test_labels)
    assert Network()(images.test_images[:3]).shape == (3, 10)


def write_idx(path: Path, values: torch.Tensor, magic: int | None = None) -> None:
    content = struct.pack(">I", 0x0800 + values.dim() if magic is None else magic)
    content += struct.pack(f">{values.dim()}I", *values.shape) + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_idx_files_are_read_packed_or_not(tmp_path: Path) -> None:
    images = torch.arange(2 * 28 * 28).remainder(256).view(2, 28, 28)
    labels = torch.tensor([3, 9])
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", images)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels)
    read = load_images(str(tmp_path))
    assert read.train_images.shape == (2, 1, 14, 14)
    assert read.train_images[0, 0, 0, 0] == pytest.approx((0 + 1 + 28 + 29) / 4 / 255)
    assert torch.equal(read.test_labels, labels)
    assert Network()(read.test_images).shape == (2, 10)

    write_idx(tmp_path / "t10k-images-idx3-ubyte", images, magic=0x0D03)
    with pytest.raises(DataError, match="it starts with 00000d03 instead of 00000803"):
        load_images(str(tmp_path))
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is damaged: 1 bytes of data where its header promises 2"):
        load_images(str(tmp_path))
    path.unlink()
    with pytest.raises(DataError, match="has no train-labels-idx1-ubyte"):
        load_images(str(tmp_path))


def write_data(folder: Path) -> None:
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", torch.zeros(2, 8, 8, dtype=torch.int64))
        write_idx(folder / f"{part}-labels-idx1-ubyte", torch.tensor([3, 9]))


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("train-images-idx3-ubyte", torch.zeros(2, 1, 1), "images of 1 x 1 pixels; allowed: at"),
        ("t10k-images-idx3-ubyte", torch.zeros(0, 8, 8), "holds no images"),
        ("train-images-idx3-ubyte", torch.zeros(2, 0, 8), "images of 0 x 8 pixels"),
        ("t10k-labels-idx1-ubyte", torch.tensor([3, 10]), "the label 10; allowed: 0 to 9"),
        ("train-labels-idx1-ubyte", torch.zeros(0), "holds no labels"),
    ],
)
def test_idx_files_that_cannot_be_used(
    tmp_path: Path, name: str, values: torch.Tensor, problem: str
) -> None:
    write_data(tmp_path)
    write_idx(tmp_path / name, values.long())
    with pytest.raises(DataError, match=re.escape(problem)) as caught:
        load_images(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_data(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(b"")
    with pytest.raises(DataError, match=f"{re.escape(str(path))} .* starts with nothing"):
        load_images(str(tmp_path))
    path.unlink()
    path = path.with_name(path.name + ".gz")
    for damaged in (packed[:-9], packed[:10] + b"\xff" * 20, b"no gzip", packed[:-5] + b"12345"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{re.escape(str(path))} cannot be read: "):
            load_images(str(tmp_path))


def result(variant: str, seed: int = 0) -> dict[str, object]:
    return {
        "settings": Settings(steps=2).as_dict(),
        "variant": variant,
        "seed": seed,
        "accuracy": 0.5,
        "parameters": 10,
        "step_seconds": None,
        "bytes_sent_per_step": 10.0,
        "codec_seconds_per_step": 0.0,
        "round_off_error": None,
        "loss_curve": [[1, 2.0], [2, None]],
        "accuracy_curve": [[1, 0.1], [2, 0.5]],
        "environment": {"torch": "2.0", "cores": 2, "threads_per_rank": 1, "kernels": "native"},
    }


def test_lines_that_are_no_results_are_ignored_and_counted(tmp_path: Path) -> None:
    good = result("float32")
    lines = ["123", "null", "[]", '"x"', "{}", "[" * 100_000, '{"settings": {', "\ufffd"]
    lines += [json.dumps({**good, "variant": []}), json.dumps({**good, "seed": None})]
    lines += [json.dumps({**good, "loss_curve": [[1]]}), json.dumps({**good, "environment": {}})]
    lines += [json.dumps({key: good[key] for key in good if key != left}) for left in good]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join([*lines, json.dumps(good), ""]))
    runs, ignored = finished(path, Settings(steps=2))
    assert runs == {("float32", 0): good}
    assert ignored == len(lines)


def test_report_of_a_folder_named_like_markup(tmp_path: Path) -> None:
    output = tmp_path / "o[/b]"
    output.mkdir(parents=True)
    complete = [json.dumps(result(variant.key)) for variant in variants("local")]
    (output / "results.jsonl").write_text("\n".join(["123", *complete, '{"variant": [']))
    printed = io.StringIO()
    report = run(
        Settings(steps=2), seeds=1, output=output, console=Console(file=printed, width=500)
    )
    assert f"2 lines of {output}/results.jsonl ignored: no complete result." in printed.getvalue()
    assert f"Report: {output}/report.html" in printed.getvalue()
    page = report.read_text(encoding="utf-8")
    assert "<title>Gradients in narrow formats: scikit-learn digits</title>" in page
    assert re.search(
        r"Made on \d{4}-\d\d-\d\d .* with narrowgauge [\d.]+\S* and torch 2.0. Data set: ", page
    )
