"""Packages stay free of words that gave way to the field's terms: retired_words.txt lists them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo.source import Source, product

_FREE = ["surestep", "surestep_cli", "surestep_gateway"]
_LIST = Path(__file__).with_name("retired_words.txt")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _retired() -> dict[str, str]:
    """Term by retired word; one in lower case also with a capital."""
    lines = [line for line in _LIST.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.partition(" -> ") for line in lines]
    assert all(word and term for word, _, term in pairs)
    terms = {word: term for word, _, term in pairs}
    return terms | {word.capitalize(): term for word, term in terms.items() if word.islower()}


def _texts(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every name, comment and docstring; texts for users have words of their own."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT):
            yield token.start[0], token.string
    for node in ast.walk(source.tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _found(source: Source, retired: dict[str, str]) -> list[str]:
    words = "|".join(re.escape(word) for word in retired if not word.endswith(".py"))
    pattern = re.compile(rf"(?<![A-Za-z])({words})(?![a-z])")
    found = [
        f"{source.name}:{line} {match[1]}: {retired[match[1]]}"
        for line, text in _texts(source)
        for match in pattern.finditer(text)
    ]
    name = Path(source.name).name
    return found + ([f"{source.name}: {retired[name]}"] if name in retired else [])


@pytest.mark.parametrize("package", _FREE)
def test_packages_are_free_of_retired_words(package: str) -> None:
    sources = [source for source in product() if source.package == package]
    assert sources, f"no such package: {package}"
    retired = _retired()
    assert [one for source in sources for one in _found(source, retired)] == []


def test_retired_words_are_found() -> None:
    text = '"""For whoever reads."""\n_old = Patience  # Nobody else\nwhomever = "nobody"\n'
    source = Source("unit/package/link.py", text)
    found = [one.partition(" ")[2].partition(":")[0] for one in _found(source, _retired())]
    assert found == ["Patience", "Nobody", "whoever", "scheduler_client.py"]


def test_the_list_is_in_order() -> None:
    words = [w for w in _LIST.read_text().splitlines() if not w.startswith("#")]
    assert words == sorted(words, key=str.lower)
