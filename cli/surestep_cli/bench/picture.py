"""Charts of a measurement: throughput over time and the distribution of latencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from surestep_cli.terminal.pictures import bar, sparkline

if TYPE_CHECKING:
    from .load import LoadReport

_BAR_WIDTH = 40
_SHOWN = (0, 25, 50, 75, 90, 95, 100)  # percentiles, in characters
_STEP = 5  # of the percentiles in a report
_WIDTH, _HEIGHT, _MARGIN, _TOP = 360, 200, 44, 40  # of a panel
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 }
rect.back { fill: #fff } .axis { stroke: #8888; fill: none }
.line { stroke: #1668c7; fill: none; stroke-width: 2 }
.bars { fill: #1668c7 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } rect.back { fill: #16181d } .line { stroke: #6cb2ff } .bars { fill: #6cb2ff }
}
"""


class _Panel(NamedTuple):
    """A chart: values by time in bars, or by percentile in a line."""

    title: str
    values: Sequence[float]
    bars: bool
    left: str  # what stands below the ends of the horizontal axis
    right: str


def in_characters(report: LoadReport, *, ascii_only: bool) -> Iterator[str]:
    """Yield lines for a terminal; none where nothing was measured."""
    speeds = report.tok_s_over_time
    if any(speeds):
        line = sparkline(speeds, ascii_only=ascii_only)
        yield f"tok/s over {report.wall_s:.1f} s, up to {max(speeds):.0f}:"
        yield f"  {line.rstrip()}"
    for title, values in (
        ("time to first token", report.ttft_quantiles_ms),
        ("between chunks", report.itl_quantiles_ms),
    ):
        if values and values[-1] > 0:
            yield f"{title}, percentiles in ms:"
            for percent in _SHOWN:
                value = values[percent // _STEP]
                drawn = bar(value / values[-1], _BAR_WIDTH, ascii_only=ascii_only)
                yield f"  {percent:3d} {value:9.1f} {drawn}"


def to_svg(report: LoadReport) -> str:
    """Return three charts side by side."""
    panels = [
        _Panel("output, tok/s", report.tok_s_over_time, True, "0 s", f"{report.wall_s:.1f} s"),
        _Panel("time to first token, ms", report.ttft_quantiles_ms, False, "p0", "p100"),
        _Panel("between chunks, ms", report.itl_quantiles_ms, False, "p0", "p100"),
    ]
    width, height = len(panels) * (_WIDTH + _MARGIN) + _MARGIN, _TOP + _HEIGHT + 2 * _MARGIN
    good = report.num_requests - report.num_errors
    title = (
        f"{report.model}: {good} of {report.num_requests} requests, "
        f"{report.concurrency} at a time, {report.output_tok_s:.1f} tok/s"
    )
    drawn = "".join(
        f'<g transform="translate({_MARGIN + i * (_WIDTH + _MARGIN)},{_TOP + _MARGIN})">'
        f"{''.join(_draw(panel))}</g>"
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        f'<style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>'
        f'<text class="title" x="{_MARGIN}" y="{_TOP}">{escape(title)}</text>{drawn}</svg>\n'
    )


def _draw(panel: _Panel) -> Iterator[str]:
    top = max(panel.values, default=0.0)
    yield f'<text class="title" y="-10">{escape(panel.title)}</text>'
    yield f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/>'
    yield f'<text y="{_HEIGHT + 16}">{escape(panel.left)}</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{escape(panel.right)}</text>'
    if top <= 0:
        yield f'<text x="8" y="{_HEIGHT - 8}">nothing was measured</text>'
        return
    yield f'<text x="4" y="12">{top:.1f}</text>'
    heights = [_HEIGHT * (1 - value / top) for value in panel.values]
    if panel.bars:
        step = _WIDTH / len(heights)
        for i, y in enumerate(heights):
            yield (
                f'<rect class="bars" x="{i * step:.1f}" y="{y:.1f}" width="{step * 0.85:.1f}" '
                f'height="{_HEIGHT - y:.1f}"/>'
            )
        return
    step = _WIDTH / max(len(heights) - 1, 1)
    points = " ".join(f"{i * step:.1f},{y:.1f}" for i, y in enumerate(heights))
    yield f'<polyline class="line" points="{points}"/>'
