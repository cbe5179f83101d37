"""Chats with reasoning and tool calls, and what their answers add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.checkpoints.tiny_tokenizer import EOS_ID
from support.fakes.scheduler import replay
from support.processes.gateway_stack import Events, Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "book"}},
]
ASK: dict[str, Any] = {"messages": USER, "tools": TOOLS}
FORMATS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"é🙂\\"", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "book", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=weather>\n<parameter=city>\nZürich "é🙂"\n</parameter>\n'
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=book>\n</function>\n</tool_call>"
    ),
    "glm47": (
        '<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich "é🙂"</arg_value>'
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>book</tool_call>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Zürich \\"é🙂\\"", "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>book<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "mistral": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Zürich \\"é🙂\\"", "days": 2}[TOOL_CALLS]book[ARGS]{}'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich \\"é🙂\\"", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.book:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "phi4_mini_json": (
        'functools[{"name": "weather", "arguments": {"city": "Zürich \\"é🙂\\"", "days": 2}}, '
        '{"name": "book", "arguments": {}}]'
    ),
    "pythonic": """[weather(city='Zürich "é🙂"', days=2), book()]""",
}
REASONING = {  # qwen3's with the others
    "glm47": "glm47",
    "deepseek_v31": "deepseek_v3",
    "kimi_k2": "kimi_k2",
}
CALLS = [("weather", {"city": 'Zürich "é🙂"', "days": 2}), ("book", {})]


async def tool_stack(start_stack: StartStack, model: Path, parser: str) -> Stack:
    """A gateway that parses reasoning and calls."""
    return await start_stack(
        model=model,
        reasoning_parser=REASONING.get(parser, "qwen3"),
        tool_call_parser=parser,
        enable_auto_tool_choice=True,
    )


def script(stack: Stack, tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    """Have the scheduler answer with `text`; its tokens and the one that ends it."""
    ids = [*tokenizer.encode_now(text, add_special_tokens=False), EOS_ID]
    stack.scheduler.script = replay(ids, **options)
    return ids


def message_of(events: Events, index: int = 0) -> dict[str, Any]:
    """The message that a stream adds up to."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for choice in events.choices(index):
        delta = dict(choice["delta"])
        for part in delta.pop("tool_calls", ()):
            if "id" in part:
                assert part["index"] not in calls
                calls[part["index"]] = part
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        for key, text in delta.items():
            message[key] = message.get(key, "") + text
    if calls:
        assert list(calls) == list(range(len(calls)))
        message["tool_calls"] = list(calls.values())
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs by chance or by convention."""
    shown = {key: value for key, value in message.items() if value and key != "role"}
    calls = [
        (call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return shown | {"tool_calls": calls}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and arguments of each call."""
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
