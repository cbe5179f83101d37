"""The prompts: the built-in ones, or those of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surestep_common.errors import InvalidRequest

COMPLETIONS, CHATS = "v1/completions", "v1/chat/completions"  # below the root of the API

# Some invite drafts (lists, code, what comes again), some do not. Answers run to their full length,
# because a model that ends at once proves little.
_BUILT_IN = {
    "a fact": "The capital of France is",
    "code": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
    "a list": "one two three four five six seven eight one two three four five six seven",
    "records": '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "',
    "a story": "Once upon a time, in a village by the sea, there lived",
    "a question": "Question: Why is the sky blue?\nAnswer:",
}
_MOST_BYTES = 64 << 20
_SHOWN = 40  # characters of a prompt that stand for it


@dataclass(frozen=True, slots=True)
class VerifyPrompt:
    """A request without what a case decides: its sampling and its speculation."""

    name: str
    path: str  # of the endpoint
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it is sent to the chat endpoint."""
        return self.path == CHATS


def built_in() -> list[VerifyPrompt]:
    """Return the set that suits every generative model."""
    return [
        VerifyPrompt(name, COMPLETIONS, {"prompt": text, "ignore_eos": True})
        for name, text in _BUILT_IN.items()
    ]


def read_prompts(path: Path) -> list[VerifyPrompt]:
    """Return a file's prompts, one a line: text, or JSON objects if its name ends in .jsonl.

    An object is the body of a request as OpenAI's API accepts it, or a line of its batches, which
    has the body under `body`. Raise InvalidRequest with the line at fault.
    """
    lines = _lines(path)
    as_json = path.suffix.lower() in (".jsonl", ".ndjson")
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path.name}:{number}"
            prompts.append(_from_json(line, where) if as_json else _from_text(line, where))
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt")
    return prompts


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidRequest(f"{path} has more than {_MOST_BYTES >> 20} MiB")
        # Not splitlines, which also cuts at characters that JSON may have in its strings.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text in UTF-8: {error}") from error


def _from_text(line: str, where: str) -> VerifyPrompt:
    line = line.rstrip("\r")
    return VerifyPrompt(f"{where} {_short(line)}", COMPLETIONS, {"prompt": line})


def _from_json(line: str, where: str) -> VerifyPrompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if not isinstance(value, dict) or ("messages" in value) == ("prompt" in value):
        raise InvalidRequest(f"{where} is no request: an object with `prompt` or with `messages`")
    if "messages" in value:
        return VerifyPrompt(f"{where} {_short(_last_said(value['messages']))}", CHATS, value)
    return VerifyPrompt(f"{where} {_short(value['prompt'])}", COMPLETIONS, value)


def _last_said(messages: Any) -> Any:
    """Return the content of the last message, of any type; the server validates it."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("content") if isinstance(last, dict) else last


def _short(said: Any) -> str:
    text = " ".join((said if isinstance(said, str) else json.dumps(said)).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
