"""``narrowgauge search``: the operator plan of a training that a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from narrowgauge.operators.replay import ReplayError
from narrowgauge.search.loop import SearchStoppedError, first_rank, run
from narrowgauge.search.report import alike, contenders, introduction, write_report
from narrowgauge.search.script import ScriptError, load

HELP = "\n\n".join(
    (  # one line each: they are broken as the terminal is wide
        "Find which operators may compute in a narrow format, while the model trains.",
        "The function takes nothing and returns a dict:",
        '- "model", and "optimizer", of its parameters',
        '- "loss", called as loss(model, batch)',
        '- "batches", a list or DataLoader, one epoch each time',
        '- to judge an epoch by: "held_out" (batches), or "evaluate" (a function; the lower, the '
        "better)",
        "Ctrl-C keeps what was found: the same command goes on. In the workdir lie then plan.json, "
        "report.html, network.png, and snapshot.pt with the trained model and its optimizer.",
    )
)


def search(
    script: Annotated[
        str, typer.Argument(help="A Python file and its function, such as train.py:build.")
    ],
    workdir: Annotated[
        Path, typer.Option(help="Where findings, plan and report are kept, and gone on from.")
    ] = Path("search"),
    formats: Annotated[
        str, typer.Option(help="Beside float32, the preferred first: bf16, fp16, or simulated.")
    ] = "bf16",
    memory_weight: Annotated[
        float, typer.Option(help="With 1, half the saved activations are worth half the time.")
    ] = 0.0,
    epochs: Annotated[int, typer.Option(help="To train at most, to find the plan.")] = 12,
    output: Annotated[
        Path | None, typer.Option(help="Where to write the plan as well, beside the workdir.")
    ] = None,
) -> None:
    """Find which operators may compute in a narrow format, while the model trains."""
    console = Console()
    if output is not None and not output.resolve().parent.is_dir():
        _fail(f"--output {str(output)!r} lies in no folder that exists; make it first", 2)
    if output is not None and output.is_dir():
        _fail(f"--output {str(output)!r} is a folder; name a file", 2)
    names = [name.strip() for name in formats.split(",") if name.strip()]
    try:
        plan = run(
            load(script),
            workdir=workdir,
            formats=names,
            memory_weight=memory_weight,
            epochs=epochs,
            console=console,
        )
        if not first_rank():
            return
        if output is not None:
            plan.save(output)
        page = write_report(workdir)
    except SearchStoppedError as stopped:
        _fail(str(stopped), 130 if stopped.interrupted else 1)
    except (ScriptError, ReplayError, ValueError, TypeError, OSError) as error:
        _fail(str(error), 2)
    console.print(alike(plan).rich())
    if plan.about.get("contenders"):
        console.print(contenders(plan).rich())
    for sentence in introduction(plan):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Written to {output or workdir / 'plan.json'} and {page}", markup=False)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(Text(message), soft_wrap=True)
    raise typer.Exit(code)
