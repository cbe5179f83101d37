"""An answer that one deployment has begun goes on at another: text and tokens are equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import FLAGS
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(240)]
TOKENS = 60
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 0.9, "seed": 11},
    "penalties": {
        "temperature": 0.7,
        "seed": 3,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 40,
    },
    "stop": {"temperature": 0.8, "seed": 5, "stop": ["STOP"]},
    "grammar": {
        "temperature": 1.0,
        "seed": 7,
        "structured_outputs": {"regex": "([a-z]{3,9} ){6}[0-9]{4}"},
    },
}


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stack]]:
    with contextlib.ExitStack() as stacks:
        yield [
            stacks.enter_context(serve(tiny_model, tmp_path_factory.mktemp(name), *FLAGS))
            for name in ("first", "second")
        ]


def streamed(stack: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream."""
    reply = httpx.post(f"{stack.url}{path}", json=body | {"stream": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [choice for one in data for choice in json.loads(one)["choices"]]


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[int], str | None]:
    text = "".join(one.get("text", "") for one in choices)
    ids = [token for one in choices for token in one["token_ids"]]
    return text, ids, choices[-1]["finish_reason"]


@pytest.mark.parametrize("name", ASKED)
def test_completions_go_on_elsewhere(pair: list[Stack], name: str) -> None:
    """After each event but the last, where the client's connection broke."""
    first, second = pair
    body = {
        "prompt": "one two three",
        "max_tokens": TOKENS,
        "return_token_ids": True,
        **ASKED[name],
    }
    if name == "stop":  # some text of the answer, across tokens
        text, _, _ = joined(streamed(first, "/v1/completions", body | {"stop": []}))
        body["stop"] = [text[20:26]]
    choices = streamed(first, "/v1/completions", body)
    whole = joined(choices)
    assert len(whole[1]) > 8
    for cut in {1, len(choices) // 2, len(choices) - 1}:
        text, ids, _ = joined(choices[:cut])
        more, later, reason = joined(
            streamed(second, "/v1/completions", body | {"emitted_ids": ids})
        )
        assert (text + more, ids + later, reason) == whole, cut


@pytest.mark.parametrize("name", ASKED)
def test_tokens_go_on_elsewhere(pair: list[Stack], name: str) -> None:
    """By /inference/v1/generate, from what the first renders; the answer is the completion's."""
    first, second = pair
    asked = {"prompt": "one two three", "max_tokens": TOKENS, **ASKED[name]}
    if name == "grammar":  # is given to the second step
        asked.pop("structured_outputs")
    reply = httpx.post(f"{first.url}/v1/completions/render", json=asked, timeout=60)
    assert reply.status_code == 200, reply.text
    (body,) = reply.json()
    if name == "grammar":
        body["sampling_params"]["structured_outputs"] = ASKED[name]["structured_outputs"]
    choices = streamed(first, "/inference/v1/generate", body)
    completion = asked | ASKED[name] | {"return_token_ids": True}
    assert joined(choices)[1] == joined(streamed(second, "/v1/completions", completion))[1]
    ids = joined(choices[: len(choices) // 2])[1]
    rest = joined(streamed(second, "/inference/v1/generate", body | {"emitted_ids": ids}))
    assert ids + rest[1] == joined(choices)[1]


def test_a_rendered_chat_is_that_chat(pair: list[Stack]) -> None:
    first, second = pair
    chat = {
        "messages": [{"role": "user", "content": "go"}],
        "temperature": 0.8,
        "seed": 4,
        "max_tokens": 20,
    }
    rendered = httpx.post(f"{first.url}/v1/chat/completions/render", json=chat, timeout=60).json()
    answer = httpx.post(
        f"{second.url}/v1/chat/completions", json=chat | {"return_token_ids": True}, timeout=60
    ).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    reply = httpx.post(f"{second.url}/inference/v1/generate", json=rendered, timeout=60)
    assert reply.json()["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
