"""Small charts made of characters; plain ones where there is no UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS, _PLAIN_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def sparkline(values: Sequence[float], *, ascii_only: bool, most: float | None = None) -> str:
    """Return a character per value; the highest stands for `most`, or for the greatest value."""
    blocks = _PLAIN_BLOCKS if ascii_only else _BLOCKS
    top = most if most is not None else max(values, default=0.0)
    if top <= 0:
        return blocks[0] * len(values)
    steps = len(blocks) - 1
    levels = (min(steps, max(value > 0, round(steps * value / top))) for value in values)
    return "".join(blocks[level] for level in levels)


def bar(share: float, width: int, *, ascii_only: bool) -> str:
    """Return a bar of `width` characters, filled up to the share of 0 to 1."""
    full = round(min(max(share, 0.0), 1.0) * width)
    filled, rest = ("#", ".") if ascii_only else ("█", "░")
    return filled * full + rest * (width - full)
