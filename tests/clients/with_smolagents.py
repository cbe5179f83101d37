"""smolagents, CodeAgent and ToolCallingAgent with OpenAIModel"""

from __future__ import annotations

import json
from typing import Any

import openai
from clients import checks
from clients.checks import MODEL, Server, raises, works
from smolagents import (
    CodeAgent,
    LogLevel,
    OpenAIModel,
    ToolCallingAgent,
    tool,
)

MESSAGES: Any = [{"role": "user", "content": checks.TALK}]


def get_weather(city: str, days: int) -> str:
    """Weather of the next days.

    Args:
        city: Where.
        days: How many.
    """
    return checks.weather(city, days)


def model(server: Server, **options: Any) -> OpenAIModel:
    options = {"model_id": MODEL, "api_key": server.key} | options
    client = {"max_retries": 0}
    return OpenAIModel(api_base=server.url, client_kwargs=client, retry=False, **options)


def agent(kind: Any, server: Server, **options: Any) -> Any:
    settings = {"max_steps": 3, "verbosity_level": LogLevel.OFF}
    settings |= {"stream_outputs": options.pop("stream_outputs", False)}
    return kind(tools=[tool(get_weather)], model=model(server, **options), **settings)


@works("chat")
def chat(server: Server) -> None:
    """An agent that writes code, which is run."""
    for stream in (False, True):
        clerk = agent(CodeAgent, server, stream_outputs=stream)
        assert clerk.run(checks.WEATHER) == "3 degrees"


@works("streaming")
def streaming(server: Server) -> None:
    deltas = [delta.content or "" for delta in model(server).generate_stream(MESSAGES)]
    assert checks.SENTENCE.match("".join(deltas))
    assert len(deltas) > 3


@works("tools")
def tools(server: Server) -> None:
    """With tool_choice="auto"; the call of final_answer ends the loop."""
    for stream in (False, True):
        clerk = agent(ToolCallingAgent, server, tool_choice="auto", stream_outputs=stream)
        assert clerk.run(checks.WEATHER) == "3 degrees"
        assert clerk.memory.steps[1].observations == "3 degrees"


@works("forced tools")
def forced_tools(server: Server) -> None:
    """What ToolCallingAgent asks for if nobody says otherwise."""
    assert agent(ToolCallingAgent, server).run(checks.WEATHER)


@works("JSON schemas")
def schemas(server: Server) -> None:
    """What CodeAgent(use_structured_outputs_internally=True) sends."""
    kind: Any = {"type": "json_object"}
    asked: Any = [{"role": "user", "content": checks.JSON_ASKED}]
    said = model(server).generate(asked, response_format=kind).content
    assert json.loads(said) == {"name": "Ada", "age": 36}


@works("errors")
def errors(server: Server) -> None:
    long: Any = [{"role": "user", "content": checks.TOO_LONG}]
    with raises(openai.BadRequestError, code="context_length_exceeded"):
        model(server).generate(long)
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        model(server, api_key="wrong").generate(MESSAGES)
    with raises(openai.NotFoundError, code="model_not_found"):
        model(server, model_id="nonesuch").generate(MESSAGES)


@works("usage")
def usage(server: Server) -> None:
    assert model(server).generate(MESSAGES).token_usage.output_tokens == 8
    *_, last = model(server).generate_stream(MESSAGES)
    assert last.token_usage.output_tokens == 8
