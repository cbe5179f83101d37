"""The scheduler decides without knowing its shell, and says so in the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

import pytest
from repo.source import PACKAGES, Source, product

# Words that names of these packages had once; the field has others for what they meant.
_WITHOUT_RETIRED_WORDS = ("surestep_scheduler", "surestep_common")
_RETIRED = {
    "accused": "a window of the poison search",
    "acquit": "clear",
    "arms": "snapshot_requests",
    "armed": "requested",
    "experience": "acceptance_stats",
    "guilty": "culprit",
    "k_cap": "max_drafts",
    "live_rows": "open_rows",
    "pardon": "extend_deadline",
    "pardoned": "extended",
    "patience": "extension",
    "suspicion": "poison",
    "verdict": "result",
}


def sources_of(package: str) -> list[Source]:
    return [source for source in product() if source.package == package]


def room(module: str) -> str:
    """The folder of a module, from its dotted name; a file beside the folders is a room itself."""
    return ".".join(module.split(".")[:2])


def module_of(source: Source) -> str:
    assert source.package is not None
    path = PurePath(source.name).relative_to(PACKAGES[source.package]).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")


def imported(source: Source) -> Iterator[str]:
    """Dotted names of what a module imports of its own package, for typing only included."""
    assert source.package is not None
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        home = node.module or ""
        if node.level:  # from a folder's own files: ruff forbids those of a parent
            parent = module_of(source).rpartition(".")[0]
            home = f"{parent}.{home}".removesuffix(".")
        if home == source.package or home.startswith(f"{source.package}."):
            yield from (f"{home}.{alias.name}" for alias in node.names)


def arrows(sources: list[Source]) -> Mapping[str, set[str]]:
    """The rooms that each room imports from."""
    rooms = {room(module_of(source)) for source in sources}
    found: dict[str, set[str]] = {name: set() for name in rooms}
    for source in sources:
        here = room(module_of(source))
        found[here] |= ({room(name) for name in imported(source)} & rooms) - {here}
    return found


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every name that a file defines or uses, in small letters with underscores."""
    kinds = {"id", "attr", "arg", "name"}
    for node in ast.walk(source.tree):
        for kind in kinds & set(node._fields):
            if isinstance(name := getattr(node, kind), str):
                small = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
                yield getattr(node, "lineno", 0), small


def test_the_pure_folders_know_nothing_of_the_shell() -> None:
    """What decides imports no loop, no connection and no service."""
    found = arrows(sources_of("surestep_scheduler"))
    shell = {f"surestep_scheduler.{name}" for name in ("engine", "service", "vllm", "server")}
    assert shell <= set(found)
    for name in ("core", "cache", "speculation", "policy", "recovery"):
        assert not found[f"surestep_scheduler.{name}"] & shell


@pytest.mark.parametrize("package", _WITHOUT_RETIRED_WORDS)
def test_names_hold_no_retired_words(package: str) -> None:
    retired = re.compile(rf"(?:^|_)({'|'.join(_RETIRED)})(?:_|$)")
    found = [
        f"{source.name}:{line} {name}: say {_RETIRED[match[1]]}"
        for source in sources_of(package)
        for line, name in [*names(source), (0, PurePath(source.name).stem)]
        if (match := retired.search(name))
    ]
    assert found == []


def test_a_retired_word_would_be_seen() -> None:
    text = "class LiveRows: ...\ndef f(k_cap): return plan.armed"
    source = Source("x.py", text)
    assert {"live_rows", "k_cap", "armed"} <= {name for _, name in names(source)}
