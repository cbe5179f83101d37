"""One gateway, two models: each request goes to its own, under its own settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fakes.scheduler import emulated
from support.processes.gateway_stack import Paused, Stack, StartStack

ADMIN = {"authorization": "Bearer admin"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2, "store": False},
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "hello"},
    "/invocations": CHAT,
}
WITHOUT_SCHEDULER: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
}


@pytest.fixture
async def two(start_stack: StartStack, thinking_model: Path) -> Stack:
    """`plain` and `thinker`, whose tokenizer, parser and limits differ."""
    thinker = {"name": "thinker, deep", "model": thinking_model, "reasoning_parser": "qwen3"}
    return await start_stack(
        models=[{"name": "plain"}, thinker | {"max_n": 1, "max_concurrent_requests": 1}],
        admin_api_key="admin",
    )


@pytest.mark.parametrize("path", REQUESTS)
async def test_requests_go_by_their_model(two: Stack, path: str) -> None:
    for name, index in (("deep", 1), ("plain", 0), ("thinker", 1)):
        before = [len(one.requests) for one in two.schedulers]
        reply = await two.client.post(path, json=REQUESTS[path] | {"model": name})
        assert reply.status_code == 200, reply.text
        after = [len(one.requests) for one in two.schedulers]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1 - index, index]
        assert reply.json().get("model", name) == name


@pytest.mark.parametrize("path", [*REQUESTS, *WITHOUT_SCHEDULER])
async def test_a_model_must_be_named_and_be_there(two: Stack, path: str) -> None:
    body = (REQUESTS | WITHOUT_SCHEDULER)[path]
    unknown = await two.client.post(path, json=body | {"model": "no such"})
    unnamed = await two.client.post(path, json=body)
    assert (unknown.status_code, unnamed.status_code) == (404, 400), unknown.text + unnamed.text
    assert "no such" in unknown.text
    assert "plain, thinker" in unnamed.text
    broken = await two.post(path, b'{"model": "plain", ')
    assert broken.status_code == 400
    assert not any(one.requests for one in two.schedulers)


async def test_tokenizers_and_limits_are_the_models(two: Stack) -> None:
    text = {"prompt": "<think>hello"}
    plain, deep = [
        (await two.client.post("/tokenize", json=text | {"model": name})).json()["count"]
        for name in ("plain", "deep")
    ]
    assert deep < plain  # it has a token for the mark
    codes = [(await two.chat(model=name, n=2)).status_code for name in ("plain", "deep")]
    assert codes == [200, 400]
    answers = [(await two.chat(model=name)).json() for name in ("plain", "deep")]
    said = ["reasoning" in str(answer["choices"][0]["message"]) for answer in answers]
    assert said == [False, True]


async def test_seats_are_of_each_model(two: Stack) -> None:
    """A full model refuses, and the other one does not notice."""
    script = two.schedulers[1].script = Paused(3)
    async with two.begun("/v1/completions", prompt="hello", max_tokens=5, model="deep") as rest:
        await script.sent.wait()
        refused, served = await asyncio.gather(
            two.complete(model="thinker"), two.complete(model="plain", max_tokens=1)
        )
        assert (refused.status_code, served.status_code) == (429, 200)
        assert "this model" in refused.json()["error"]["message"]
        script.go.set()
        assert (await rest()).done
    assert (await two.complete(model="deep", max_tokens=1)).status_code == 200


async def test_what_is_served_and_what_is_away(two: Stack) -> None:
    listed = (await two.client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["plain", "thinker", "deep"]
    assert {one["status"]["value"] for one in listed} == {"loaded"}
    await two.schedulers[1].set_serving(False)
    await two.until_serving(1)
    ready = [
        (await two.client.get("/health/ready", params={"model": name})).status_code
        for name in ("plain", "deep", "none", "*")
    ]
    assert ready == [200, 503, 404, 503]
    assert (await two.client.get("/health/ready")).status_code == 200
    listed = (await two.client.get("/v1/models")).json()["data"]
    assert [one["status"]["value"] for one in listed] == ["loaded", "loading", "loading"]
    assert (await two.complete(model="plain", max_tokens=1)).status_code == 200


async def test_figures_tell_the_models_apart(two: Stack) -> None:
    await two.complete(model="plain", max_tokens=1)
    for _ in range(2):
        await two.complete(model="deep", max_tokens=1)
    await asyncio.gather(*(two.chat(model=f"none{n}") for n in range(100)))
    text = (await two.client.get("/metrics")).text
    counts = {
        line.split('model_name="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:e2e_request_latency_seconds_count")
    }
    assert counts == {"plain": 1, "thinker": 2}
    up = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert len(up) == 2
    assert "none7" not in text
    status = (await two.client.get("/status", headers=ADMIN)).json()
    assert [one["model"] for one in status["schedulers"]] == ["plain", "thinker"]
    overview = (await two.client.get("/overview", headers=ADMIN)).json()
    assert [one["serves"] for one in overview["schedulers"]] == ["plain", "thinker"]


async def test_operators_name_a_model(two: Stack) -> None:
    for query, restarted in (("?model=deep", [0, 1]), ("", [1, 1]), ("?model=none", None)):
        before = [len(one.restarts) for one in two.schedulers]
        reply = await two.client.post(f"/admin/workers/restart{query}", headers=ADMIN, json={})
        assert reply.status_code == (404 if restarted is None else 200), reply.text
        after = [len(one.restarts) for one in two.schedulers]
        assert [b - a for a, b in zip(before, after, strict=True)] == (restarted or [0, 0])


async def test_a_model_that_a_long_body_names_last_is_found(two: Stack) -> None:
    body = b'{"prompt": "%b", "max_tokens": 1, "truncate_prompt_tokens": 9, "model": "deep"}'
    reply = await two.post("/v1/completions", body % (b"x" * 2_000_000))
    assert reply.status_code == 200, reply.text
    assert len(two.schedulers[1].requests) == 1
    (asked,) = two.schedulers[1].requests
    assert len(emulated(asked)) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"model": "deep", "prompt": "%b"', 400), (b'{"model": "%b"}', 404), (b'{"x": "%b"}', 400)],
    ids=["broken", "long name", "no name"],
)
async def test_what_is_wrong_with_a_long_body_is_told(two: Stack, body: bytes, status: int) -> None:
    reply = await two.post("/v1/completions", body % (b"x" * 2_000_000))
    assert reply.status_code == status, reply.text
    assert len(reply.text) < 2000
    assert not any(one.requests for one in two.schedulers)
