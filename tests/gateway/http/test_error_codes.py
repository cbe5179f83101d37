"""What OpenAI's clients look for in an error: the class goes by status, decisions by `code`."""

from __future__ import annotations

import openai
import pytest
from support.fakes.scheduler import failing
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import (
    DeadlineExceeded,
    InternalError,
    ModelFault,
    QueueFull,
    SurestepError,
    Unavailable,
)


def client(stack: Stack, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


async def ask(stack: Stack, content: str = "hello", key: str = "none", **fields: object) -> None:
    async with client(stack, key) as asking:
        stream = await asking.chat.completions.create(  # type: ignore[call-overload]
            **{"model": "tiny", "messages": [{"role": "user", "content": content}]} | fields
        )
        if fields.get("stream"):
            async for _ in stream:
                pass


async def test_a_context_that_overflows(stack: Stack) -> None:
    cases = [
        "word " * 400,  # by its tokens
        "word " * 40_000,  # by its characters, which nobody counts as tokens
    ]
    for content in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(stack, content)
        assert caught.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 256 tokens" in caught.value.message
        assert "prompt is too long" in caught.value.message  # langchain-openai
    answer = await stack.complete(prompt=[5] * 256)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_more_tokens_than_the_context_are_those_that_fit(stack: Stack) -> None:
    """Agents ask for the most that any model has, and go on after an answer that is cut."""
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 32_000}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/chat/completions", message | {"max_tokens": None, "max_completion_tokens": 32_000}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 32_000}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 32_000}),
        ("/v1/messages", message),
    ):
        response = await stack.client.post(path, json=body)
        assert response.status_code == 200, response.text
        sent = stack.scheduler.requests[-1]
        assert sent.max_tokens == 256 - len(sent.prompt_ids)


async def test_codes_of_wrong_requests(stack: Stack) -> None:
    for fields, kind, code in (
        ({"temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "unsupported_parameter"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
    ):
        with pytest.raises(kind) as caught:
            await ask(stack, **fields)
        assert caught.value.code == code
    missing = await stack.client.post("/v1/chat/completions", json={})
    assert missing.json()["error"]["code"] == "missing_required_parameter"
    for path, code in (("/v1/nothing", "unknown_url"), ("/v1/models/x", "model_not_found")):
        assert (await stack.client.get(path)).json()["error"]["code"] == code
    wrong_method = await stack.client.get("/v1/completions")
    assert wrong_method.json()["error"]["code"] == "method_not_supported"


async def test_a_wrong_key(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="right")
    with pytest.raises(openai.AuthenticationError) as caught:
        await ask(stack, key="wrong")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["x-should-retry"] == "false"  # Claude Code asks
    await ask(stack, key="right")


@pytest.mark.parametrize(
    ("cause", "kind", "code"),
    [
        (QueueFull("full"), openai.RateLimitError, "rate_limit_exceeded"),
        (Unavailable("gone"), openai.InternalServerError, "service_unavailable"),
        (DeadlineExceeded("late"), openai.InternalServerError, "timeout"),
        (ModelFault("NaN"), openai.InternalServerError, "server_error"),
        (InternalError("a bug"), openai.InternalServerError, "server_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.usefixtures("never_resumes")
async def test_codes_before_the_first_byte_and_after_it(
    stack: Stack, cause: SurestepError, kind: type[openai.APIStatusError], code: str
) -> None:
    stack.scheduler.script = failing(cause)
    for stream in (False, True):
        with pytest.raises(kind) as refused:
            await ask(stack, stream=stream)
        assert refused.value.code == code
    stack.scheduler.script = failing(cause, after=[70, 71])
    with pytest.raises(openai.APIError) as caught:
        await ask(stack, stream=True)
    assert not isinstance(caught.value, openai.APIStatusError)  # the status has been sent
    if not isinstance(cause, QueueFull):  # which nobody says of what runs
        assert caught.value.code == code
