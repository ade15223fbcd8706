"""A network drawn from its plan: modules are nested boxes, operators coloured by format.

Drawn from top to bottom in the order of the calls, as one reads the model's code. Beside each
operator stands its time in each format that was timed, and arcs mark where a tensor is cast. The
trade-off: a line for each operator, so large networks make long pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from narrowgauge.operators import OperatorPlan
from narrowgauge.operators.names import split_name
from narrowgauge.report import Figure, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.patches import Rectangle

# Okabe and Ito's, as in report.py; float32 is grey, what follows its operands is pale.
_KNOWN = {"fp32": "#999999", "bf16": "#0072B2", "fp16": "#009E73", "promote": "#d9dde1"}
_OTHERS = ["#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"]
_LINE = 0.19  # inches per operator
_LEVEL, _CELL, _ARCS, _BARS = 1.5, 3.2, 1.0, 3.3  # widths, inches
_PIXELS = 30_000  # more rows than this no viewer shows


def colours(formats: Sequence[str]) -> dict[str, str]:
    """A colour for each format, the same in every picture for fp32, bf16, fp16 and promote."""
    others = [name for name in dict.fromkeys(formats) if name not in _KNOWN]
    return {
        **{name: _KNOWN[name] for name in _KNOWN if name in formats},
        **{name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)},
    }


def network(plan: OperatorPlan) -> Figure:
    """Draws a plan.

    Args:
        plan: times are read from its evidence, arcs from ``about["edges"]``: pairs of numbers of
            operators, in the order of ``plan.names``, and elements.
    """
    names, formats = plan.names, plan.formats
    counts = {name: sum(f == name for f in formats.values()) for name in formats.values()}
    listed = ", ".join(f"{count} in {name}" for name, count in counts.items())
    timed = any(_seconds(plan, name) for name in names)
    caption = (
        f"The network, from top to bottom: {len(names)} operators, {listed}. Boxes at the left are "
        "modules"
        + (
            "; bars are milliseconds, forward and backward, alone, the number is that of the "
            "format taken."
            if timed
            else "."
        )
    )
    casts = cast_edges(plan)
    if casts:
        caption += f" Arcs: a tensor is cast on its way ({len(casts)})."
    levels = max((len(_modules(name)) for name in names), default=0)
    width = levels * _LEVEL + _CELL + (_ARCS if casts else 0.1) + (_BARS if timed else 0)
    height = max(2.0, (len(names) + 4) * _LINE)
    palette = colours([*counts, *(f for name in names for f in _seconds(plan, name))])

    def draw(drawn: MatplotlibFigure, text: str) -> None:
        axes = drawn.add_subplot()
        axes.set_xlim(-0.1, width + 0.1)
        axes.set_ylim(len(names) + 0.5, -3.5)
        axes.axis("off")
        for level in range(levels):
            _boxes(axes, names, level, text)
        left = levels * _LEVEL
        for row, name in enumerate(names):
            _operator(axes, row, left, name, palette[formats[name]])
        for source, target in casts:
            _arc(axes, left + _CELL, source, target, palette[formats[names[target]]])
        if timed:
            _bars(axes, plan, width - _BARS, palette, text)
        x = 0.0
        for name, colour in palette.items():
            x = _legend(axes, x, name, colour, text)

    return figure(draw, caption, size=(width + 0.2, height), dpi=min(120, int(_PIXELS / height)))


def cast_edges(plan: OperatorPlan) -> list[tuple[int, int]]:
    """Pairs of operators, by number, between which the plan casts a tensor.

    An operator that follows its operands has the format of what it was given last.
    """
    edges = [(int(edge[0]), int(edge[1])) for edge in plan.about.get("edges", [])]
    formats = list(plan.formats.values())
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        if formats[target] == "promote":
            formats[target] = formats[source]
    return [
        (source, target)
        for source, target in edges
        if formats[source] != formats[target]
        and "promote" not in (formats[source], formats[target])
    ]


def _seconds(plan: OperatorPlan, name: str) -> dict[str, float]:
    found: dict[str, float] = plan.evidence.get(name, {}).get("seconds", {})
    return found


def _modules(name: str) -> list[str]:
    path, _, _ = split_name(name)
    return path.split(".") if path else []


def _boxes(axes: Axes, names: Sequence[str], level: int, text: str) -> None:
    """The modules of one level: a box for each run of operators that lie in the same one."""
    for begin, end, label in _runs(names, level):
        axes.add_patch(_rectangle(level * _LEVEL + 0.03, begin - 0.42, _LEVEL - 0.06, end - begin))
        axes.text(
            level * _LEVEL + _LEVEL / 2,
            (begin + end - 1) / 2,
            _short(label, 20),
            ha="center",
            va="center",
            fontsize=7.5,
            color=text,
        )


def _runs(names: Sequence[str], level: int) -> Iterator[tuple[int, int, str]]:
    begin, current = 0, None
    for row, name in enumerate([*names, None]):
        modules = [] if name is None else _modules(name)
        here = tuple(modules[: level + 1]) if len(modules) > level else None
        if here != current:
            if current is not None:
                yield begin, row, current[-1]
            begin, current = row, here


def _rectangle(x: float, y: float, width: float, height: float) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x, y), width, height - 0.16, facecolor="#7f7f7f22", edgecolor="#7f7f7f", linewidth=0.6
    )


def _operator(axes: Axes, row: int, left: float, name: str, colour: str) -> None:
    from matplotlib.patches import Rectangle

    _, operator, call = split_name(name)
    box = Rectangle((left, row - 0.42), _CELL, 0.84, facecolor=colour, edgecolor="none")
    axes.add_patch(box)
    label = operator if call == 0 else f"{operator} #{call}"
    dark = colour in (_KNOWN["bf16"], _KNOWN["fp16"], "#D55E00")
    axes.text(
        left + 0.1,
        row,
        _short(label, 36),
        ha="left",
        va="center",
        fontsize=7.5,
        color="white" if dark else "#1c1e21",
    )


def _arc(axes: Axes, left: float, source: int, target: int, colour: str) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    reach = left + min(_ARCS - 0.1, 0.25 + 0.04 * abs(target - source))
    corners = [(left, source), (reach, source), (reach, target), (left, target)]
    curve = Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=1.2))


def _bars(axes: Axes, plan: OperatorPlan, left: float, palette: dict[str, str], text: str) -> None:
    most = max(max(_seconds(plan, name).values(), default=0.0) for name in plan.names)
    for row, name in enumerate(plan.names):
        seconds = _seconds(plan, name)
        thick = 0.8 / max(1, len(seconds))
        for number, (format, value) in enumerate(seconds.items()):
            length = (_BARS - 0.8) * value / most
            y = row - 0.4 + number * thick
            chosen = format == plan.formats[name]
            axes.barh(
                y + thick / 2,
                length,
                thick,
                left=left + 0.1,
                color=palette[format],
                alpha=1.0 if chosen else 0.45,
            )
        if seconds:
            own = seconds.get(plan.formats[name], max(seconds.values()))
            end = left + 0.15 + (_BARS - 0.8) * max(seconds.values()) / most
            axes.text(end, row, f"{own * 1e3:.2g}", fontsize=6.5, va="center", color=text)


def _legend(axes: Axes, x: float, name: str, colour: str, text: str) -> float:
    """One format; where the next one begins."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, -2.9), 0.25, 0.84, facecolor=colour, edgecolor="none"))
    axes.text(x + 0.32, -2.5, name, fontsize=8, va="center", color=text)
    return x + 0.6 + 0.09 * len(name)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]
