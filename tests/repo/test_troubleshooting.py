"""docs/run/troubleshooting.md quotes what the product says and leaves nothing out."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from repo.source import ROOT, product, tracked
from surestep_common.errors import ERROR_TABLE
from surestep_scheduler.engine.incidents import Cause

PAGE = (ROOT / "docs" / "run" / "troubleshooting.md").read_text()
LISTED = (ROOT / "docs" / "messages.md").read_text()
_MEMORY = "### Memory"  # has the warnings about it
_FOREIGN = "## Containers and machines"  # what others say cannot be looked up here
_BY_CODE, _CAUSES, _LOG = "### By code", "## Workers are lost", "## A line in the log"
_GAP = "\0"  # stands for what differs from case to case
_PLACEHOLDER = re.compile(r"%[-\d.]*[a-z]")
_LETTERS = 6  # a text with fewer says nothing that one could look for
_LOGGED = {"warning", "error", "exception", "critical"}


def _section(heading: str, page: str = PAGE) -> str:
    """Up to the next heading of any level."""
    return re.split(r"\n#+ ", page.split(f"{heading}\n")[1])[0]


def _first_cells(text: str) -> Iterator[str]:
    """Of the rows of all tables."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield re.split(r"(?<!\\)\|", line)[1].strip()


def _quoted() -> list[str]:
    ours = PAGE.split(_FOREIGN)[0]
    for heading in (_BY_CODE, _CAUSES):
        ours = ours.replace(_section(heading), "")
    operate = (ROOT / "docs" / "run" / "operate.md").read_text()
    ours += _section("### Lines to look for", operate)
    return sorted({cell.strip("`") for cell in _first_cells(ours)})


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)


def _pattern(quoted: str) -> re.Pattern[str]:
    """The literal parts in their order, with anything between them."""
    parts = [part.strip() for part in quoted.split("...")]
    return re.compile(".*".join(re.escape(part) for part in parts if part), re.DOTALL)


def _template(node: ast.expr) -> str | None:
    """A text of the source, with gaps where values go."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PLACEHOLDER.sub(_GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or _GAP for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _GAP
    return None


@functools.cache
def _said() -> str:
    """Every text of the product, and every line of the chart's templates, one a line."""
    texts = [text for source in product() for text in _texts(source.tree)]
    charts = [ROOT / name for name in tracked() if re.match("charts/.*/templates/", name)]
    texts += [_PLACEHOLDER.sub(_GAP, line) for p in charts for line in p.read_text().splitlines()]
    return "\n".join(" ".join(text.split()) for text in texts)


def _texts(tree: ast.AST) -> Iterator[str]:
    """All but docstrings, which nobody is shown."""
    nodes = list(ast.walk(tree))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.expr) and node not in docstrings and (text := _template(node)):
            yield text


def _logged() -> Iterator[tuple[str, str]]:
    """Where warnings and errors are logged, and what they say."""
    for source in product():
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in _LOGGED and owner in ("logger", "_sparingly") and node.args:
                text = _template(node.args[0])
                if text is not None and _letters(text) >= _LETTERS:
                    yield f"{source.name}:{node.lineno}", text


@pytest.mark.parametrize("quoted", _quoted())
def test_what_the_page_quotes_is_said(quoted: str) -> None:
    assert _letters(quoted) >= _LETTERS
    pattern = re.compile(_pattern(quoted).pattern.replace(".*", "[^\n]*"))
    assert pattern.search(_said()), quoted


def test_every_warning_and_error_in_a_log_has_an_entry() -> None:
    entries = _section(_MEMORY) + _section(_LOG)
    patterns = [_pattern(cell.strip("`")) for cell in _first_cells(entries)]
    missing = [
        f"{place} {text}"
        for place, text in _logged()
        if not any(pattern.search(text) for pattern in patterns)
    ]
    assert missing == []


def test_every_typed_error_has_an_entry() -> None:
    expected = {
        f"`{kind.openai_code}`, `{kind.openai_type}` {kind.http_status} ({kind.code.name})"
        for kind in ERROR_TABLE
    }
    assert set(_first_cells(_section(_BY_CODE))) == expected


def test_every_cause_of_an_incident_has_an_entry() -> None:
    assert list(_first_cells(_section(_CAUSES))) == [f"`{cause}`" for cause in Cause]


@pytest.mark.parametrize(
    "seen",
    [
        "rank 0 cannot start: max_model_len 999999: the model has 8192 positions; use 8192 at most",
        "--tensor-parallel-size 7 does not divide the model's 9 heads: 1, 3, 9 do",
        "--device cuda: torch 2.13.0+cpu was built for CPUs",
        "cannot keep 'a/b' in /models: Permission denied",
        "no server at http://a:8000: start one with 'surestep serve', or name another with --url",
        "cannot listen on port 8000 of 127.0.0.1: Address already in use",
        "no model 'x' is served: SmolLM2-135M-Instruct",
        "the stream ended without [DONE]",
        "speculative config: method draft_model needs the draft model's folder as model",
        "no C kernels: no C compiler (cc), and no kernels were compiled ahead: install gcc",
        "/models/x holds no config.json: not a model in Hugging Face format",
        "--kv-cache-memory: 25.63 GiB, but only 20.73 GiB are left of the machine's memory",
    ],
)
def test_what_users_see_is_listed(seen: str) -> None:
    """Messages as they came from a command that was wrong, in the list of all."""
    cells = re.findall(r"^\| <a id=.*?></a>`(.+?)` \|", LISTED, re.MULTILINE)
    assert len(cells) > 400
    known = [_pattern(cell.replace("\\|", "|")) for cell in cells]
    assert any(pattern.search(seen) and len(pattern.pattern) > 16 for pattern in known)
