"""litellm"""

from __future__ import annotations

import json
import os
from typing import Any

from clients import checks
from clients.checks import MODEL, Server, raises, works

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks for prices in the network

import litellm

FUNCTION = {
    "name": "get_weather",
    "description": "Weather of the next days.",
    "parameters": checks.PARAMETERS,
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def ask(server: Server, messages: Any, **options: Any) -> Any:
    """`hosted_vllm/` is what litellm's users write for a vLLM server."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {"model": f"hosted_vllm/{MODEL}", "api_key": server.key, "num_retries": 0} | options
    return litellm.completion(api_base=server.url, messages=messages, **options)


@works("chat")
def chat(server: Server) -> None:
    for prefix in ("hosted_vllm", "openai"):
        choice = ask(server, checks.TALK, model=f"{prefix}/{MODEL}").choices[0]
        assert checks.SENTENCE.match(choice.message.content)
        assert choice.finish_reason == "stop"


@works("text")
def text(server: Server) -> None:
    options = {"api_base": server.url, "api_key": server.key, "temperature": 0}
    answer = litellm.text_completion(
        "Oslo?<|report|>", f"text-completion-openai/{MODEL}", **options
    )
    assert answer.choices[0].text == checks.REPORT


@works("streaming")
def streaming(server: Server) -> None:
    whole = ask(server, checks.TALK, seed=7)
    chunks = list(ask(server, checks.TALK, seed=7, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert len(chunks) > 3


@works("tools")
def tools(server: Server) -> None:
    messages: Any = [{"role": "user", "content": checks.WEATHER}]
    message = ask(server, messages, tools=TOOLS, tool_choice="auto").choices[0].message
    streamed = litellm.stream_chunk_builder(list(ask(server, messages, tools=TOOLS, stream=True)))
    (call,), (same,) = message.tool_calls, streamed.choices[0].message.tool_calls
    assert same.function.arguments == call.function.arguments
    messages += [
        message,
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": checks.weather_of(call.function.arguments),
        },
    ]
    assert ask(server, messages, tools=TOOLS).choices[0].message.content == checks.REPORT


@works("forced tools")
def forced_tools(server: Server) -> None:
    answer = ask(server, checks.WEATHER, tools=TOOLS, tool_choice="required")
    assert checks.fits(answer.choices[0].message.tool_calls[0].function.arguments)


@works("JSON schemas")
def schemas(server: Server) -> None:
    answer = ask(server, checks.JSON_ASKED, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "age": 36}


@works("errors")
def errors(server: Server) -> None:
    """Context overflows are an exception of their own, which its fallbacks rest on."""
    for prefix in ("hosted_vllm", "openai"):
        with raises(litellm.ContextWindowExceededError, "maximum context length"):
            ask(server, checks.TOO_LONG, model=f"{prefix}/{MODEL}")
    with raises(litellm.AuthenticationError):
        ask(server, checks.TALK, api_key="wrong")
    with raises(litellm.NotFoundError, "nonesuch"):
        ask(server, checks.TALK, model="hosted_vllm/nonesuch")


@works("usage")
def usage(server: Server) -> None:
    assert ask(server, checks.TALK).usage.completion_tokens == 8
    *_, last = ask(server, checks.TALK, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 8


@works("seeds, logprobs")
def seeds(server: Server) -> None:
    said = [ask(server, checks.TALK, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3)]
    checks.varied(said)
    choice = ask(server, checks.TALK, logprobs=True, top_logprobs=2, temperature=0).choices[0]
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 8


@works("embeddings")
def embeddings(server: Server) -> None:
    made = litellm.embedding(
        f"hosted_vllm/{MODEL}", input=["one", "two"], api_base=server.url, api_key=server.key
    )
    assert abs(sum(x * x for x in made.data[0]["embedding"]) - 1) < 1e-5


@works("cancelling")
async def cancelling(server: Server) -> None:
    messages = [{"role": "user", "content": checks.STORY}]
    options: Any = {"api_base": server.url, "api_key": server.key, "stream": True}
    await checks.cancel(server, litellm.acompletion(f"hosted_vllm/{MODEL}", messages, **options))
