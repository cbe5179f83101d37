"""Draw what peers.py measured: bars of output tokens per second, by concurrency and server."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

ROW = "output tok/s, c="  # and the concurrency: the rows of the table that are drawn
_COLOURS = ("#1668c7", "#d9822b", "#3a9d5d", "#8e5bb5", "#a33", "#777")
_WIDTH, _HEIGHT, _MARGIN, _GAP = 200, 200, 44, 0.3  # of a panel; share of it between its bars
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 }
rect.back { fill: #fff } .axis { stroke: #8888; fill: none } .value { text-anchor: middle }
@media (prefers-color-scheme: dark) { text { fill: #ddd } rect.back { fill: #16181d } }
"""

Rounds = Mapping[str, Sequence[Mapping[str, float]]]  # by server: figures of each round, by row


def to_svg(rounds: Rounds, caption: str) -> str:
    """Return a panel per concurrency, each with a bar per server: the median of its rounds."""
    rows = dict.fromkeys(
        row for all_figures in rounds.values() for f in all_figures for row in f if ROW in row
    )
    panels = "".join(
        f'<g transform="translate({_MARGIN + i * (_WIDTH + _MARGIN)},{2 * _MARGIN})">'
        f"{''.join(_panel(row, rounds))}</g>"
        for i, row in enumerate(rows)
    )
    width = len(rows) * (_WIDTH + _MARGIN) + _MARGIN
    height = _HEIGHT + 3 * _MARGIN + 20 * len(rounds)
    legend = "".join(
        f'<rect x="{_MARGIN}" y="{_HEIGHT + 3 * _MARGIN + 20 * i - 20}" width="12" height="12" '
        f'fill="{_colour(i)}"/><text x="{_MARGIN + 20}" '
        f'y="{_HEIGHT + 3 * _MARGIN + 20 * i - 10}">{escape(name)}</text>'
        for i, name in enumerate(rounds)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(caption)}">'
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>'
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN / 2}">{escape(caption)}</text>'
        f"{panels}{legend}</svg>\n"
    )


def _panel(row: str, rounds: Rounds) -> Iterator[str]:
    medians = [_median(row, figures) for figures in rounds.values()]
    top = max(medians) or 1.0
    step = _WIDTH / len(medians)
    yield f'<text class="title" y="-24">{escape(row)}</text>'
    yield f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>'
    for i, median in enumerate(medians):
        height, left = _HEIGHT * median / top, step * (i + _GAP / 2)
        yield (
            f'<rect x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{step * (1 - _GAP):.1f}" '
            f'height="{height:.1f}" fill="{_colour(i)}"/>'
            f'<text class="value" x="{step * (i + 0.5):.1f}" y="{_HEIGHT - height - 4:.1f}">'
            f"{median:.0f}</text>"
        )


def _median(row: str, figures: Sequence[Mapping[str, float]]) -> float:
    found = [f[row] for f in figures if row in f]
    return statistics.median(found) if found else 0.0


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
