"""What the Responses API refuses: by name, before the first byte, and before a scheduler is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import response_create_params as params
from support.clients.response_calls import RESPONSES, TOOLS, respond
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.apis.responses.body import ResponseRequest
from surestep_gateway.request.parse import NOT_IN_RESPONSES, UNSUPPORTED, WITHOUT_EFFECT

PAGE = (Path(__file__).parents[4] / "docs" / "use" / "responses.md").read_text()
USER = {"role": "user", "content": "x"}
SPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
FULL = {
    "type": "namespace",
    "name": "full",
    "tools": [{"type": "function", "name": f"f{n}"} for n in range(200)],
}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "weather"}],
}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "not supported"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
    ({"moderation": {"model": "m"}}, "moderation", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "output_text.logprobs"),
    ({"n": 2}, "n", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"tools": [{"type": "fonction"}]}, "tools[0]", "no tools of type 'fonction'"),
    ({"tools": [{"type": "left_out"}]}, "tools[0]", "no tools of type 'left_out'"),
    ({"tools": [{"type": ["function"]}]}, "tools[0]", "no tools of type '['function']'"),
    ({"tools": ["function"]}, "tools[0]", "an object"),
    ({"tools": [SPACE] * 256 + [FULL]}, "tools", "at most 256"),
    ({"tools": [FULL, FULL | {"name": "m"}]}, "tools", "at most 256"),
    ({"input": [USER, {"type": "unread"}]}, "input[1]", "no items of type 'unread'"),
    (
        {"tools": TOOLS, "tool_choice": ALLOWED | {"tools": [{"type": ["function"]}]}},
        "tool_choice.tools[0].type",
        "'function'",
    ),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "missing"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
        "tools[0].tools[0]",
        "no tools of type 'web_search'",
    ),
    ({"tools": [SPACE, {"type": "custom", "name": "n__f"}]}, "tools[1]", "called 'n__f'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "'tools'"),
    (
        {"tools": TOOLS, "tool_choice": ALLOWED | {"tools": [{"type": "web_search"}]}},
        "tool_choice",
        "none of the tools",
    ),
    ({"tools": TOOLS, "tool_choice": ALLOWED | {"tools": []}}, "tool_choice.tools", "at least 1"),
    ({"tools": TOOLS, "tool_choice": ALLOWED | {"mode": "x"}}, "tool_choice.mode", "'required'"),
    ({"previous_response_id": "resp_none"}, "previous_response_id", "'resp_none' is stored"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed when 'tools'"),
    ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice"),
    ({"input": None}, "input", ""),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": [USER] * 4097}, "input", "at most 4096"),
    ({"input": [USER, {"type": "computer_call"}]}, "input[1]", "no items of type 'computer_call'"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "'user'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "'input_image'",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
        "input[0].arguments",
        "missing",
    ),
    ({"input": "word " * 300}, "input", "leave no room"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "at most 16"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be a schema"),
    ({"truncation": "maybe"}, "truncation", "'auto' or 'disabled'"),
    (
        {"input": [{"type": "item_reference", "id": f"msg_{n:032x}0000"} for n in range(257)]},
        "input",
        "more than 256",
    ),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), CASES, ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)]
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.rotates(4)
async def test_refused_by_name(
    stack: Stack, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    response = await respond(stack, **body, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert stack.scheduler.requests == []


async def test_every_field_of_the_official_client(stack: Stack, subtests: pytest.Subtests) -> None:
    """Is served, refused by name, or without effect, and on the page."""
    for name in [*params.ResponseCreateParamsBase.__annotations__, "stream"]:
        with subtests.test(field=name):
            assert f"`{name}" in PAGE, name
            if name in ResponseRequest.model_fields or name in WITHOUT_EFFECT:
                continue
            response = await respond(stack, max_output_tokens=1, **{name: {"a": 1}})
            refused = response.status_code == 400
            assert refused == (name in NOT_IN_RESPONSES | UNSUPPORTED), response.text


async def test_retrieving_is_refused_by_name_too(start_stack: StartStack) -> None:
    stack = await start_stack()
    created = (await respond(stack, max_output_tokens=1)).json()
    path = f"{RESPONSES}/{created['id']}"
    for query, param in (("stream=true", "stream"),):
        refused = await stack.client.get(f"{path}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        refused = await stack.client.get(f"{path}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await stack.client.get(f"{RESPONSES}/resp_nonesuch")).status_code == 404
