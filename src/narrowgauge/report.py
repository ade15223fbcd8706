"""What a person reads at the end: tables for the terminal, figures, and one HTML file.

The HTML file holds everything it shows (figures are inline, there is no script and nothing is
fetched), so it can be mailed, archived and opened in ten years. Figures are drawn twice, for light
and for dark screens; the reader's browser picks one. Everything here takes plain numbers and text:
it knows neither training nor torch.distributed.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from narrowgauge.formats import FloatFormat, FormatLike, IntFormat, format_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

    Draw = Callable[[MatplotlibFigure, str], None]

# Okabe and Ito's colours: told apart by colour-blind readers too. The first is the text colour.
_COLOURS = ["", "#999999", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9"]


@dataclass(frozen=True)
class Table:
    """A table of text: for the terminal, as HTML or as Markdown.

    Args:
        title: one line above the table.
        columns: the headings; the first column is aligned left, all others right.
        rows: one sequence of cells per row, as many cells as columns.
        notes: sentences below the table: what was measured, and how.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"the row {list(row)} has {len(row)} cells; the table {self.title!r} has "
                    f"{len(self.columns)} columns: {', '.join(self.columns)}"
                )

    def rich(self) -> RichTable:
        """The table for a terminal, to be printed with ``rich.console.Console().print``."""
        table = RichTable(
            title=Text(self.title, style="table.title"),  # Text: nothing here is markup
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        for position, column in enumerate(self.columns):
            first = position == 0
            table.add_column(
                Text(column), justify="left" if first else "right", vertical="bottom", no_wrap=first
            )
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        if self.notes:
            table.caption = Text("\n".join(self.notes), style="table.caption")
        return table

    def markdown(self) -> str:
        """The table as Markdown, for a README or an issue: columns, rows, then the notes."""
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|---|" + "---:|" * (len(self.columns) - 1),
            *(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
                for row in self.rows
            ),
        ]
        notes = "\n".join(note.replace("*", "\\*") for note in self.notes)
        return "\n".join(lines).replace(" * |", " \\* |") + "\n" + (f"\n{notes}\n" if notes else "")

    def html(self) -> str:
        """The table as an HTML fragment."""
        head = "".join(f"<th scope=col>{html.escape(column)}</th>" for column in self.columns)
        body = "\n".join(
            "<tr>"
            + f"<th scope=row>{html.escape(row[0])}</th>"
            + "".join(_cell(cell) for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<h2>{html.escape(self.title)}</h2>\n<div class=wide><table>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n{notes}"
        )


@dataclass(frozen=True)
class Series:
    """One line of a figure.

    Args:
        label: its name in the legend.
        x: positions.
        y: values; a non-finite value leaves a gap.
        low: lower edge of a band around the line (for example the worst seed), or ``None``.
        high: upper edge of that band.
        dashed: drawn dashed, to set one kind of line apart from another.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture: PNG bytes for light screens and, where drawn, for dark ones.

    Args:
        caption: what is to be seen, in a sentence; also the text for readers who see no pictures.
        light: PNG on white.
        dark: PNG on near-black, or ``None``.
    """

    caption: str
    light: bytes = field(repr=False)
    dark: bytes | None = field(default=None, repr=False)

    def save(self, path: str | Path) -> Path:
        """Writes the light PNG to ``path`` and returns it."""
        path = Path(path)
        path.write_bytes(self.light)
        return path

    def html(self) -> str:
        """The figure as an HTML fragment with inline images."""
        dark = ""
        if self.dark is not None:
            dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_inline(self.dark)}">'
        caption = html.escape(self.caption)
        return (
            f'<figure><picture>{dark}<img src="{_inline(self.light)}" alt="{caption}"></picture>'
            f"<figcaption>{caption}</figcaption></figure>"
        )


def curves(
    series: Sequence[Series],
    *,
    caption: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Figure:
    """Draws lines over a common axis.

    Args:
        series: the lines, in the order of the legend.
        caption: see :class:`Figure`.
        x_label: what lies on the horizontal axis, with its unit.
        y_label: what lies on the vertical axis, with its unit.
        log_x: whether the horizontal axis is logarithmic.
        log_y: whether the vertical axis is logarithmic.
        y_range: lower and upper end of the vertical axis; ``None`` fits the lines.
    """

    def draw(figure: MatplotlibFigure, text_colour: str) -> None:
        axes = figure.add_subplot()
        for position, line in enumerate(series):
            colour = _COLOURS[position % len(_COLOURS)] or text_colour
            axes.plot(
                line.x,
                [value if math.isfinite(value) else math.nan for value in line.y],
                color=colour,
                linestyle="--" if line.dashed else "-",
                linewidth=1.6,
                label=_plain(line.label),
            )
            if line.low is not None and line.high is not None:
                axes.fill_between(
                    line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0
                )
        axes.set_xlabel(_plain(x_label))
        axes.set_ylabel(_plain(y_label))
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        if y_range is not None:
            axes.set_ylim(*y_range)
        axes.margins(x=0.01)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.4)

    return figure(draw, caption, size=(8.2, 4.0))


def number_lines(formats: Sequence[FormatLike], *, caption: str) -> Figure:
    """Draws where the positive numbers of narrow formats lie, one line per format.

    Args:
        formats: floating-point or integer formats of at most 8 bits, by name or object.
        caption: see :class:`Figure`.

    Raises:
        ValueError: a format is wider than 8 bits or a block format; too dense to be drawn.
    """
    from matplotlib.ticker import FuncFormatter

    narrow = []
    for like in formats:
        format = format_of(like)
        if not isinstance(format, FloatFormat | IntFormat) or format.bits > 8:
            raise ValueError(
                f"{format.name} cannot be drawn on a number line; allowed: float and integer "
                "formats of at most 8 bits"
            )
        narrow.append(format)

    def draw(figure: MatplotlibFigure, text_colour: str) -> None:
        axes = figure.add_subplot()
        for row, format in enumerate(narrow):
            _number_line(axes, row, format, _COLOURS[2 + row % 6], text_colour)
        axes.set_yticks(range(len(narrow)), [format.name for format in narrow])
        axes.set_ylim(len(narrow) - 0.4, -0.6)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(_power_of_two))
        axes.set_xlabel("positive numbers, each a stroke; short: subnormal (logarithmic scale)")
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)

    return figure(draw, caption, size=(8.2, 0.9 + 0.75 * len(narrow)))


def stalls(ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    """How long ranks waited for their inputs, and what to change, as a table.

    Args:
        ranks: by the rank's name, its stall report as plain numbers and text
            (``feed.stalls().as_dict()``).
    """
    columns = ("inputs", "steps", "waited", "p50", "p99", "for ranks", "step", "read", "wire")
    rows = []
    for name, found in ranks.items():
        seconds = (found[key] for key in ("wait_p50", "wait_p99"))
        stages = (found[key] for key in ("step", "read", "wire", "copy"))
        rows.append(
            (
                name,
                f"{found['steps']}",
                f"{found['wait_share']:.1%}",
                *(f"{value * 1e3:.2f} ms" for value in seconds),
                f"{found['ranks_share']:.1%}",
                *(f"{value * 1e3:.1f} ms" for value in stages),
                bytes_text(found["high_water_bytes"]),
            )
        )
    notes = [f"{name}: {found['sentence']}" for name, found in ranks.items()]
    return Table("Waiting for inputs", (*columns, "copy", "high water"), rows, notes)


def parameters(ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    """What it took to bring updated parameters to all ranks, and how far replicas are off.

    Args:
        ranks: by the rank's name, its ledger's means and its error, as plain numbers
            (``{**optimizer.ledger.as_dict()["parameters"], "error": optimizer.largest_error()}``).
    """
    columns = (
        "parameters",
        "steps",
        "sent per step",
        "coding",
        "wire",
        "waited",
        "replicas off by",
    )
    rows = []
    for name, found in ranks.items():
        seconds = (found[f"{key}_seconds_per_step"] for key in ("codec", "wire", "wait"))
        rows.append(
            (
                name,
                f"{found['steps']}",
                bytes_text(found["bytes_sent_per_step"]),
                *("–" if value is None else f"{value * 1e3:.2f} ms" for value in seconds),
                f"{found['error']:.1e}",
            )
        )
    note = (
        "Means per step. Coding and wire overlap; waited is what the step took beside its update. "
        "Replicas are off from float32 masters by that share of the largest master of the rank, "
        "until the next step, whose difference makes up for it."
    )
    return Table("Updated parameters", columns, rows, [note])


def write_html(
    path: str | Path, *, title: str, introduction: Sequence[str], parts: Sequence[Table | Figure]
) -> Path:
    """Writes one self-contained page: a title, paragraphs, then tables and figures in order.

    Args:
        path: where to; an existing file is replaced.
        title: heading and window title.
        introduction: paragraphs of plain text.
        parts: what follows.

    Returns:
        The path.
    """
    paragraphs = "\n".join(f"<p>{html.escape(text)}</p>" for text in introduction)
    body = "\n".join(part.html() for part in parts)
    page = (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n{paragraphs}\n{body}\n</main>\n</body>\n</html>\n"
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def bytes_text(count: float) -> str:
    """A number of bytes for people: ``"312 B"``, ``"74.9 kB"``, ``"26.0 MB"`` (1 kB = 1000 B)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value) of at least one number."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _number_line(
    axes: Axes, row: int, format: FloatFormat | IntFormat, colour: str, text_colour: str
) -> None:
    positive = [value for value in format.values().tolist() if 0 < value < math.inf]
    smallest_normal = format.smallest_normal if isinstance(format, FloatFormat) else 0.0
    for normal, half in ((True, 0.24), (False, 0.12)):
        chosen = [value for value in positive if (value >= smallest_normal) == normal]
        axes.vlines(chosen, row - half, row + half, color=colour, linewidth=1.1)
    axes.plot([min(positive), max(positive)], [row, row], color=colour, linewidth=0.6, alpha=0.6)
    axes.annotate(
        f"{format.smallest:.3g}",
        (min(positive), row - 0.28),
        ha="center",
        va="bottom",
        fontsize=7.5,
        color=text_colour,
    )
    axes.annotate(
        f"{format.largest:.5g}",
        (max(positive), row - 0.28),
        ha="center",
        va="bottom",
        fontsize=7.5,
        color=text_colour,
    )


def _cell(text: str) -> str:
    sentence = len(text) > 30 and " " in text  # wrapped, where numbers must not be
    return f"<td{' class=text' * sentence}>{html.escape(text)}</td>"


def _power_of_two(value: float, _: int | None = None) -> str:
    return f"$2^{{{round(math.log2(value))}}}$" if value > 0 else "0"


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign begins no formula."""
    return text.replace("$", "\\$")


def figure(draw: Draw, caption: str, *, size: tuple[float, float], dpi: int = 160) -> Figure:
    """Draws a picture twice, for light and for dark screens.

    Args:
        draw: called with an empty figure of matplotlib and the colour of text.
        caption: see :class:`Figure`.
        size: width and height in inches.
        dpi: pixels per inch.
    """
    # Imported only here: who draws nothing, such as the doctor, can do without matplotlib.
    from matplotlib import rc_context
    from matplotlib.figure import Figure as MatplotlibFigure

    pictures = []
    for background, text in (("white", "#1c1e21"), ("#16181b", "#e4e6e8")):
        colours: dict[Any, Any] = {
            "text.color": text,
            "axes.labelcolor": text,
            "axes.edgecolor": text,
            "xtick.color": text,
            "ytick.color": text,
            "figure.facecolor": background,
            "axes.facecolor": background,
            "font.size": 10,
        }
        with rc_context(colours):
            # Made without pyplot: it needs no window system and leaves the reader's backend alone.
            drawn = MatplotlibFigure(figsize=size, layout="constrained")
            draw(drawn, text)
            picture = io.BytesIO()
            drawn.savefig(picture, format="png", dpi=dpi)
        pictures.append(picture.getvalue())
    return Figure(caption, *pictures)


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --quiet: #5d646b; --line: #d9dde1;
  --ground: #fff; --stripe: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e8; --quiet: #9aa2aa; --line: #343a40;
  --ground: #16181b; --stripe: #1d2024; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 17px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 0.75rem; }
p { max-width: 44rem; margin: 0 0 0.9rem; }
.note, figcaption { color: var(--quiet); font-size: 0.85rem; line-height: 1.45; }
.note { margin: 0.4rem 0 0; max-width: 52rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 0.75rem; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
td.text { white-space: normal; text-align: left; min-width: 18rem; }
thead th { border-bottom: 2px solid var(--line); font-weight: 600; }
tbody th { font-weight: 500; white-space: nowrap; }
tbody tr { border-bottom: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: 2.5rem 0 0; }
img { display: block; width: 100%; height: auto; }
figcaption { margin-top: 0.5rem; }
@media print { main { padding: 0; } figure, table { break-inside: avoid; } }
"""
