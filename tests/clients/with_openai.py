"""openai, the official client."""

from __future__ import annotations

import itertools
from typing import Any

import openai
from clients import checks
from clients.checks import MODEL, Server, raises, works
from openai import OpenAI
from pydantic import BaseModel


class get_weather(BaseModel):
    """Weather of the next days."""

    city: str
    days: int


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


TOOLS: Any = [openai.pydantic_function_tool(get_weather)]


def client(server: Server, **options: Any) -> Any:
    return OpenAI(**{"base_url": server.url, "api_key": server.key, "max_retries": 0, **options})


def ask(server: Server, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client(server).chat.completions.create(model=MODEL, messages=messages, **options)


@works("chat")
def chat(server: Server) -> None:
    choice = ask(server, checks.TALK).choices[0]
    assert checks.SENTENCE.match(choice.message.content)
    assert choice.finish_reason == "stop"
    assert [model.id for model in client(server).models.list()] == [MODEL]


@works("text")
def text(server: Server) -> None:
    asked = {"model": MODEL, "prompt": "Oslo? <|report|>"}
    assert client(server).completions.create(**asked).choices[0].text == checks.REPORT
    chunks = client(server).completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == checks.REPORT


@works("streaming")
def streaming(server: Server) -> None:
    whole = ask(server, checks.TALK, seed=7).choices[0]
    chunks = list(ask(server, checks.TALK, seed=7, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > 3
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


@works("tools")
def tools(server: Server) -> None:
    messages: Any = [{"role": "user", "content": checks.WEATHER}]
    request = {"model": MODEL, "messages": messages, "tools": TOOLS}
    message = client(server).chat.completions.create(**request).choices[0].message
    with client(server).chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (call,), (same,) = message.tool_calls, streamed.tool_calls
    arguments = get_weather.model_validate_json(call.function.arguments)
    assert same.function.parsed_arguments == arguments
    said = checks.weather(**arguments.model_dump())
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": said}]
    answer = client(server).chat.completions.create(**request)
    assert answer.choices[0].message.content == checks.REPORT


@works("forced tools")
def forced_tools(server: Server) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        choice = ask(server, checks.WEATHER, tools=TOOLS, tool_choice=choice).choices[0]
        assert checks.fits(choice.message.tool_calls[0].function.arguments)


@works("JSON schemas")
def schemas(server: Server) -> None:
    schema = {"name": "Person", "schema": Person.model_json_schema()}
    for kind in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}):
        content = ask(server, checks.JSON_ASKED, response_format=kind).choices[0].message.content
        assert Person.model_validate_json(content) == Person(name="Ada", age=36)
    messages: Any = [{"role": "user", "content": checks.JSON_ASKED}]
    with raises(openai.BadRequestError, param="response_format.json_schema.schema"):
        wrong = {"name": "wrong", "schema": {"type": "nonesuch"}}
        ask(
            server, checks.JSON_ASKED, response_format={"type": "json_schema", "json_schema": wrong}
        )
    parsed = client(server).chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person
    )
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)


@works("Responses")
def responses(server: Server) -> None:
    ours = client(server).responses
    tool = {"type": "function", "name": "get_weather", "parameters": checks.PARAMETERS}
    asked: Any = {"model": MODEL, "tools": [tool]}
    with ours.stream(**asked, input=checks.WEATHER) as stream:
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    said = checks.weather_of(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": said}
    second = ours.create(**asked, input=[result], previous_response_id=first.id)
    assert second.output_text == checks.REPORT
    assert ours.retrieve(second.id).output_text == checks.REPORT
    ours.delete(first.id)
    with raises(openai.NotFoundError):
        ours.retrieve(first.id)
    parsed = ours.parse(model=MODEL, input=checks.JSON_ASKED, text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)


@works("errors")
def errors(server: Server) -> None:
    with raises(openai.BadRequestError, "maximum context", code="context_length_exceeded"):
        ask(server, checks.TOO_LONG)
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        client(server, api_key="wrong").models.list()
    with raises(openai.NotFoundError, "nonesuch", code="model_not_found"):
        client(server).completions.create(model="nonesuch", prompt="a")


@works("usage")
def usage(server: Server) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask(server, checks.TALK, **options)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 8)


@works("seeds, logprobs")
def seeds(server: Server) -> None:
    said = [ask(server, checks.TALK, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3)]
    checks.varied(said)
    choice = ask(server, checks.TALK, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    for token in choice.logprobs.content:
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


@works("embeddings")
def embeddings(server: Server) -> None:
    one, two = client(server).embeddings.create(model=MODEL, input=["one", "two"]).data
    assert abs(sum(x * x for x in one.embedding) - 1) < 1e-5
    assert one.embedding != two.embedding


@works("cancelling")
def cancelling(server: Server) -> None:
    stream = ask(server, checks.STORY, stream=True)
    assert next(itertools.islice(stream, 3, None))
    assert server.open_requests()
    stream.close()
    server.becomes_idle()
