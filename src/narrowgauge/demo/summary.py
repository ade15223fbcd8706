"""From the demo's runs to its table, figures and page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowgauge.demo.settings import Settings, Variant
from narrowgauge.report import (
    Figure,
    Series,
    Table,
    bytes_text,
    curves,
    mean_and_deviation,
    write_html,
)

_NONE = "–"


def comparison(
    settings: Settings, data: str, variants: Sequence[Variant], runs: Sequence[dict[str, Any]]
) -> Table:
    """The demo's one table: a row per variant, means over its seeds.

    Args:
        settings: of the runs.
        data: name of the data set.
        variants: the rows, in order; each needs at least one run.
        runs: what :func:`narrowgauge.demo.training.train` returned.
    """
    rows = []
    for variant in variants:
        its_runs = _of(variant, runs)
        mean, deviation = mean_and_deviation([100 * run["accuracy"] for run in its_runs])
        seconds = [run["step_seconds"] for run in its_runs if run["step_seconds"] is not None]
        errors = [run["round_off_error"] for run in its_runs if run["round_off_error"] is not None]
        codec = statistics.fmean(run["codec_seconds_per_step"] for run in its_runs)
        step = statistics.median(seconds) if seconds else None
        computed = "" if variant.narrowgauge else " *"
        rows.append(
            [
                variant.label,
                f"{mean:.1f} ± {deviation:.1f} %" if len(its_runs) > 1 else f"{mean:.1f} %",
                bytes_text(its_runs[0]["bytes_sent_per_step"]) + computed,
                _NONE if step is None else f"{step * 1e3:.1f} ms",
                _NONE if step is None or not codec else f"{codec / step:.1%}",
                f"{statistics.fmean(errors):.2%}" if errors else _NONE,
            ]
        )
    seeds = len(_of(variants[0], runs))
    where = runs[0]["environment"]
    return Table(
        "The same training, its gradients sent in different formats",
        ["gradients", "accuracy", "sent", "step time", "codec", "round-off"],
        rows,
        [
            f"{data}; {settings.ranks} ranks on loopback, {settings.steps} steps of "
            f"{settings.batch} images. Accuracy: on test images, mean ± standard deviation over "
            f"{seeds} seed{'s' * (seeds > 1)}.",
            "APS local: each rank scales each layer by its own power of two. APS shared: the ranks "
            "agree on it first, as published.",
            "Sent: by each rank in a step, counted by the ledger; * computed for a ring all-reduce "
            f"of {runs[0]['parameters']:,} numbers.",
            "Step time: median. Codec: rounding, packing, summing and unpacking, as a share of it "
            "(part of it while other work goes on).",
            "Round-off: mean of |exact − sent| / |exact| over the elements with exact ≠ 0; one "
            "that vanishes counts as 100 %.",
            f"torch {where['torch']}, {where['cores']} cores, {where['threads_per_rank']} thread"
            f"{'s' * (where['threads_per_rank'] > 1)} per rank, kernels: {where['kernels']}.",
        ],
    )


def figures(variants: Sequence[Variant], runs: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """Training loss and test accuracy by step, as ``{"loss": …, "accuracy": …}``."""
    return {
        "loss": curves(
            [_series(variant, runs, "loss_curve", 1) for variant in variants],
            caption="Training loss by step, mean over the seeds; the bands reach from the best to "
            "the worst. Dashed: without scaling.",
            x_label="step",
            y_label="training loss",
            log_y=True,
        ),
        "accuracy": curves(
            [_series(variant, runs, "accuracy_curve", 100) for variant in variants],
            caption="Test accuracy by step, mean over the seeds; the bands reach from the worst "
            "to the best. Dashed: without scaling.",
            x_label="step",
            y_label="test accuracy, %",
            y_range=(0, 102),
        ),
    }


def write_report(
    output: Path,
    settings: Settings,
    data: str,
    variants: Sequence[Variant],
    runs: Sequence[dict[str, Any]],
) -> Path:
    """Write ``loss.png``, ``accuracy.png``, ``table.md`` and ``report.html`` into ``output``.

    Returns:
        Path of the HTML file.
    """
    drawn = figures(variants, runs)
    for name, figure in drawn.items():
        figure.save(output / f"{name}.png")
    table = comparison(settings, data, variants, runs)
    (output / "table.md").write_text(table.markdown(), encoding="utf-8")
    return write_html(
        output / "report.html",
        title=f"Gradients in narrow formats: {data}",
        introduction=[
            "Data-parallel training sends every gradient over the network in every step. Here one "
            "small convolutional network was trained several times from the same initial weights, "
            "on the same images in the same order; only the format of the gradients on the wire "
            "differs.",
            "A narrow format covers a narrow range. Gradients are small, so without scaling most "
            "of them are rounded to zero, and the fewer exponent bits, the more. Auto-precision "
            "scaling (APS) multiplies each layer by a power of two before rounding, which itself "
            "rounds nothing, and divides by it afterwards.",
            "All ranks ran on one machine, where sending is nearly free: read the bytes as what a "
            "slower network would be spared, not the step times as what it would gain.",
            _made_with(data, runs),
        ],
        parts=[table, *drawn.values()],
    )


def _made_with(data: str, runs: Sequence[dict[str, Any]]) -> str:
    """When, with what and from what the page was made."""
    torch = ", ".join(sorted({run["environment"]["torch"] for run in runs}))
    return (
        f"Made on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} with narrowgauge "
        f"{version('narrowgauge')} and torch {torch}. Data set: {data}."
    )


def _of(variant: Variant, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if run["variant"] == variant.key]


def _series(variant: Variant, runs: Sequence[dict[str, Any]], curve: str, factor: float) -> Series:
    """The mean curve of a variant's seeds and the band between its extremes."""
    its_curves = [run[curve] for run in _of(variant, runs)]
    by_step = [
        [factor * float("nan" if value is None else value) for _, value in points]
        for points in zip(*its_curves, strict=True)
    ]
    return Series(
        variant.label,
        [step for step, _ in its_curves[0]],
        [statistics.fmean(values) for values in by_step],
        [min(values) for values in by_step],
        [max(values) for values in by_step],
        dashed=variant.narrowgauge and not variant.scaled,
    )
