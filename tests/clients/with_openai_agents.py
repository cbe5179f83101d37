"""openai-agents, OpenAIChatCompletionsModel and OpenAIResponsesModel"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from clients import checks
from clients.checks import MODEL, Server, raises, works
from pydantic import BaseModel

set_tracing_disabled(True)  # traces go to OpenAI
_kept: list[Any] = []  # one that is collected closes its connections, in a loop that is not theirs


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


def get_weather(city: str, days: int) -> str:
    """Weather of the next days."""
    return checks.weather(city, days)


def agent(
    server: Server,
    kind: Any = OpenAIChatCompletionsModel,
    *,
    name: str = MODEL,
    key: str = "",
    **options: Any,
) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=server.url, api_key=key or server.key, max_retries=0)
    _kept.append(client)
    model = kind(name, openai_client=client)
    return Agent(name="Clerk", instructions="Be brief.", model=model, **options)


async def deltas(stream: Any) -> list[str]:
    """Pieces of text, as they come."""
    return [
        event.data.delta
        async for event in stream.stream_events()
        if getattr(getattr(event, "data", None), "type", "") == "response.output_text.delta"
    ]


@works("chat")
async def chat(server: Server) -> None:
    first = await Runner.run(agent(server), checks.TALK)
    assert checks.SENTENCE.match(first.final_output)
    more = [*first.to_input_list(), {"role": "user", "content": "And?"}]
    assert checks.SENTENCE.match((await Runner.run(agent(server), more)).final_output)


@works("streaming")
async def streaming(server: Server) -> None:
    stream = Runner.run_streamed(agent(server), checks.TALK)
    pieces = await deltas(stream)
    assert "".join(pieces) == stream.final_output
    assert checks.SENTENCE.match(stream.final_output)
    assert len(pieces) > 3


@works("tools")
async def tools(server: Server) -> None:
    clerk = agent(server, tools=[function_tool(get_weather)])
    assert (await Runner.run(clerk, checks.WEATHER)).final_output == checks.REPORT
    stream = Runner.run_streamed(clerk, checks.WEATHER)
    assert "".join(await deltas(stream)) == checks.REPORT


@works("forced tools")
async def forced_tools(server: Server) -> None:
    """The first call is forced; behind it the model may answer."""
    for choice in ("required", "get_weather"):
        settings = ModelSettings(tool_choice=choice)
        clerk = agent(server, tools=[function_tool(get_weather)], model_settings=settings)
        assert (await Runner.run(clerk, checks.WEATHER)).final_output == checks.REPORT


@works("JSON schemas")
async def schemas(server: Server) -> None:
    said = await Runner.run(agent(server, output_type=Person), checks.JSON_ASKED)
    assert said.final_output == Person(name="Ada", age=36)


@works("Responses")
async def responses(server: Server) -> None:
    """The library's own default, `OpenAIResponsesModel`: tools, streams and objects."""
    clerk = agent(server, OpenAIResponsesModel, tools=[function_tool(get_weather)])
    assert (await Runner.run(clerk, checks.WEATHER)).final_output == checks.REPORT
    stream = Runner.run_streamed(clerk, checks.WEATHER)
    assert "".join(await deltas(stream)) == checks.REPORT
    asked = agent(server, OpenAIResponsesModel, output_type=Person)
    said = await Runner.run(asked, checks.JSON_ASKED)
    assert said.final_output == Person(name="Ada", age=36)


@works("errors")
async def errors(server: Server) -> None:
    with raises(openai.BadRequestError, code="context_length_exceeded"):
        await Runner.run(agent(server), checks.TOO_LONG)
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        await Runner.run(agent(server, key="wrong"), checks.TALK)
    with raises(openai.NotFoundError, code="model_not_found"):
        await Runner.run(agent(server, name="nonesuch"), checks.TALK)


@works("usage")
async def usage(server: Server) -> None:
    settings = ModelSettings(include_usage=True)
    clerk = agent(server, model_settings=settings)
    assert (await Runner.run(clerk, checks.TALK)).context_wrapper.usage.output_tokens == 8
    stream = Runner.run_streamed(clerk, checks.TALK)
    await deltas(stream)
    assert stream.context_wrapper.usage.output_tokens == 8


@works("cancelling")
async def cancelling(server: Server) -> None:
    stream = Runner.run_streamed(agent(server), checks.STORY)
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and server.open_requests():
            break
    stream.cancel()
    await asyncio.to_thread(server.becomes_idle)
