"""llama-index-core, OpenAILike and OpenAILikeEmbedding"""

from __future__ import annotations

from typing import Any

import openai
from clients import checks
from clients.checks import MODEL, Server, raises, works
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


def get_weather(city: str, days: int) -> str:
    """Weather of the next days."""
    return checks.weather(city, days)


def model(server: Server, **options: Any) -> OpenAILike:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 16_384}
    options = {"model": MODEL, "api_key": server.key, "max_retries": 0} | kind | options
    return OpenAILike(api_base=server.url, **options)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


@works("chat")
def chat(server: Server) -> None:
    assert checks.SENTENCE.match(model(server).chat(user(checks.TALK)).message.content or "")
    asked: Any = {"output_cls": Person, "prompt_template_str": checks.JSON_ASKED}
    program = LLMTextCompletionProgram.from_defaults(**asked, llm=model(server))
    assert program() == Person(name="Ada", age=36)


@works("text")
def text(server: Server) -> None:
    plain = model(server, is_chat_model=False)
    assert plain.complete("Oslo?<|report|>").text == checks.REPORT
    *_, last = plain.stream_complete("Oslo?<|report|>")
    assert last.text == checks.REPORT


@works("streaming")
def streaming(server: Server) -> None:
    chunks = list(model(server).stream_chat(user(checks.TALK)))
    assert checks.SENTENCE.match("".join(chunk.delta or "" for chunk in chunks))
    assert len(chunks) > 3


@works("tools")
async def tools(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    for streaming in (False, True):
        agent = FunctionAgent(tools=[tool], llm=model(server), streaming=streaming)
        assert str(await agent.run(checks.WEATHER)) == checks.REPORT


@works("forced tools")
def forced_tools(server: Server) -> None:
    ours, tool = model(server), FunctionTool.from_defaults(get_weather)
    answer = ours.chat_with_tools([tool], checks.WEATHER, tool_required=True)
    assert checks.fits(ours.get_tool_calls_from_response(answer)[0].tool_kwargs)


@works("JSON schemas")
def schemas(server: Server) -> None:
    structured = model(server, should_use_structured_outputs=True).as_structured_llm(Person)
    assert structured.chat(user(checks.JSON_ASKED)).raw == Person(name="Ada", age=36)


@works("errors")
def errors(server: Server) -> None:
    with raises(openai.BadRequestError, code="context_length_exceeded"):
        model(server).chat(user(checks.TOO_LONG))
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        model(server, api_key="wrong").chat(user(checks.TALK))
    with raises(openai.NotFoundError, code="model_not_found"):
        model(server, model="nonesuch").chat(user(checks.TALK))


@works("usage")
def usage(server: Server) -> None:
    raw: Any = model(server).chat(user(checks.TALK)).raw
    assert raw.usage.completion_tokens == 8


@works("seeds, logprobs")
def seeds(server: Server) -> None:
    options: Any = {"temperature": 1.0, "logprobs": True, "top_logprobs": 2}
    answers = [model(server, **options).chat(user(checks.TALK), seed=seed) for seed in (1, 1, 2, 3)]
    checks.varied([answer.message.content for answer in answers])
    assert len(answers[0].logprobs or ()) == 8


@works("embeddings")
def embeddings(server: Server) -> None:
    options: Any = {"api_base": server.url, "api_key": server.key}
    made = OpenAILikeEmbedding(MODEL, **options)
    one, two = made.get_text_embedding_batch(["one", "two"])
    assert one == made.get_text_embedding("one") != two


@works("cancelling")
async def cancelling(server: Server) -> None:
    await checks.cancel(server, model(server).astream_chat(user(checks.STORY)))
