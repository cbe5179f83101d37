"""One request in the words of each API, and what its answer says."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx
from surestep_cli.api.stream import EventReader

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "<b>Rome</b>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
APIS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_SHAPE = {"name": "place", "schema": CITY}
_FUNCTION = {"name": "weather", "parameters": CITY}


class Answer(NamedTuple):
    """What one says, whole or streamed."""

    text: str
    calls: list[tuple[str, Any]]


def ask(
    client: httpx.Client,
    api: str,
    wanted: str,
    bias: dict[str, float],
    *,
    stream: bool,
    thinking: bool,
) -> Answer:
    """Ask for `json`, or for a call that is `required`, `named` or of a `strict` function."""
    body = {
        "logit_bias": bias,
        "frequency_penalty": 2.0,
        "temperature": 0,
        "stream": stream,
        **_limit(api),
        **_wanted(api, wanted),
    }
    if api != "completions":
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    response = client.post(APIS[api], json=body)
    assert response.status_code == 200, (wanted, response.text)
    if not stream:
        return _whole(api, response.json())
    reader = EventReader()  # some of these APIs end without [DONE]
    found = map(reader.feed, response.text.encode().splitlines())
    return _streamed(api, [event for event in found if event is not None])


def _limit(api: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather in Oslo?"}]}
    match api:
        case "completions":
            return {"prompt": "Weather in Oslo?", "max_tokens": 120}
        case "responses":
            return {"input": "Weather in Oslo?", "max_output_tokens": 120}
    return asked | {"max_tokens": 120}


def _wanted(api: str, wanted: str) -> dict[str, Any]:
    if wanted == "json":
        match api:
            case "chat":
                kind = {"type": "json_schema", "json_schema": _SHAPE}
                return {"response_format": kind}
            case "completions":
                return {"structured_outputs": {"json": CITY}}
            case "responses":
                return {"text": {"format": {"type": "json_schema", **_SHAPE}}}
        return {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    strict = {"strict": True} if wanted == "strict" else {}
    if api == "messages":
        tool: dict[str, Any] = {"name": "weather", "input_schema": CITY} | strict
        named: Any = {"type": "tool", "name": "weather"}
        choices = {"required": {"type": "any"}, "named": named, "strict": {"type": "auto"}}
    elif api == "responses":
        tool = {"type": "function", **_FUNCTION} | strict
        named = {"type": "function", "name": "weather"}
        choices = {"required": "required", "named": named, "strict": "auto"}
    else:
        tool = {"type": "function", "function": _FUNCTION | strict}
        named = {"type": "function", "function": {"name": "weather"}}
        choices = {"required": "required", "named": named, "strict": "auto"}
    return {"tools": [tool], "tool_choice": choices[wanted]}


def _whole(api: str, answer: Any) -> Answer:
    match api:
        case "completions":
            return Answer(answer["choices"][0]["text"], [])
        case "chat":
            message = answer["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
            return Answer(message["content"] or "", calls)
        case "responses":
            items = answer["output"]
            called = [one for one in items if one["type"] == "function_call"]
            texts = [part["text"] for one in items for part in _message_parts(one)]
            calls = [(one["name"], json.loads(one["arguments"])) for one in called]
            return Answer("".join(texts), calls)
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    return Answer("".join(texts), [(block["name"], block["input"]) for block in used])


def _message_parts(item: Any) -> list[Any]:
    parts: list[Any] = item["content"] if item["type"] == "message" else []
    return parts


def _streamed(api: str, events: list[Any]) -> Answer:
    if api == "responses":
        return _whole(api, events[-1]["response"])
    names, inputs, texts = list[str](), list[str](), list[str]()
    for event in events:
        if api == "completions":
            texts += [choice["text"] for choice in event["choices"]]
        elif api == "chat":
            for delta in (choice["delta"] for choice in event["choices"]):
                texts.append(delta.get("content") or "")
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        names.append(call["function"]["name"])
                        inputs.append("")
                    inputs[-1] += call["function"].get("arguments") or ""
        elif (
            event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
        ):
            names.append(event["content_block"]["name"])
            inputs.append("")
        elif event["type"] == "content_block_delta":
            texts.append(event["delta"].get("text", ""))
            if "partial_json" in event["delta"]:
                inputs[-1] += event["delta"]["partial_json"]
    calls = [(name, json.loads(text)) for name, text in zip(names, inputs, strict=True)]
    return Answer("".join(texts), calls)
