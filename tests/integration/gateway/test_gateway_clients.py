"""The official client, and bodies no client would send."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.fakes.scheduler import failing
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault, QueueFull
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest
from surestep_gateway.request.unsupported import UNSUPPORTED, WITHOUT_EFFECT

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
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
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
    @given(case=st.tuples(st.just("/v1/chat/completions"), CHATS)
           | st.tuples(st.just("/v1/completions"), COMPLETIONS)
           | st.tuples(st.just("/tokenize"), CHATS))  # fmt: skip
    def fuzz(case: tuple[str, dict[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(send(*case), loop).result(timeout=20)

    await asyncio.to_thread(fuzz)
    assert answered[200] > 10, answered
    assert answered[400] > 10, answered
