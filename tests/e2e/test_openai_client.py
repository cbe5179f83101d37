"""The official client against the whole system."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.processes.stack import Stack

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(1, always=("",))]
SEED = 20261121


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_chat_streamed_equals_chat_whole(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "abc abc abc"}]
    options = {"model": model, "messages": messages, "max_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(stream=True, **options))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 24


def test_usage_comes_last_when_asked_for(client: OpenAI, model: str) -> None:
    chunks = list(
        client.completions.create(
            model=model,
            prompt="abc",
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_never_changes_a_token(client: OpenAI, model: str, temperature: float) -> None:
    def ids(num_tokens: int) -> list[int]:
        reply = client.completions.create(
            model=model,
            prompt="abcd " * 12,
            max_tokens=48,
            temperature=temperature,
            seed=11,
            extra_body={
                "ignore_eos": True,
                "return_token_ids": True,
                "speculative": {"num_tokens": num_tokens},
            },
        )
        token_ids: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
        return token_ids

    assert ids(4) == ids(0)
    assert len(ids(4)) == 48


def test_n_choices_are_siblings(client: OpenAI, model: str) -> None:
    def texts(n: int) -> list[str]:
        reply = client.completions.create(
            model=model, prompt="ab", n=n, max_tokens=12, temperature=1.5, seed=5
        )
        return [choice.text for choice in sorted(reply.choices, key=lambda c: c.index)]

    four = texts(4)
    assert len(set(four)) == 4
    assert texts(1) == four[:1]


def test_wrong_model_and_wrong_parameter(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        client.completions.create(model="nonesuch", prompt="a")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=model, prompt="a", temperature=-1)
    assert refusal.value.param == "temperature"


async def test_64_clients_some_of_which_vanish(stack: Stack, model: str) -> None:
    """Nothing leaks: slots, blocks and requests are back to zero."""
    rng = random.Random(SEED)
    plans = [(rng.randint(1, 200), rng.randint(1, 40), rng.random() < 0.3) for _ in range(64)]

    async def one(client: AsyncOpenAI, prompt_len: int, max_tokens: int, vanish: bool) -> int:
        stream = await client.completions.create(
            model=model,
            prompt=[rng.randrange(200) for _ in range(prompt_len)],
            max_tokens=max_tokens,
            temperature=0.7,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        count = 0
        async for chunk in stream:
            # Our extra field: the client's types do not know it.
            count += sum(len(getattr(choice, "token_ids", None) or ()) for choice in chunk.choices)
            if vanish and count >= max_tokens // 2:
                await stream.close()
                return max_tokens
        return count

    async with AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        counts = await asyncio.gather(*(one(client, *plan) for plan in plans))
    assert counts == [max_tokens for _, max_tokens, _ in plans]
    stack.wait_until(lambda: idle(stack), "idleness", timeout_s=20)


def idle(stack: Stack) -> bool:
    return (
        stack.metric("vllm:num_requests_running") == 0
        and stack.metric("vllm:num_requests_waiting") == 0
        and stack.metric("vllm:kv_cache_usage_perc") == 0
        and stack.metric("surestep:slots_used") == 0
    )
