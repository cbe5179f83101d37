"""What a conversation with tools and reasoning becomes for the model, and where its answer begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients.tool_chat import (
    ASK,
    FORMATS,
    TOOLS,
    USER,
    script,
    tool_stack,
)
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


def prompt_of(stack: Stack, thinking: Tokenizer) -> str:
    ids = stack.scheduler.requests[-1].prompt_ids
    return thinking.decode(ids, skip_special_tokens=False)


async def test_calls_and_results_in_the_conversation(stack: Stack, thinking: Tokenizer) -> None:
    call = {"id": "c1", "type": "function"}
    messages: list[dict[str, Any]] = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                call
                | {"function": {"name": "weather", "arguments": '{"city": "é", "days": null}'}},
                call | {"function": {"name": "book", "arguments": '{"cut sho'}},
                call | {"function": {"name": "book", "arguments": {"a": None}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12°"}]},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    await stack.chat(messages=messages, tools=TOOLS, max_tokens=1)
    assert prompt_of(stack, thinking) == (
        "tools weather,book\n<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\n<think>hm</think>[weather city="é" days=null][book][book a=null]'
        "<|im_end|>\n<|im_start|>tool\n12°<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a":' * 900 + "1" + "}" * 900])
async def test_arguments_that_no_template_can_take(
    stack: Stack, thinking: Tokenizer, arguments: str, role: str
) -> None:
    """Half a character, which no tokenizer reads, and more levels than Python goes down."""
    call = {"type": "function", "function": {"name": "book", "arguments": arguments}}
    messages = [*USER, {"role": role, "content": "", "tool_calls": [call]}]
    answer = await stack.chat(messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert "[book]" in prompt_of(stack, thinking)


IDS = (
    "{% for m in messages %}{{ m.content }}{{ m.tool_call_id }}"
    "{% for call in m.tool_calls %} {{ call.id }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("parser", "shown"),
    [
        ("kimi_k2", " functions.weather:0 functions.book:1;xfunctions.book:1;yother;"),
        ("hermes", " c1 functions_book_7;xfunctions_book_7;yother;"),
    ],
)
async def test_kimi_is_shown_the_names_of_functions_in_ids(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, parser: str, shown: str
) -> None:
    stack = await start_stack(
        model=thinking_model,
        tool_call_parser=parser,
        enable_auto_tool_choice=True,
        chat_template=IDS,
    )
    named = [("c1", "weather"), ("functions_book_7", "book")]
    calls = [{"id": id_, "function": {"name": name, "arguments": "{}"}} for id_, name in named]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "functions_book_7", "content": "x"},
        {"role": "tool", "tool_call_id": "other", "content": "y"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
    ]
    await stack.chat(messages=messages, tools=TOOLS, max_tokens=1)
    last = "functions.weather:2" if parser == "kimi_k2" else "c1"
    assert prompt_of(stack, thinking) == f"{shown} {last};"


# Text and parts elsewhere, and only text beside calls.
PLAIN_BESIDE_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}{% for call in m.tool_calls %}"
    "({{ call.function.name }}){% endfor %}{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize("said", ["so", [{"type": "text", "text": "so"}]])
async def test_text_beside_calls_stays_text(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, said: Any
) -> None:
    stack = await start_stack(model=thinking_model, chat_template=PLAIN_BESIDE_CALLS)
    call = {"id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*USER, {"role": "assistant", "content": said, "tool_calls": [call]}]
    await stack.chat(messages=messages, max_tokens=1)
    assert prompt_of(stack, thinking) == "hello;so(weather);"


async def test_tools_that_must_not_be_called(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>" + FORMATS["hermes"])
    choice = (await stack.chat(**ASK, tool_choice="none", skip_special_tokens=False)).json()
    message = choice["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"] == FORMATS["hermes"]
    assert prompt_of(stack, thinking).startswith("tools weather,book")


async def test_continuing_a_message_in_its_reasoning(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, " more\n</think>\n\nyes")
    for begun, reasoning, content in (
        ("<think>\nsome", " more", "yes"),
        ("<think>\nall</think>\n\nfine", None, " more\n</think>\n\nyes"),
        ("fine <think>", None, " more\n</think>\n\nyes"),
    ):
        messages = [*USER, {"role": "assistant", "content": begun}]
        body = (await stack.chat(messages=messages, continue_final_message=True)).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (reasoning, content)


async def test_tokenize_counts_the_tools(stack: Stack) -> None:
    with_tools = await stack.client.post("/tokenize", json=ASK)
    without = await stack.client.post("/tokenize", json={"messages": USER})
    assert with_tools.json()["count"] > without.json()["count"]


async def test_without_the_flags_all_is_content(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(model=thinking_model)
    text = "a</think>" + FORMATS["hermes"]
    script(stack, thinking, text)
    body = (await stack.chat(skip_special_tokens=False)).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": text,
        "refusal": None,
    }
    assert "completion_tokens_details" not in body["usage"]
