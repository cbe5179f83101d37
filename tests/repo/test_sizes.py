"""Files and functions can be read in one sitting. A waiver is a line below, visible in review."""

from __future__ import annotations

import ast

from repo.source import sources

_MAX_FILE = 400
_MAX_FUNCTION = 60
_FILE_WAIVERS: dict[str, int] = {}  # path -> lines it may have
_FUNCTION_WAIVERS: dict[str, int] = {}  # path::function -> lines it may have


def test_files_are_short() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources()}
    over = {n: c for n, c in lengths.items() if c > _FILE_WAIVERS.get(n, _MAX_FILE)}
    assert over == {}


def test_functions_are_short() -> None:
    over = {
        name: lines
        for name, lines in _functions().items()
        if lines > _FUNCTION_WAIVERS.get(name, _MAX_FUNCTION)
    }
    assert over == {}


def test_waivers_are_needed() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources()}
    functions = _functions()
    stale = [n for n in _FILE_WAIVERS if lengths.get(n, 0) <= _MAX_FILE]
    stale += [n for n in _FUNCTION_WAIVERS if functions.get(n, 0) <= _MAX_FUNCTION]
    assert stale == []


def _functions() -> dict[str, int]:
    """Lines by name; of functions of one name in a file, as methods are, those of the longest."""
    lengths: dict[str, int] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{source.name}::{node.name}"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths[name] = max(length, lengths.get(name, 0))
    return lengths
