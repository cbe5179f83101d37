"""pydantic-ai-slim, agents with OpenAIChatModel"""

from __future__ import annotations

import asyncio
from typing import Any

from clients import checks
from clients.checks import MODEL, Server, raises, works
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelAPIError, ModelContextWindowExceededError, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)
FREE = ModelProfile(supports_forced_tool_choice=False, supports_json_object_output=False)


def agent(server: Server, *, name: str = MODEL, key: str = "", **options: Any) -> Any:
    profile = options.pop("profile", FREE)
    provider = OpenAIProvider(base_url=server.url, api_key=key or server.key)
    return Agent(OpenAIChatModel(name, provider=provider, profile=profile), retries=0, **options)


def get_weather(city: str, days: int) -> str:
    """Weather of the next days."""
    return checks.weather(city, days)


@works("chat")
def chat(server: Server) -> None:
    first = agent(server).run_sync(checks.TALK)
    assert checks.SENTENCE.match(first.output)
    history = first.all_messages()
    assert checks.SENTENCE.match(agent(server).run_sync("And?", message_history=history).output)


@works("streaming")
async def streaming(server: Server) -> None:
    async with agent(server).run_stream(checks.TALK) as stream:
        deltas = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
    assert checks.SENTENCE.match("".join(deltas))
    assert len(deltas) > 3


@works("tools")
async def tools(server: Server) -> None:
    with_tool = agent(server, tools=[get_weather])
    assert (await with_tool.run(checks.WEATHER)).output == checks.REPORT
    async with with_tool.run_stream(checks.WEATHER) as stream:
        assert await stream.get_output() == checks.REPORT
    made = await agent(server, output_type=ToolOutput(Person, name="Person")).run("Who?")
    assert isinstance(made.output, Person)  # a strict tool: not spelled as the script is
    prompted = PromptedOutput(Person, template="As JSON: {schema}")
    assert (await agent(server, output_type=prompted).run("Who?")).output == ADA


@works("forced tools")
def forced_tools(server: Server) -> None:
    output = ToolOutput(Person, name="Person")
    said = agent(server, output_type=output, profile=None).run_sync("Who?").output
    assert isinstance(said, Person)


@works("JSON schemas")
def schemas(server: Server) -> None:
    profile = ModelProfile(supports_json_schema_output=True)
    clerk = agent(server, output_type=NativeOutput(Person), profile=profile)
    assert clerk.run_sync(checks.JSON_ASKED).output == ADA


@works("errors")
def errors(server: Server) -> None:
    with raises(ModelContextWindowExceededError):
        agent(server).run_sync(checks.TOO_LONG)
    with raises(ModelHTTPError, status_code=401):
        agent(server, key="wrong").run_sync(checks.TALK)
    with raises(ModelAPIError, "nonesuch"):
        agent(server, name="nonesuch").run_sync(checks.TALK)


@works("usage")
async def usage(server: Server) -> None:
    assert (await agent(server).run(checks.TALK)).usage.output_tokens == 8
    async with agent(server).run_stream(checks.TALK) as stream:
        await stream.get_output()
    assert stream.usage.output_tokens == 8


@works("seeds, logprobs")
def seeds(server: Server) -> None:
    settings = [{"seed": seed} for seed in (1, 1, 2, 3)]
    runs = [agent(server).run_sync(checks.TALK, model_settings=one) for one in settings]
    checks.varied([run.output for run in runs])


@works("cancelling")
async def cancelling(server: Server) -> None:
    async with agent(server).run_stream(checks.STORY) as stream:
        async for _ in stream.stream_text(debounce_by=None):
            assert server.open_requests()
            break
    await asyncio.to_thread(server.becomes_idle)
