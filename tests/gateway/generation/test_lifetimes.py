"""How requests end: by the client, by deadlines, by the server's limits, by a lost scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fakes.scheduler import default_info, emulated, emulating, start, tokens
from support.processes.gateway_stack import Events, Paused, Stack, StartStack
from surestep_common.errors import QueueFull, Unavailable
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


async def settled(stack: Stack) -> None:
    """Nothing is open any more on either side."""
    await stack.scheduler.until(lambda fake: fake.num_open == 0)
    async with asyncio.timeout(10):
        while stack.server.gateway.admission.num_open:
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delivered", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_disconnect_aborts_every_sequence(
    stack: Stack, stream: bool, delivered: int, n: int
) -> None:
    stack.scheduler.script = Paused(delivered)
    request = asyncio.ensure_future(stack.chat(stream=stream, n=n, max_tokens=5))
    await stack.scheduler.until(lambda fake: fake.num_open == n)
    request.cancel()
    await asyncio.wait([request], timeout=10)
    await settled(stack)
    assert stack.scheduler.num_cancelled == n
    metrics = (await stack.client.get("/metrics")).text
    ended = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert f"{ended} {n}.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_token_has_a_deadline(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(first_token_timeout_s=0.1)
    stack.scheduler.script = Paused(0)
    response = await stack.chat(stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "no token came in time"
    await settled(stack)


async def test_the_next_token_has_a_deadline(start_stack: StartStack) -> None:
    stack = await start_stack(inter_token_timeout_s=0.1)
    stack.scheduler.script = Paused(2)
    assert (await stack.chat()).status_code == 504
    events = await stack.stream(CHAT, messages=USER)
    assert not events.done
    assert events[-1]["error"]["code"] == "timeout"
    await settled(stack)
    assert stack.scheduler.num_cancelled == 2


async def test_the_request_has_a_deadline_and_the_scheduler_knows(start_stack: StartStack) -> None:
    stack = await start_stack(request_timeout_s=0.5)
    stack.scheduler.script = Paused(2)
    events = await stack.stream(CHAT, messages=USER)
    assert events[-1]["error"]["message"] == "the request did not finish in time"
    assert 0 < stack.scheduler.time_remaining[0] < 0.6  # gRPC rounds it
    await settled(stack)


async def test_only_so_many_requests_at_once(start_stack: StartStack) -> None:
    stack = await start_stack(max_concurrent_requests=2)
    stack.scheduler.script = paused = Paused(0)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(stack.chat(max_tokens=1)) for _ in range(2)]
        await stack.scheduler.until(lambda fake: fake.num_open == 2)
        refused = await stack.chat(max_tokens=1)
        assert (await stack.client.get("/load")).json()["server_load"] == 2
        paused.go.set()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert [task.result().status_code for task in running] == [200, 200]


async def test_large_bodies_are_refused(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_bytes=1000)
    body = b'{"prompt": "' + b"x" * 1000 + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    for content in (body, chunks()):
        response = await stack.post("/v1/completions", content)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]


async def test_requests_say_whose_prefixes_they_may_find(
    start_stack: StartStack, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 name=a\nk2 name=a\nk3 name=b\n")
    stack = await start_stack(api_key_file=keys)
    for key in ("k1", "k2", "k3"):
        stack.client.headers["authorization"] = f"Bearer {key}"
        await stack.complete(max_tokens=1, user=key, cache_salt="salt")
        embeddings = {"input": "hello", "user": key}
        assert (await stack.client.post("/v1/embeddings", json=embeddings)).is_success
    owners = [request.cache_owner for request in stack.scheduler.requests]
    assert owners[0] == owners[1] == owners[2] == owners[3] != owners[4] == owners[5]
    assert "" not in owners
    assert not any(name in owner for owner in owners for name in ("k1", "k2", "k3"))


async def test_api_keys(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="first,second")
    keys = stack.server.gateway.settings.api_key
    assert [key.get_secret_value() for key in keys] == ["first", "second"]
    for header in (None, "Bearer wrong", "Basic first", "first"):
        stack.client.headers.pop("authorization", None)
        if header is not None:
            stack.client.headers["authorization"] = header
        for path in (CHAT, "/v1/models", "/tokenize", "/status", "/no/such/path"):
            response = await stack.client.post(path)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/health/ready", "/metrics", "/load", "/version"):
        assert (await stack.client.get(path)).status_code == 200
    stack.client.headers["authorization"] = "Bearer second"
    assert (await stack.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("delivered", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_lost_scheduler_is_not_noticed(
    stack: Stack, tokenizer: Tokenizer, delivered: int, n: int
) -> None:
    stack.scheduler.script = Paused(delivered)
    body = {"messages": USER, "max_tokens": 9, "seed": 4, "n": n, "return_token_ids": True}
    lines: list[str] = []

    async def read() -> None:
        request = stack.client.stream("POST", CHAT, json=body | {"stream": True})
        async with request as response:
            async for line in response.aiter_lines():
                lines.append(line)

    async with asyncio.TaskGroup() as group, asyncio.timeout(20):
        reader = group.create_task(read())
        await stack.scheduler.until(lambda fake: fake.num_open == n)
        while sum('"token_ids":[' in line for line in lines) < delivered * n:
            await asyncio.sleep(0.001)
        await stack.scheduler.stop()
        stack.scheduler.script = emulating
        await stack.scheduler.start()
        await reader
    text = "\n".join(lines) + "\n"
    events = Events.parse(text)
    assert events.done
    *first, _ = requests = stack.scheduler.requests
    assert len(requests) == 2 * n
    assert [len(request.emitted_ids) for request in requests] == [0] * n + [delivered] * n
    for index in range(n):
        ids = [i for choice in events.choices(index) for i in choice.get("token_ids", ())]
        assert ids in [emulated(request) for request in first[:n]]
        assert events.text(index) == tokenizer.decode(ids, skip_special_tokens=True)
    metrics = (await stack.client.get("/metrics")).text
    assert f"surestep:resumed_requests_total {n}.0" in metrics


async def test_resuming_sends_what_was_delivered(stack: Stack) -> None:
    calls = 0

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        nonlocal calls
        calls += 1
        yield start(num_cached=calls)
        if calls == 1:
            for token in emulated(request)[:3]:
                yield tokens([token])
            raise Unavailable("the epoch ended")
        if calls == 2:
            raise QueueFull("everybody came back", retry_after=0.01)
        yield tokens(emulated(request), finish=LENGTH)

    stack.scheduler.script = script
    body = (await stack.chat(max_tokens=8, seed=4, prompt_logprobs=1)).json()
    first, second, third = stack.scheduler.requests
    assert list(second.emitted_ids) == list(third.emitted_ids) == emulated(first)[:3]
    assert first.max_tokens == second.max_tokens == 8
    assert second.request_id != first.request_id
    assert first.sampling.want_prompt_logprobs
    assert not second.sampling.want_prompt_logprobs
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_resuming_has_an_end(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence may lose any number of schedulers, but not many in a row for nothing."""
    monkeypatch.setattr("surestep_gateway.schedulers.journal.MAX_RESUMES", 2)

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        if len(request.emitted_ids) < 5:
            yield tokens([70])
        raise Unavailable("again")

    stack.scheduler.script = script
    events = await stack.stream(CHAT, messages=USER, max_tokens=9)
    assert not events.done
    assert events[-1]["error"]["code"] == "service_unavailable"
    assert [len(r.emitted_ids) for r in stack.scheduler.requests] == [0, 1, 2, 3, 4, 5, 5]


async def test_a_scheduler_that_stays_away(start_stack: StartStack) -> None:
    stack = await start_stack(resume_timeout_s=0.3, admission_timeout_s=0.2)
    stack.scheduler.script = Paused(2)
    async with stack.begun(CHAT, messages=USER, max_tokens=9) as rest:
        await stack.scheduler.stop()
        events = await rest()
    assert not events.done
    assert events[-1]["error"]["code"] == "service_unavailable"
    response = await stack.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_readiness_follows_the_scheduler(start_stack: StartStack) -> None:
    stack = await start_stack()
    assert (await stack.client.get("/health/ready")).status_code == 200
    for change in (stack.scheduler.set_serving(False), stack.scheduler.stop()):
        await change
        await stack.until_serving(0)
        assert (await stack.client.get("/health/ready")).status_code == 503
        assert (await stack.client.get("/health")).status_code == 200
    stack.scheduler.info = default_info(max_model_len=77)
    await stack.scheduler.start()
    await stack.until_serving()
    assert (await stack.client.get("/health/ready")).status_code == 200
    (model,) = (await stack.client.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 77
