"""Requests that the pages begin with, run as a reader would copy them, against a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo.source import ROOT
from support.processes.stack import Stack, environment, serve

API_PAGES = ("openai", "responses", "embeddings", "tools", "structured-outputs")
FILES = {"README": ROOT / "README.md", **{p: ROOT / f"docs/use/{p}.md" for p in API_PAGES}}
ADDRESS, MODEL = "http://127.0.0.1:8000", "SmolLM2-135M-Instruct"
_FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _snippets(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each request of a page, in their order."""
    fences = _FENCE.findall(FILES[page].read_text())
    return [(language, code) for language, code in fences if _asks(code)]


def _asks(code: str) -> bool:
    return ADDRESS in code and "surestep serve" not in code


SNIPPETS = [
    pytest.param(language, code, id=f"{page}-{language}-{number}")
    for page in FILES
    for number, (language, code) in enumerate(_snippets(page))
]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server that is called as the pages call theirs."""
    flags = ("--served-model-name", MODEL, "--max-num-seqs", "8", "--kv-cache-memory", "0.05")
    tools = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    ends = (
        "--override-generation-config",
        '{"max_new_tokens": 200}',
    )  # of a random model's answers
    with serve(tiny_model, tmp_path_factory.mktemp("logs"), *flags, *tools, *ends) as running:
        yield running


@pytest.mark.parametrize("page", API_PAGES)
def test_a_page_begins_with_a_request_in_curl_and_python(page: str) -> None:
    text = FILES[page].read_text().split("\n## ")[0]
    first = [language for language, code in _FENCE.findall(text) if _asks(code)]
    assert first[:2] == ["bash", "python"]


@pytest.mark.parametrize(("language", "code"), SNIPPETS)
def test_a_request_is_answered(server: Stack, language: str, code: str) -> None:
    program = [sys.executable, "-"] if language == "python" else ["bash", "-eu"]
    done = subprocess.run(
        program,
        input=code.replace(ADDRESS, server.url).replace("curl ", "curl -fsS -w '\\n' "),
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.strip()
    if language == "bash":
        for line in done.stdout.splitlines():
            assert not json.loads(line).get("error"), line
