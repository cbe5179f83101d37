"""The official client, and bodies no client would send."""

from __future__ import annotations

import asyncio
import codecs
import gzip
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.fakes.scheduler import failing
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault, QueueFull
from surestep_gateway.request.parse import UNSUPPORTED, WITHOUT_EFFECT
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest

JSON_HEADERS = {"content-type": "application/json"}
USER: Any = [{"role": "user", "content": "hello"}]


def client_of(stack: Stack, **options: Any) -> openai.AsyncOpenAI:
    """The official client. It retries 429 and 503 unless told not to."""
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", **({"max_retries": 0} | options)
    )


async def test_the_official_client(stack: Stack) -> None:
    async with client_of(stack) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=8, seed=1, logprobs=True, top_logprobs=2
        )
        text = whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or ()) == 8
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8

        streamed, usage = "", None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=USER,
            max_tokens=8,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "speculative": {"num_tokens": 2}},
        )
        async for chunk in stream:
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert streamed == text
        assert usage == whole.usage
        completion = await client.completions.create(
            model="tiny", prompt=["one", "two"], max_tokens=2, logprobs=1
        )
        assert [choice.index for choice in completion.choices] == [0, 1]
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_the_official_client_sees_errors_as_such(stack: Stack) -> None:
    async with client_of(stack) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=USER, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=USER)
        stack.scheduler.script = failing(QueueFull("full", retry_after=1))
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=USER)
        stack.scheduler.script = failing(ModelFault("not finite"), after=[70])
        stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            async for _ in stream:
                pass


async def test_many_at_once_leave_nothing_behind(stack: Stack) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=20, seed=number, stream=True
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if number % 3 == 0 and seen == number % 7:
                await stream.close()
                break
        return seen

    async with client_of(stack) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(client, number)) for number in range(64)]
    assert all(task.result() for task in tasks)
    await stack.scheduler.until(lambda fake: fake.num_open == 0)
    async with asyncio.timeout(10):
        while stack.server.gateway.admission.num_open:
            await asyncio.sleep(0)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 500)
    | st.sampled_from([1 << 31, 1 << 63, -(1 << 63), 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
GOOD: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "n": 2,
    "stop": ["a"],
    "logprobs": 1,
    "stream": True,
    "echo": True,
    "min_tokens": 1,
    "seed": 1,
}


def bodies(names: list[str], required: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A good body in which some fields have any value at all."""
    mutations = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    goods = st.sets(st.sampled_from(sorted(GOOD))).map(lambda keys: {k: GOOD[k] for k in keys})
    return st.builds(lambda good, bad: required | good | bad, goods, mutations)


CHATS = bodies([*ChatRequest.model_fields, *UNSUPPORTED, *WITHOUT_EFFECT], {"messages": USER})
COMPLETIONS = bodies(
    [*CompletionRequest.model_fields, *UNSUPPORTED, *WITHOUT_EFFECT], {"prompt": "x"}
)


@pytest.mark.rotates(1)
async def test_no_body_is_answered_with_a_server_error(start_stack: StartStack) -> None:
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder"}
    stack = await start_stack(max_n=8, enable_auto_tool_choice=True, **parsers)
    answered: dict[int, int] = {}

    async def send(path: str, body: dict[str, Any]) -> None:
        response = await stack.client.post(path, json=body)
        answered[response.status_code] = answered.get(response.status_code, 0) + 1
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"], body
        elif body.get("stream") and path != "/tokenize":
            assert response.text.endswith("data: [DONE]\n\n"), body

    loop = asyncio.get_running_loop()

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=st.tuples(st.just("/v1/chat/completions"), CHATS)
        | st.tuples(st.just("/v1/completions"), COMPLETIONS)
        | st.tuples(st.just("/tokenize"), CHATS)
    )
    def fuzz(case: tuple[str, dict[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(send(*case), loop).result(timeout=20)

    await asyncio.to_thread(fuzz)
    assert answered[200] > 10, answered
    assert answered[400] > 10, answered


COMPRESSED = gzip.compress(b'{"prompt": "x"}')


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "gzip, identity", "\xff" * 4096, ""])
async def test_compressed_bodies_are_refused_by_name(stack: Stack, coding: str) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-encoding", coding.encode("latin-1")),
    ]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
        response = await stack.client.post(path, content=COMPRESSED, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 415
        assert error["message"].startswith("the Content-Encoding of a body must not be")
        assert coding.lower()[:32] in error["message"]
        assert len(error["message"]) < 256


async def test_a_body_that_says_it_is_not_compressed_is_taken(stack: Stack) -> None:
    headers = JSON_HEADERS | {"content-encoding": "Identity"}
    response = await stack.client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


async def test_a_byte_order_mark_before_json_is_dropped(stack: Stack) -> None:
    async def answer(body: bytes) -> httpx.Response:
        return await stack.client.post("/tokenize", content=body, headers=JSON_HEADERS)

    body = b'{"prompt": "one two"}'
    plain, marked = await answer(body), await answer(codecs.BOM_UTF8 + body)
    large = await answer(codecs.BOM_UTF8 + body + b" " * (128 << 10))  # for the text processes
    assert plain.status_code == 200
    assert plain.json() == marked.json() == large.json()
    for wrong in (codecs.BOM_UTF8 * 2 + body, b" " + codecs.BOM_UTF8 + body, codecs.BOM_UTF8):
        response = await answer(wrong)
        assert response.status_code == 400
        assert "JSON" in response.json()["error"]["message"]


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "x",
        "max_tokens": 4,
        "min_tokens": 1,
        "n": 2,
        "seed": 7,
        "top_k": 40,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 3,
        "priority": -1,
        "stop_token_ids": [5],
        "allowed_token_ids": [6, 7],
        "speculative": {"num_tokens": 2},
    },
    "/v1/chat/completions": {
        "messages": USER,
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 7,
    },
    "/v1/messages": {"messages": USER, "max_tokens": 4, "top_k": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 16, "seed": 7, "max_tool_calls": 0},
    "/detokenize": {"tokens": [5, 6]},
}


def floats(value: Any) -> Any:
    """Every integer as a float."""
    if isinstance(value, dict):
        return {name: floats(one) for name, one in value.items()}
    if isinstance(value, list):
        return [floats(one) for one in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("path", WHOLE)
async def test_whole_floats_are_integers(stack: Stack, path: str) -> None:
    async def asked(body: dict[str, Any]) -> list[Any]:
        before = len(stack.scheduler.requests)
        response = await stack.client.post(path, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
        sampling = [request.sampling for request in stack.scheduler.requests[before:]]
        for one in sampling:
            if "seed" not in body:
                one.ClearField("seed")  # which is drawn
        return sampling

    assert await asked(floats(WHOLE[path])) == await asked(WHOLE[path])
