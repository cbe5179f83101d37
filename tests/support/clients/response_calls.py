"""Calls of the Responses API in tests: scripted answers, events, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI
from support.processes.gateway_stack import Stack

RESPONSES = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": CITY},
    {"type": "function", "name": "book"},
]


@asynccontextmanager
async def official(stack: Stack, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    """The official client of a stack."""
    url = f"{stack.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) as client:
        yield client


async def respond(stack: Stack, **body: Any) -> httpx.Response:
    """A response that is no stream."""
    return await stack.client.post(RESPONSES, json={"input": "hello"} | body)


async def events_of(stack: Stack, path: str = RESPONSES, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    response = await stack.client.post(path, json={"input": "hello", "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """The events of a stream's text."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_chance(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    shown = {
        key: value
        for key, value in response.items()
        if key not in ("id", "created_at", "completed_at", "output")
    }
    output = [
        {k: v for k, v in one.items() if k not in ("id", "call_id")} for one in response["output"]
    ]
    return shown | {"output": output}
