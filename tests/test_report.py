from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from narrowgauge import report
from narrowgauge.ledger import Ledger

PNG = b"\x89PNG\r\n\x1a\n"


def example_table() -> report.Table:
    return report.Table("A <title>", ["name", "bits"], [["e4m3", "8"], ["a & b", "4"]], ["A note."])


def example_figure() -> report.Figure:
    lines = [
        report.Series("one", [1, 2, 3], [3.0, 2.0, float("nan")]),
        report.Series("two", [1, 2, 3], [3.0, 2.0, 1.0], [2.0, 1.0, 0.5], [4.0, 3.0, 2.0], True),
    ]
    return report.curves(
        lines, caption='What "is" seen', x_label="step", y_label="loss", log_y=True
    )


def test_table_for_the_terminal_shows_every_cell() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(example_table().rich())
    text = console.export_text()
    for part in ("A <title>", "name", "bits", "e4m3", "a & b", "A note."):
        assert part in text


def test_table_as_markdown_keeps_cells_apart() -> None:
    table = report.Table("t", ["name", "bytes"], [["a|b", "8 *"]], ["* computed"])
    assert table.markdown() == ("| name | bytes |\n|---|---:|\n| a\\|b | 8 \\* |\n\n\\* computed\n")


def test_table_refuses_a_row_of_another_length() -> None:
    with pytest.raises(
        ValueError, match=r"the row \['e4m3'\] has 1 cells; .* 2 columns: name, bits"
    ):
        report.Table("t", ["name", "bits"], [["e4m3"]])


def test_figures_are_drawn_for_light_and_dark(tmp_path: Path) -> None:
    figure = example_figure()
    assert figure.light.startswith(PNG)
    assert figure.dark is not None
    assert figure.dark.startswith(PNG)
    assert figure.dark != figure.light
    assert figure.save(tmp_path / "figure.png").read_bytes() == figure.light


def test_labels_and_cells_are_no_markup() -> None:
    label = "$x_{[/b]$"
    series = [report.Series(label, [1, 2], [1.0, 2.0])]
    figure = report.curves(series, caption="c", x_label=label, y_label=label)
    assert figure.light.startswith(PNG)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.Table(label, [label], [[label]], [label]).rich())
    assert console.export_text().count(label) == 4


def test_number_lines_refuse_wide_formats() -> None:
    assert report.number_lines(["e3m0", "int4"], caption="c").light.startswith(PNG)
    with pytest.raises(ValueError, match="bf16 cannot be drawn"):
        report.number_lines(["bf16"], caption="c")


def test_page_is_self_contained(tmp_path: Path) -> None:
    path = report.write_html(
        tmp_path / "report.html",
        title="One & only",
        introduction=["First <b>."],
        parts=[example_table(), example_figure()],
    )
    page = path.read_text(encoding="utf-8")
    tags: list[str] = []
    links: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            links.extend(v or "" for k, v in attrs if k in ("src", "srcset", "href", "action"))

    Reader().feed(page)
    assert not {"script", "link", "iframe", "object"} & set(tags)
    assert len(links) == 2
    for link in links:
        head, _, data = link.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
    assert not re.search(r"https?:|@import|url\(", page)
    assert "One &amp; only" in page
    assert "First &lt;b&gt;." in page
    assert "a &amp; b" in page
    assert "prefers-color-scheme: dark" in page


def test_parameters_show_bytes_times_and_the_error_of_replicas() -> None:
    ledger = Ledger()
    for seconds in (0.001, 0.003):
        ledger.record(
            "parameters",
            bytes_sent=5_000,
            codec_seconds=seconds,
            wire_seconds=2 * seconds,
            wait_seconds=0.0125,
        )
    rank_0 = {**ledger.as_dict()["parameters"], "error": 7.2e-6}
    rank_1 = {**rank_0, "wait_seconds_per_step": None, "error": 0.0}
    table = report.parameters({"rank 0": rank_0, "rank 1": rank_1})
    assert [tuple(row) for row in table.rows] == [
        ("rank 0", "2", "5.0 kB", "2.00 ms", "4.00 ms", "12.50 ms", "7.2e-06"),
        ("rank 1", "2", "5.0 kB", "2.00 ms", "4.00 ms", "–", "0.0e+00"),
    ]
    assert "Updated parameters" in table.html()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (37469, "37.5 kB"), (26e6, "26.0 MB")],
)
def test_bytes_text(count: float, text: str) -> None:
    assert report.bytes_text(count) == text


def test_mean_and_deviation() -> None:
    assert report.mean_and_deviation([2.0]) == (2.0, 0.0)
    assert report.mean_and_deviation([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
