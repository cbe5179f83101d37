"""langchain-openai, ChatOpenAI, OpenAI and OpenAIEmbeddings"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from clients import checks
from clients.checks import MODEL, Server, raises, works
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


def get_weather(city: str, days: int) -> str:
    """Weather of the next days."""
    return checks.weather(city, days)


TOOL = StructuredTool.from_function(get_weather)


def at(server: Server) -> dict[str, Any]:
    return {"model": MODEL, "base_url": server.url, "api_key": server.key, "max_retries": 0}


def model(server: Server, **options: Any) -> Any:
    return ChatOpenAI(**(at(server) | options))


@works("chat")
def chat(server: Server) -> None:
    answers = model(server).batch([checks.TALK, [("system", "Be brief."), ("user", "Hi.")]])
    assert all(checks.SENTENCE.match(answer.content) for answer in answers)


@works("text")
def text(server: Server) -> None:
    assert OpenAI(**at(server)).invoke("Oslo?<|report|>") == checks.REPORT


@works("streaming")
def streaming(server: Server) -> None:
    chunks = list(model(server).stream(checks.TALK))
    assert checks.SENTENCE.match("".join(chunk.content for chunk in chunks))
    assert len(chunks) > 3


@works("tools")
def tools(server: Server) -> None:
    bound = model(server).bind_tools([TOOL])
    asked = HumanMessage(checks.WEATHER)
    message = bound.invoke([asked])
    streamed = sum(bound.stream([asked]), AIMessageChunk(content=""))
    assert [call["args"] for call in streamed.tool_calls] == [{"city": "Oslo", "days": 2}]
    said = TOOL.invoke(message.tool_calls[0])
    assert bound.invoke([asked, message, said]).content == checks.REPORT


@works("forced tools")
def forced_tools(server: Server) -> None:
    forced = model(server).bind_tools([TOOL], tool_choice="any").invoke(checks.WEATHER)
    assert checks.fits(forced.tool_calls[0]["args"])
    structured = model(server).with_structured_output(Person, method="function_calling")
    assert isinstance(structured.invoke(checks.JSON_ASKED), Person)


@works("JSON schemas")
def schemas(server: Server) -> None:
    for method in ("json_schema", "json_mode"):
        structured = model(server).with_structured_output(Person, method=method)
        assert structured.invoke(checks.JSON_ASKED) == Person(name="Ada", age=36)


@works("errors")
def errors(server: Server) -> None:
    """Context overflows are an exception of their own, which summarising middleware rests on."""
    with raises(ContextOverflowError, "maximum context length"):
        model(server).invoke(checks.TOO_LONG)
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        model(server, api_key="wrong").invoke(checks.TALK)
    with raises(openai.NotFoundError, code="model_not_found"):
        model(server, model="nonesuch").invoke(checks.TALK)


@works("usage")
def usage(server: Server) -> None:
    assert model(server).invoke(checks.TALK).usage_metadata["output_tokens"] == 8
    streamed = sum(model(server, stream_usage=True).stream(checks.TALK), AIMessageChunk(content=""))
    assert streamed.usage_metadata["output_tokens"] == 8


@works("seeds, logprobs")
def seeds(server: Server) -> None:
    said = [model(server, seed=seed).invoke(checks.TALK).content for seed in (1, 1, 2, 3)]
    checks.varied(said)
    answer = model(server, logprobs=True, top_logprobs=2).invoke(checks.TALK)
    assert len(answer.response_metadata["logprobs"]["content"]) == 8


@works("embeddings")
def embeddings(server: Server) -> None:
    """Its default cuts texts with a tokenizer from the network, which this switches off."""
    made = OpenAIEmbeddings(**at(server), check_embedding_ctx_length=False)
    one, two = made.embed_documents(["one", "two"])
    assert one == made.embed_query("one") != two


@works("cancelling")
async def cancelling(server: Server) -> None:
    async for _ in model(server).astream(checks.STORY):
        assert server.open_requests()
        break
    await asyncio.to_thread(server.becomes_idle)
