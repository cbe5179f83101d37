"""anthropic, the official client."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from clients import checks
from clients.checks import MODEL, Server, raises, works

TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of the next days.",
    "input_schema": checks.PARAMETERS,
}


def client(server: Server, **options: Any) -> Any:
    return Anthropic(
        **{"base_url": server.root, "api_key": server.key, "max_retries": 0, **options}
    )


def request(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 200, "messages": messages, **options}


@works("chat")
def chat(server: Server) -> None:
    message = client(server).messages.create(**request(checks.TALK))
    assert checks.SENTENCE.match(message.content[0].text)
    assert message.stop_reason == "end_turn"


@works("streaming")
def streaming(server: Server) -> None:
    with client(server).messages.stream(**request(checks.TALK)) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert len(pieces) > 3


@works("tools")
def tools(server: Server) -> None:
    asked = request(checks.WEATHER, tools=[TOOL])
    message = client(server).messages.create(**asked)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": checks.weather(**call.input),
    }
    asked["messages"] += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert client(server).messages.create(**asked).content[0].text == checks.REPORT


@works("forced tools")
def forced_tools(server: Server) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = client(server).messages.create(
            **request(checks.WEATHER, tools=[TOOL], tool_choice=choice)
        )
        assert checks.fits(message.content[0].input)


@works("errors")
def errors(server: Server) -> None:
    with raises(anthropic.BadRequestError, "prompt is too long"):
        client(server).messages.create(**request(checks.TOO_LONG))
    with raises(anthropic.AuthenticationError):
        client(server, api_key="wrong").messages.create(**request(checks.TALK))
    with raises(anthropic.NotFoundError, "nonesuch"):
        client(server).messages.create(**request(checks.TALK) | {"model": "nonesuch"})


@works("usage")
def usage(server: Server) -> None:
    message = client(server).messages.create(**request(checks.TALK))
    assert message.usage.output_tokens == 8
    count = client(server).messages.count_tokens(
        model=MODEL, messages=request(checks.TALK)["messages"]
    )
    cached = message.usage.cache_read_input_tokens
    assert count.input_tokens == message.usage.input_tokens + cached


@works("cancelling")
def cancelling(server: Server) -> None:
    stream = client(server).messages.create(**request(checks.STORY, max_tokens=9000), stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    assert server.open_requests()
    stream.close()
    server.becomes_idle()
