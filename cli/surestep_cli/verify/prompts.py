"""The prompts: the built-in ones, or those of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
_STORY = _BUILT_IN["a story"]
# Sampling parameters and constraints, each of which has to hold at every place of a window.
# `banned tokens` gets the tokens that the answer would begin with: see `ban`.
BANNED, LIKELIEST = "banned tokens", "min_p 1"
GRAMMAR = "(red|green|blue) (apples|pears), [0-9]{2} of them(, (all|none) (ripe|sold)){2}"
_PARAMETERS: dict[str, dict[str, Any]] = {
    LIKELIEST: {"prompt": _STORY, "min_p": 1.0, "ignore_eos": True},
    "min_p": {"prompt": _STORY, "min_p": 0.1, "top_p": 0.95, "ignore_eos": True},
    BANNED: {"prompt": _STORY, "logit_bias": {}, "ignore_eos": True},
    "penalties": {
        "prompt": _BUILT_IN["a list"],
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "ignore_eos": True,
    },
    "grammar": {"prompt": "I have", "structured_outputs": {"regex": GRAMMAR}},
    "stop": {"prompt": _BUILT_IN["a list"], "stop": ["six"], "min_tokens": 6},
    "3 samples": {"prompt": _STORY, "n": 3, "ignore_eos": True},
}
_TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "boolean"}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
}
_TOOLS = {
    "messages": [{"role": "user", "content": "Will it rain?"}],
    "tools": [{"type": "function", "function": _TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
}
_PARAMETER_TOKENS = 24
# What may stand in the body of a request whose greedy tokens are the model's likeliest ones.
_PLAIN = {"prompt", "ignore_eos", "max_tokens", "model", "seed", "temperature", "speculative"}
_CROWD, _FIRST, _SAMPLES = 64, 16, 8  # as in vllm-project/vllm#45100
LEFT = range(17, 33, 2)  # tokens between a prompt and max_model_len, as in #36917
_MOST_BYTES = 64 << 20
_SHOWN = 40  # characters of a prompt that stand for it


@dataclass(frozen=True, slots=True)
class VerifyPrompt:
    """A request without what a case decides: its sampling and its speculation."""

    name: str
    path: str  # of the endpoint
    body: dict[str, Any]
    optional: bool = False  # a server may refuse it

    @property
    def is_plain(self) -> bool:
        """Return whether greedy tokens are the likeliest ones of the model itself."""
        return self.body.keys() <= _PLAIN

    @property
    def is_chat(self) -> bool:
        """Return whether it is sent to the chat endpoint."""
        return self.path == CHATS


def built_in() -> list[VerifyPrompt]:
    """Return the set that suits every generative model."""
    return [
        VerifyPrompt(name, COMPLETIONS, {"prompt": text, "ignore_eos": True})
        for name, text in _BUILT_IN.items()
    ]


def parameters() -> list[VerifyPrompt]:
    """Return requests with sampling parameters, a grammar, a tool and several samples."""
    limit = {"max_tokens": _PARAMETER_TOKENS}
    made = [
        VerifyPrompt(name, COMPLETIONS, {**limit, **body}, optional=True)
        for name, body in _PARAMETERS.items()
    ]
    return [*made, VerifyPrompt("a tool", CHATS, {**limit, **_TOOLS}, optional=True)]


def ban(prompt: VerifyPrompt, token_ids: Iterable[int]) -> VerifyPrompt:
    """Forbid tokens by `logit_bias`."""
    return replace(
        prompt, body={**prompt.body, "logit_bias": dict.fromkeys(map(str, token_ids), -100)}
    )


def crowd(max_tokens: int) -> list[VerifyPrompt]:
    """Return 64 prompts of 8 samples each, which end at different times.

    The first ones are long: they hold their slots when another client comes.
    """
    return [
        VerifyPrompt(
            f"crowd {i}",
            COMPLETIONS,
            {
                "prompt": f"{i} apples and {i + 1} pears are",
                "n": _SAMPLES,
                "ignore_eos": True,
                "user": "crowd",
                "max_tokens": 4 * max_tokens if i < _FIRST else max_tokens // 2 + i % max_tokens,
            },
        )
        for i in range(_CROWD)
    ]


def near_limit(text_ids: Sequence[int], max_model_len: int) -> list[VerifyPrompt]:
    """Return prompts of repeated text whose answers run into max_model_len one after the other."""
    repeated = list(text_ids) * (max_model_len // len(text_ids) + 1)
    return [
        VerifyPrompt(
            f"{left} before the limit",
            COMPLETIONS,
            {"prompt": repeated[: max_model_len - left], "max_tokens": left, "ignore_eos": True},
        )
        for left in LEFT
        if left < max_model_len
    ]


def prepared(
    prompts: Sequence[VerifyPrompt], model: str, max_tokens: int = 16
) -> list[VerifyPrompt]:
    """Return the prompts for a model, each with a maximum length."""
    limits = ("max_tokens", "max_completion_tokens")
    return [
        replace(
            prompt,
            body={
                **({} if any(prompt.body.get(n) for n in limits) else {"max_tokens": max_tokens}),
                **prompt.body,
                "model": model,
            },
        )
        for prompt in prompts
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
