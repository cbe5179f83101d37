"""docs/run/security.md has every bound that the code has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repo.source import ROOT, product

_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def _bounds() -> Iterator[tuple[str, int]]:
    """Public constants of modules that are the most of something."""
    for source in product():
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name.startswith(("MAX_", "MOST_")) and (value := _number(node.value)):
                    yield f"{source.name} {name}", value


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(ast.Constant(value=int(a)), ast.LShift(), ast.Constant(value=int(b))):
            return a << b
        case _:
            return None


def _spellings(value: int) -> Iterator[str]:
    """In which the page may have it."""
    yield str(value)
    if value.bit_count() == 1:
        yield f"2^{value.bit_length() - 1}"
    for unit, bits in _UNITS:
        if value % (1 << bits) == 0:
            yield f"{value >> bits} {unit}"


def test_every_bound_is_on_the_page() -> None:
    page = (ROOT / "docs" / "run" / "security.md").read_text()
    words = page.replace("|", " ").replace(",", " ").replace(";", " ").replace("(", " ").split()
    text = f" {' '.join(words)} ".replace(". ", " ").replace(") ", " ")
    found = dict(_bounds())
    assert len(found) > 30
    missing = [
        f"{where} = {value}"
        for where, value in found.items()
        if not any(f" {spelling} " in text for spelling in _spellings(value))
    ]
    assert missing == []
