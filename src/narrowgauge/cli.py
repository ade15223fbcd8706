"""The command line: ``narrowgauge demo``, ``formats``, ``predict``, ``plan``, ``search`` and more.

Errors that a user can mend are one sentence and exit code 2; a traceback is a fault of ours.
Imports that take time (torch's launcher, scikit-learn) are made by the command that needs them.
"""

from __future__ import annotations

import contextlib
import enum
import io
import math
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from narrowgauge import cli_plan, costmodel
from narrowgauge.cli_search import HELP as SEARCH_HELP
from narrowgauge.cli_search import search
from narrowgauge.collectives.link import Link
from narrowgauge.costmodel import Prediction
from narrowgauge.costmodel.networks import NETWORKS
from narrowgauge.costmodel.prediction import bandwidth_text
from narrowgauge.formats import (
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    format_of,
    known_formats,
)
from narrowgauge.report import Figure, Series, Table, bytes_text, curves

app = typer.Typer(
    name="narrowgauge",
    help="Every number that training moves, in the narrowest format that still converges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(help=SEARCH_HELP)(search)
app.add_typer(cli_plan.app, name="plan")
_console = Console()
_errors = Console(stderr=True)
_NONE = "–"


class ScaleChoice(str, enum.Enum):
    """The choices of ``--scale``."""

    local = "local"
    shared = "shared"


def _show_version(wanted: bool) -> None:
    if wanted:
        _console.print(f"narrowgauge {version('narrowgauge')}", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """What can be said before a command."""


@app.command()
def demo(
    data: Annotated[
        str,
        typer.Option(help="digits, fashion-mnist, or a folder with IDX files (.gz or not)."),
    ] = "digits",
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per variant.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps per run.")] = 330,
    scale: Annotated[
        ScaleChoice,
        typer.Option(
            help="How the scaled variants scale: each rank for itself, or as published (shared)."
        ),
    ] = ScaleChoice.local,
    output: Annotated[
        Path, typer.Option(help="Folder for report.html, table.md, PNG curves and results.jsonl.")
    ] = Path("narrowgauge-demo"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Repeat runs that the folder holds already.")
    ] = False,
) -> None:
    """Train a small network on real data, gradients in several formats; compare and report."""
    from narrowgauge import demo as demo_package

    try:
        demo_package.run(
            demo_package.Settings(data=data, ranks=ranks, steps=steps, scale=scale.value),
            seeds=seeds,
            output=output,
            fresh=fresh,
            console=_console,
        )
    except demo_package.StoppedBySignalError as stopped:
        _fail(str(stopped), 128 + stopped.signal)
    except demo_package.RanksFailedError as error:
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        _fail(f"{error}; narrowgauge doctor says what is missing and how to get it", 2)
    except (demo_package.DataError, ValueError, OSError) as error:
        _fail(str(error), 2)


@app.command()
def formats(
    name: Annotated[
        str | None, typer.Argument(help="A format, such as e4m3, bf16, e3m5, int4, mxfp8_e4m3.")
    ] = None,
) -> None:
    """List the known number formats, or show one format and its values."""
    if name is None:
        _console.print(_format_table(list(known_formats().values())).rich())
        _console.print(
            "Any other format by its name: eXmY (X ≤ 8, Y ≤ 23; suffix fn, fnuz, finite), intN, "
            "or element@block such as int4@64.",
            markup=False,
        )
        return
    try:
        format = format_of(name)
        scalar = format.element if isinstance(format, BlockFormat) else format
        table, details = _format_table([format]), _details(format)
        values = _value_lines(scalar, _console.width) if scalar.bits <= 8 else None
    except (ValueError, TypeError, OverflowError) as error:
        _fail(str(error), 2)
    _console.print(table.rich())
    for line in details:
        _console.print(line, markup=False, highlight=False)
    if values is not None:
        _console.print(f"\nCodes and values of {scalar.name}:", markup=False)
        _console.print(values, markup=False, highlight=False, soft_wrap=True)


@app.command()
def calibrate(
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine; leave it out under torchrun."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements; medians are kept.")] = 5,
    output: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path("link.json"),
) -> None:
    """Measure latency, bandwidth and codec between ranks, for predict --calibration."""
    from narrowgauge.costmodel.calibration import CalibrationError
    from narrowgauge.costmodel.calibration import calibrate as measure

    try:
        found = measure(nproc, repeats)
        if found is None:  # the first rank reports for all
            return
        found.save(output)
    except (CalibrationError, OSError) as error:
        _fail(str(error), 2)
    _console.print(_link_table(found.link, found.ranks).rich())
    _console.print(f"Written to {output}", markup=False, soft_wrap=True)


@app.command()
def predict(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(NETWORKS)}.")],
    nodes: Annotated[int, typer.Option(help="How many train together, 1 to 4096.")],
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a node's link, such as 10gbit; needed unless calibrated.")
    ] = None,
    format: Annotated[str, typer.Option(help="Of the compressed gradients.")] = "e5m2",
    baseline: Annotated[str, typer.Option(help="What to compare with: fp32 or bf16.")] = "fp32",
    calibration: Annotated[
        Path | None, typer.Option(help="A file of narrowgauge calibrate.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Microseconds of a small message; 50 unless calibrated.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="Of the compressed all-reduce: two-shot, ring or two-level.")
    ] = "two-shot",
    baseline_algorithm: Annotated[
        str, typer.Option(help="Of the baseline's: ring, two-shot or two-level.")
    ] = "ring",
    group_size: Annotated[int, typer.Option(help="Nodes per group of a two-level one.")] = 16,
    compute_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of forward and backward pass; else from batch, tflops."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples per node and step.")] = 32,
    tflops: Annotated[float, typer.Option(help="10^12 operations a node makes per second.")] = 10.0,
    at_least: Annotated[float, typer.Option(help="Worth it from how many percent on.")] = 5.0,
    output: Annotated[Path | None, typer.Option(help="A PNG: step time by bandwidth.")] = None,
) -> None:
    """Say what a training step takes over a network, and whether a narrow format is worth it."""
    from narrowgauge.costmodel.calibration import Calibration, CalibrationError

    try:
        link = None if calibration is None else Calibration.load(calibration).link
        given = bandwidth or (8 * link.bytes_per_second if link else None)

        def at(nodes: int, bandwidth: float | str | None) -> Prediction:
            return costmodel.predict(
                model,
                nodes=nodes,
                bandwidth=bandwidth,
                latency=None if latency_us is None else latency_us * 1e-6,
                link=link,
                format=format,
                baseline=baseline,  # type: ignore[arg-type]  # checked there
                algorithm=algorithm,  # type: ignore[arg-type]
                baseline_algorithm=baseline_algorithm,  # type: ignore[arg-type]
                group_size=group_size,
                compute_seconds=None if compute_ms is None else compute_ms * 1e-3,
                batch=batch,
                operations_per_second=tflops * 1e12,
                at_least=at_least / 100,
            )

        asked = at(nodes, bandwidth)
        grouped = "two-level" in (algorithm, baseline_algorithm)
        smallest = group_size if grouped else 1
        counts = [smallest << power for power in range(1, 13) if smallest << power < nodes]
        by_nodes = [at(count, bandwidth) for count in counts] + [asked]
        rates = sorted({1e8, 1e9, 1e10, 2.5e10, 1e11, costmodel.bits_per_second(given or 0)})
        by_rate = [at(nodes, rate) for rate in rates]
        if output is not None:
            _step_figure(asked, [at(nodes, 1e8 * 10 ** (n / 10)) for n in range(31)]).save(output)
    except (CalibrationError, ValueError, OSError) as error:
        _fail(str(error), 2)
    where = bandwidth_text(asked.bandwidth)
    _console.print(_step_table(f"{asked.model} at {where}", "nodes", by_nodes).rich())
    _console.print(_step_table(f"{asked.model} on {nodes} nodes", "bandwidth", by_rate).rich())
    _console.print(
        f"Computation: {asked.compute_seconds * 1e3:.4g} ms a step"
        f"{'' if compute_ms else ', estimated; --compute-ms takes a measured one'}.",
        markup=False,
    )
    _console.print(asked.worth_it, markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """Say which parts are in use here, what is missing, and how to get it."""
    from narrowgauge.doctor import examine

    findings = examine()
    grid = RichTable.grid(padding=(0, 2))
    for finding in findings:
        grid.add_row(Text(finding.part, style="bold"), Text(finding.found))
    _console.print(grid)
    advice = [finding.advice for finding in findings if finding.advice]
    _console.print()
    for line in advice or ["Nothing is missing."]:
        _console.print(line, markup=False, highlight=False)


def main() -> None:
    """Entry point of the ``narrowgauge`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a "?" rather than no table at all
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # What could not be written is still in the buffer: Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error.__context__, SystemExit) or not error.__context__.code:
            _complain(f"the output cannot be written: {error.strerror or error}")
        sys.exit(1)


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told
        _errors.print(Text(message), soft_wrap=True)


def _fail(message: str, code: int) -> NoReturn:
    _complain(message)
    raise typer.Exit(code)


def _link_table(link: Link, ranks: int) -> Table:
    rows = [
        ["latency of an exchange", f"{link.latency * 1e6:.4g} µs"],
        ["bandwidth", bandwidth_text(8 * link.bytes_per_second)],
        ["codec, float32", f"{link.codec_bytes_per_second / 1e9:.3g} GB/s"],
        ["latency of a step of Gloo's ring", f"{link.float32_latency * 1e6:.4g} µs"],
        ["bandwidth of Gloo's ring", bandwidth_text(8 * link.float32_bytes_per_second)],
        ["wire time that hides behind work", f"{link.wire_overlap:.0%}"],
        ["codec time that hides behind work", f"{link.codec_overlap:.0%}"],
    ]
    return Table(f"The link between {ranks} ranks", ["what", "measured"], rows)


def _step_table(title: str, first: str, predictions: list[Prediction]) -> Table:
    some = predictions[0]
    rows = [
        [
            str(found.nodes) if first == "nodes" else bandwidth_text(found.bandwidth),
            *(f"{s.seconds * 1e3:.4g}" for s in (found.float32, found.bf16, found.narrow)),
            f"{found.narrow.exposed_seconds * 1e3:.4g}",
            bytes_text(found.narrow.bytes_sent),
            str(found.narrow.steps),
            f"{found.speed_up:.2f}",
        ]
        for found in predictions
    ]
    columns = [first, "fp32", "bf16", some.format, "exposed", "sent", "steps", "speed-up"]
    notes = [
        f"Milliseconds a step; fp32 and bf16 by {some.baseline_algorithm}, {some.format} by "
        f"{some.algorithm}. Exposed (ms that the backward pass does not hide), sent (by the "
        f"busiest node), steps (of an all-reduce): in {some.format}. Speed-up: to {some.baseline}."
    ]
    return Table(title, columns, rows, notes)


def _step_figure(asked: Prediction, by_rate: list[Prediction]) -> Figure:
    x = [found.bandwidth / 1e9 for found in by_rate]
    lines = [
        ("fp32", [found.float32.seconds * 1e3 for found in by_rate]),
        ("bf16", [found.bf16.seconds * 1e3 for found in by_rate]),
        (asked.format, [found.narrow.seconds * 1e3 for found in by_rate]),
        ("computation alone", [found.compute_seconds * 1e3 for found in by_rate]),
    ]
    return curves(
        [Series(label, x, y, dashed=label == "computation alone") for label, y in lines],
        caption=asked.worth_it,
        x_label="bandwidth of a node's link (Gbit/s)",
        y_label="predicted step (ms)",
        log_x=True,
        log_y=True,
    )


def _format_table(formats: list[Format]) -> Table:
    rows = []
    for format in formats:
        scalar = format.element if isinstance(format, BlockFormat) else format
        subnormal = scalar.smallest_subnormal if isinstance(scalar, FloatFormat) else None
        normal = scalar.smallest_normal if isinstance(scalar, FloatFormat) else scalar.smallest
        rows.append(
            [
                format.name,
                f"{format.bits:g}",
                f"{scalar.largest:.5g}",
                f"{normal:.3g}",
                _NONE if subnormal is None else f"{subnormal:.3g}",
                f"{scalar.epsilon:.3g}",
                _specials(scalar),
            ]
        )
    notes = []
    if any(isinstance(format, BlockFormat) for format in formats):
        notes = [
            "Block formats (mx…, element@block): the numbers are the element's, to be multiplied "
            "by the block's scale; bits include the scale's share."
        ]
    return Table(
        "Number formats",
        [
            "name",
            "bits",
            "largest",
            "smallest normal",
            "smallest subnormal",
            "epsilon",
            "specials",
        ],
        rows,
        notes,
    )


def _specials(format: FloatFormat | IntFormat) -> str:
    present = [
        word
        for word, has in (
            ("-0", format.has_negative_zero),
            ("∞", format.has_infinity),
            ("NaN", format.has_nan),
        )
        if has
    ]
    return " ".join(present) or "none"


def _details(format: Format) -> list[str]:
    if isinstance(format, BlockFormat):
        return [
            f"Blocks of {format.block_size} {format.element.name} elements share one "
            f"{format.scale.name} scale."
        ]
    if isinstance(format, IntFormat):
        return [
            f"Symmetric integers from -{format.largest:g} to {format.largest:g}; the code of "
            f"-{format.largest + 1:g} is never produced."
        ]
    lines = [
        f"{'1 sign bit, ' if format.signed else 'No sign, '}{format.exponent_bits} exponent bits "
        f"(bias {format.bias}), {format.mantissa_bits} mantissa bits; specials: {format.specials}.",
        f"Normal numbers: 2**{format.min_exponent} to {format.largest:g} (below "
        f"2**{format.max_exponent + 1}); relative rounding error at most "
        f"2**-{format.mantissa_bits + 1}.",
    ]
    if format.signed:
        threshold, inclusive = format.overflow_threshold
        lines.append(
            f"Magnitudes {'from' if inclusive else 'above'} {threshold:g} on round beyond the "
            f"largest number, to {'infinity' if format.has_infinity else 'the largest number'} "
            "unless told otherwise."
        )
    if format.torch_dtype is not None:
        lines.append(f"The same numbers as {format.torch_dtype}.")
    return lines


def _value_lines(format: FloatFormat | IntFormat, width: int) -> str:
    """Codes in hexadecimal and their values; 8, 4, 2 or 1 on a line, as ``width`` allows."""
    cells = [
        f"{code:02x} {_value(value):>10}" for code, value in enumerate(format.values().tolist())
    ]
    across = next(count for count in (8, 4, 2, 1) if count * 16 <= max(width, 16))
    return "\n".join("   ".join(cells[at : at + across]) for at in range(0, len(cells), across))


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.5g}"


if __name__ == "__main__":
    main()
