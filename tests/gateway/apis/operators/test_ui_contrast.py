"""The colours of the status page can be told apart: WCAG 2.2, level AA, light and dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import surestep_gateway

THEME = (
    Path(surestep_gateway.__path__[0]) / "apis" / "operators" / "static" / "theme.css"
).read_text()
TEXT, SHAPE = 4.5, 3.0  # least contrast
_PAIRS = [
    *((text, ground, TEXT) for text in ("text", "muted") for ground in ("page", "panel", "sunken")),
    *((text, ground, TEXT) for text in ("text",) for ground in ("tint", "fault-tint")),
    ("muted", "tint", TEXT),
    *(("fault", ground, TEXT) for ground in ("panel", "page")),
    *(("accent", ground, TEXT) for ground in ("panel", "page")),
    ("on-accent", "accent", TEXT),
    *(("accent", ground, SHAPE) for ground in ("sunken", "tint")),
    *(("fault", ground, SHAPE) for ground in ("sunken", "fault-tint")),
    *(("edge", ground, SHAPE) for ground in ("panel", "sunken")),
]


def colours(theme: str) -> dict[str, str]:
    """Names and values; dark ones stand on the light ones."""
    light, dark = re.findall(r":root \{(.*?)\}", THEME, re.DOTALL)
    pattern = r"--([\w-]+): (#[0-9a-f]{6});"
    found = dict(re.findall(pattern, light))
    return found | dict(re.findall(pattern, dark)) if theme == "dark" else found


def luminance(colour: str) -> float:
    """Relative luminance of sRGB."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_measure() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("one", "other", "least"), _PAIRS)
def test_contrast(theme: str, one: str, other: str, least: float) -> None:
    palette = colours(theme)
    assert contrast(palette[one], palette[other]) >= least


def test_both_themes_have_every_colour() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", THEME, re.DOTALL)
    names = [set(re.findall(r"--([\w-]+): #", theme)) for theme in (light, dark)]
    assert names[0] == names[1] != set()
