"""Every field of the protocol says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repo.source import ROOT

_FIELD = re.compile(r"^\s+(repeated |optional )?[\w.<>, ]+ \w+ = \d+;(?P<comment>.*)$")
_FILES = sorted((ROOT / "proto" / "surestep_proto").glob("*.proto"))


@pytest.mark.parametrize("path", _FILES, ids=lambda p: p.name)
def test_every_field_is_commented(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        f"{path.name}:{number} {line.strip()}"
        for number, line in enumerate(lines, 1)
        if (match := _FIELD.match(line))
        and "//" not in match["comment"]
        and not lines[number - 2].strip().startswith("//")
    ]
    assert bare == []
