"""Every documented refusal: status, shape, message and parameter, before the first byte."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.fakes.scheduler import failing
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelFault,
    QueueFull,
    SurestepError,
    Unavailable,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BOTH = (CHAT, COMPLETIONS)
CODES = {
    400: {
        *("context_length_exceeded", "invalid_value", "missing_required_parameter"),
        "unsupported_parameter",
    },
    404: {"model_not_found", "unknown_url"},
    405: {"method_not_supported"},
    429: {"rate_limit_exceeded"},
    500: {"server_error"},
    503: {"service_unavailable"},
    504: {"timeout"},
}

TOOLS = [{"type": "function", "function": {"name": "f"}}]
COMMON: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": "4"}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"n": 1.5}, "n", "valid integer"),
    ({"n": 0.0}, "n", "greater than or equal to 1"),
    ({"seed": 7.5}, "seed", "valid integer"),
    ({"seed": 1e300}, "seed", "less than"),
    ({"top_k": 40.25}, "top_k", "valid integer"),
    ({"stop_token_ids": [5.5]}, "stop_token_ids[0]", "valid integer"),
    ({"speculative": {"num_tokens": 0.5}}, "speculative.num_tokens", "valid integer"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "exceeds max_tokens=8"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "at most 128"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"seed": 1 << 63}, "seed", "less than"),
    ({"seed": 1 << 80}, "seed", "less than"),
    ({"stop": [""]}, "stop", "at least 1 character"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": ["x" * 257]}, "stop", "at most 256 characters"),
    ({"stop": "x" * 257}, "stop", "at most 256 characters"),
    ({"stop": 3}, "stop", "valid string"),
    ({"stop_token_ids": [400]}, "stop_token_ids", "not in the vocabulary of 400"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "greater than or equal to 0"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
    ({"allowed_token_ids": [5, 400]}, "allowed_token_ids", "not in the vocabulary"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "not in the vocabulary"),
    ({"logit_bias": {"x": 1, "5": 1, "-1": 1}}, "logit_bias", "not a token id: 'x', '-1'"),
    ({"logit_bias": {"x" * 99: 1}}, "logit_bias", f"'{'x' * 32}'"),
    ({"logit_bias": {"400": 1, "5": 1, "7777": 1}}, "logit_bias", "of 400 ids: 400, 7777"),
    ({"truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "at most 1024"),
    ({"bad_words": ["x"] * 1025}, "bad_words", "at most 1024"),
    ({"bad_words": ["x" * 257]}, "bad_words", "at most 256 characters"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    ({"allowed_token_ids": [1] * 262145}, "allowed_token_ids", "at most 262144"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids", ""),
    ({"bad_words": [""]}, "bad_words", "at least 1 character"),
    ({"bad_words": ["  "]}, "bad_words", "has no tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with 'stream'"),
    ({"priority": 1 << 31}, "priority", "less than"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most 256"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"speculative": {"num_tokens": -1}}, "speculative.num_tokens", "greater than or equal to 0"),
    ({"speculative": {"num_tokens": 17}}, "speculative.num_tokens", "less than or equal to 16"),
    ({"speculative": 4}, "speculative", "an object"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs 'stream'"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"request_id": "a b"}, "request_id", "pattern"),
    ({"response_format": {"type": "json"}}, "response_format.type", "'json_object'"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
        "must be a schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
        "Invalid type: x",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {}}},
        "response_format.format",
        "not supported",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    (
        {"structured_outputs": {"regex": "a", "json": "", "choice": ["a"]}},
        "structured_outputs.choice",
        "both say what the output must be",
    ),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
    ({"structured_outputs": {"choice": ["x"] * 4097}}, "structured_outputs.choice", "at most 4096"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_choice": "a"}, "guided_choice", "valid array"),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages", "at most 4096"),
    ({"tools": TOOLS * 257}, "tools", "at most 256"),
    ({"messages": None}, "messages", "valid array"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]", "only parts of type 'text'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages", "leave no room"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"chat_template": "x"}, "chat_template", "does not trust"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot be set"),
    ({"add_generation_prompt": True, "continue_final_message": True},
     "continue_final_message", "exclude each other"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"tool_choice": "auto"}, "tool_choice", "only allowed when 'tools' are specified"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed when 'tools' are specified"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "supported"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
     "messages[0].function_call", "not supported"),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}]},
     "messages[0].content[0].refusal", "must be a string"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": TOOLS}, "tool_choice", "requires the server to run with --enable-auto-tool-choice"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "--tool-call-parser"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "--tool-call-parser"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice", "--tool-call-parser"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]},
     "messages[0].tool_calls[0].function", "missing"),
]  # fmt: skip
COMPLETIONS_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["x"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": [[1]] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["x"] * 129, "n": 8}, "n", "more than 1024 sequences"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": [400]}, "prompt", "not in the vocabulary"),
    ({"prompt": [[1], [400]]}, "prompt", "not in the vocabulary"),
    ({"prompt": [-1]}, "prompt", ""),
    ({"prompt": None}, "prompt", ""),
    ({"prompt": [1] * 256}, "prompt", "leave no room"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported unless"),
    ({"tools": [{}], "tool_choice": "auto"}, "tools", "not supported unless"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
]
CASES = [
    *((path, *case) for path in BOTH for case in COMMON),
    *((CHAT, *case) for case in CHAT_ONLY),
    *((COMPLETIONS, *case) for case in COMPLETIONS_ONLY),
]


def base(path: str) -> dict[str, Any]:
    """The smallest good body of an endpoint."""
    return {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}


def error_of(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error object, after a check of its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"] in CODES[status]
    return error


@pytest.mark.rotates(3)
async def test_bad_parameters(stack: Stack, subtests: pytest.Subtests) -> None:
    for path, fields, param, message in CASES:
        with subtests.test(path=path, fields=str(fields)[:60]):
            response = await stack.client.post(path, json=base(path) | fields)
            error = error_of(response, 400, "invalid_request_error")
            assert error["param"].startswith(param)
            assert message in error["message"]
    assert stack.scheduler.requests == []


@pytest.mark.parametrize("path", BOTH)
async def test_bodies_that_are_not_requests(stack: Stack, path: str) -> None:
    for raw in (b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": "\\ud800"}'):
        response = await stack.post(path, raw)
        error_of(response, 400, "invalid_request_error")


@pytest.mark.parametrize("path", BOTH)
async def test_another_model(stack: Stack, path: str) -> None:
    response = await stack.client.post(path, json=base(path) | {"model": "gpt-9"})
    error = error_of(response, 404, "not_found_error")
    assert error["param"] == "model"
    assert "'gpt-9' does not exist" in error["message"]


async def test_routes_and_methods(stack: Stack) -> None:
    error_of(await stack.client.get("/v1/nothing"), 404, "not_found_error")
    error_of(await stack.client.get("/v1/models/other"), 404, "not_found_error")
    response = await stack.client.get(CHAT)
    error_of(response, 405, "invalid_request_error")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("cause", "status", "kind", "headers"),
    [
        (QueueFull("full", retry_after=2.5), 429, "rate_limit_error", {"retry-after": "3"}),
        (Unavailable("draining", retry_after=7), 503, "service_unavailable_error", {"retry-after": "7"}),
        (Unavailable("no worker"), 503, "service_unavailable_error", {"retry-after": "1"}),
        (InvalidRequest("bad", param="top_k"), 400, "invalid_request_error", {}),
        (InvalidRequest("no grammar", param="grammar"), 400, "invalid_request_error", {}),
        (DeadlineExceeded("late"), 504, "timeout_error", {}),
        (ModelFault("logits are not finite"), 500, "model_error", {}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.rotates(3)
async def test_the_schedulers_refusals_keep_their_status(
    stack: Stack,
    cause: SurestepError,
    status: int,
    kind: str,
    headers: dict[str, str],
    stream: bool,
    n: int,
) -> None:
    stack.scheduler.script = failing(cause)
    response = await stack.chat(stream=stream, n=n)
    error = error_of(response, status, kind)
    assert error["message"] == cause.message
    assert error["param"] == (None if cause.param == "grammar" else cause.param)
    for name, value in headers.items():
        assert response.headers[name] == value


async def test_bugs_show_nothing_of_themselves(stack: Stack) -> None:
    for cause in (InternalError("secret"), RuntimeError("secret")):
        stack.scheduler.script = failing(cause)
        error = error_of(await stack.chat(), 500, "internal_error")
        assert "secret" not in error["message"]


@pytest.mark.parametrize("cause", [ModelFault("not finite"), QueueFull("odd"), RuntimeError("x")])
@pytest.mark.usefixtures("never_resumes")
async def test_after_the_first_byte_an_error_event_and_no_done(
    stack: Stack, cause: Exception
) -> None:
    stack.scheduler.script = failing(cause, after=[70, 71])
    for path in BOTH:
        events = await stack.stream(path, **base(path))
        assert not events.done
        assert events.text() != ""
        assert events[-1].keys() == {"error"}
        assert events[-1]["error"].keys() == {"message", "type", "param", "code"}


async def test_a_trusted_template_of_the_request(start_stack: StartStack) -> None:
    stack = await start_stack(trust_request_chat_template=True)
    response = await stack.chat(chat_template="{{ messages[0]['content'] }}", max_tokens=1)
    assert response.status_code == 200
    response = await stack.chat(chat_template="{% if %}", max_tokens=1)
    assert error_of(response, 400, "invalid_request_error")["param"] == "chat_template"
