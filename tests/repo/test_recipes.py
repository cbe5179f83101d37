"""Check docs/change/extend.md: recipes are short, and one names the files of a parameter."""

from __future__ import annotations

import re

import pytest
from repo.source import ROOT, tracked

PAGE = (ROOT / "docs" / "change" / "extend.md").read_text()
HEADINGS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
PRODUCT_FILES = 7  # of a sampling parameter
PARAMETER = re.compile(r"\bfrequency(_penalty)?\b")
OTHER_FREQUENCIES = re.compile(r"rotary|rope|gguf")  # of sines


def section(heading: str) -> str:
    return PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]


def steps(heading: str) -> list[str]:
    numbered = re.split(r"^\d+\. ", section(heading), flags=re.MULTILINE)[1:]
    return [step.split("\n\n")[0] for step in numbered]


def named(text: str) -> list[str]:
    """Names of files in code quotes; a path may leave out its beginning."""
    return re.findall(r"`((?:\w+/)*\w+\.(?:py|proto|c))`", text)


def covers(text: str, file: str) -> bool:
    return any(f"/{file}".endswith(f"/{name}") for name in named(text))


@pytest.mark.parametrize("heading", HEADINGS)
def test_recipes_are_short(heading: str) -> None:
    assert 3 <= len(steps(heading)) <= 8


def test_the_recipe_of_a_sampling_parameter_names_every_file_of_one() -> None:
    """With `frequency_penalty` for one: where it must be, and where it reaches further."""
    heading = "A sampling parameter"
    files = [
        name
        for name in tracked()
        if name.endswith((".py", ".proto", ".c"))
        and not name.startswith(("tests/", "benchmarks/", "tools/", "research/", "examples/"))
        and "_pb2" not in name
        and not OTHER_FREQUENCIES.search(name)
        and PARAMETER.search((ROOT / name).read_text())
    ]
    assert [file for file in files if not covers(section(heading), file)] == []
    must = [file for file in files if covers("".join(steps(heading)), file)]
    assert len(must) == PRODUCT_FILES


def test_names_on_the_page_stand_for_files() -> None:
    text = "`kernels/k/choose.py`, `request/NAME.py`, `choose/draw.c` or `gpu/sampling`, `propose`"
    assert named(text) == ["kernels/k/choose.py", "request/NAME.py", "choose/draw.c"]
    assert covers(text, "kernels/s/choose/draw.c")
    assert not covers(text, "kernels/s/other_choose/draw.c")
