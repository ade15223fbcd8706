"""Draws docs/number_lines.png: where the numbers of e5m2, e4m3 and e3m0 lie."""

from pathlib import Path

from narrowgauge.report import number_lines

if __name__ == "__main__":
    figure = number_lines(
        ["e5m2", "e4m3", "e3m0"], caption="The positive numbers of e5m2, e4m3 and e3m0."
    )
    print(figure.save(Path(__file__).with_suffix(".png")))
