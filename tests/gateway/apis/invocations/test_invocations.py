"""POST /invocations, SageMaker's one path: each request is answered as at the path of its kind."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes.gateway_stack import Stack, StartStack

MESSAGES = [{"role": "user", "content": "hello"}]
KINDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "seed": 1},
    "/v1/embeddings": {"input": ["hello", "fox"]},
    "/v1/rerank": {"query": "hello", "documents": ["fox", "hello"]},
    "/v1/score": {"text_1": "hello", "text_2": ["fox", "hello"]},
}


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one to the next."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.mark.parametrize("apart", [False, True])
async def test_answered_as_at_its_own_path(start_stack: StartStack, apart: bool) -> None:
    """Also where a large body is prepared in a text process."""
    stack = await start_stack(text_processes=1)
    more = {"unknown": "x" * 200_000} if apart else {}
    for path, body in KINDS.items():
        own = await stack.client.post(path, json=body | more)
        found = await stack.client.post("/invocations", json=body | more)
        assert found.status_code == own.status_code == 200, (found.text, own.text)
        assert lasting(found.json()) == lasting(own.json()), path


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams(stack: Stack, path: str) -> None:
    own = await stack.stream(path, **KINDS[path])
    found = await stack.stream("/invocations", **KINDS[path])
    assert found.done
    assert found.text() == own.text()


async def test_refused_by_name(stack: Stack) -> None:
    for body, param, message in (
        ({}, None, "messages, prompt, input, query, text_1"),
        ({"model": "tiny"}, None, "one of these is required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than"),
    ):
        response = await stack.client.post("/invocations", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert message in error["message"]
    broken = await stack.post("/invocations", b'{"messages": [')
    assert broken.status_code == 400
    assert "not valid JSON" in broken.json()["error"]["message"]
