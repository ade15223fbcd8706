"""``narrowgauge plan``: what an operator plan says, how two differ, and why a format was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from narrowgauge.operators.names import did_you_mean
from narrowgauge.operators.plan import OperatorPlan
from narrowgauge.report import Table
from narrowgauge.search.report import alike, introduction, reasons, text_of

app = typer.Typer(help="Show and compare operator plans.", no_args_is_help=True)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="A file of OperatorPlan.save.")]) -> None:
    """List a plan's operators, those of one signature and format in one row."""
    plan = _load(path)
    Console().print(alike(plan, shown=None).rich())
    for sentence in reasons(plan):
        Console().print(Text(sentence), soft_wrap=True)
    said = [f"Operators that are not named: {plan.default}. Fingerprint: {plan.fingerprint}."]
    if "decision" in plan.about:
        said = [*introduction(plan), *said]
    elif plan.about:
        said.append(text_of(plan.about))
    for sentence in said:
        Console().print(Text(sentence), soft_wrap=True)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """List operators whose formats differ; exit code 1 if there are any."""
    a, b = _load(first).formats, _load(second).formats
    rows = [
        [name, a.get(name, "–"), b.get(name, "–")]
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]
    if not rows:
        Console().print("The plans give all operators the same formats.")
        return
    Console().print(Table("Differences", ["operator", str(first), str(second)], rows).rich())
    raise typer.Exit(1)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="An operator, such as layers.0.attn::softmax#0.")],
    path: Annotated[Path, typer.Argument(help="A plan.")],
) -> None:
    """Say what one operator was given, its format, and why."""
    plan = _load(path)
    if name not in plan.formats:
        _fail(f"{path} has no operator {name!r}{did_you_mean(name, plan.names)}")
    rows = [
        ["format", plan.formats[name]],
        ["called", "outside the model" if name in plan.outside else "by the model"],
        ["signature", plan.signatures.get(name, "not recorded")],
    ]
    evidence = plan.evidence.get(name)
    if isinstance(evidence, dict):
        rows += [[key, text_of(value)] for key, value in evidence.items()]
    else:
        rows.append(["evidence", text_of(evidence) or "none"])
    rows.append(["measured on", text_of(plan.environment)])
    Console().print(Table(name, ["what", "is"], rows).rich())


def _load(path: Path) -> OperatorPlan:
    try:
        return OperatorPlan.load(path)
    except (ValueError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text(message), soft_wrap=True)
    raise typer.Exit(2)
