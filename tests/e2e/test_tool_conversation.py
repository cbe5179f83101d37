"""The official client calls tools: a gateway process with its flags, and a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.checkpoints import tiny_tokenizer
from support.checkpoints.tiny_tokenizer import EOS_ID
from support.fakes.scheduler import FakeScheduler, replay, running
from support.processes.gateway import gateway, until_ready
from support.processes.ports import free_port
from surestep_gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(120)

USER: Any = {"role": "user", "content": "weather in Oslo and Rome?"}
# qwen3's with the others
REASONING = {"glm47": "glm47", "minimax_m2": "minimax_m2", "deepseek_v31": "deepseek_v3"}
HERMES_CALL = (
    '<tool_call>\n{{"name": "Weather", "arguments": {{"city": "{}", "days": 2}}}}\n</tool_call>'
)
CODER_CALL = (
    "<tool_call>\n<function=Weather>\n<parameter=city>\n{}\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
# As an output has calls for Oslo and Rome, and as a later prompt does.
BOTH = {
    "hermes": f"{HERMES_CALL.format('Oslo')}\n{HERMES_CALL.format('Rome')}",
    "qwen3_coder": f"{CODER_CALL.format('Oslo')}\n{CODER_CALL.format('Rome')}",
    "glm47": "".join(
        f"<tool_call>Weather<arg_key>city</arg_key><arg_value>{city}</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        for city in ("Oslo", "Rome")
    ),
    "minimax_m2": "<minimax:tool_call>\n"
    + "".join(
        f'<invoke name="Weather">\n<parameter name="city">{city}</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n'
        for city in ("Oslo", "Rome")
    )
    + "</minimax:tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(
        f'<｜tool▁call▁begin｜>Weather<｜tool▁sep｜>{{"city": "{city}", "days": 2}}<｜tool▁call▁end｜>'
        for city in ("Oslo", "Rome")
    )
    + "<｜tool▁calls▁end｜>",
}
LATER = '[Weather city="Oslo" days=2][Weather city="Rome" days=2]<|im_end|>'
JOINED = '[Weather {"city": "Oslo", "days": 2}][Weather {"city": "Rome", "days": 2}]<|im_end|>'


class Weather(BaseModel):
    """Weather of the next days."""

    city: str
    days: int


TOOLS: Any = [openai.pydantic_function_tool(Weather)]


@asynccontextmanager
async def served(folder: Path, parser: str) -> AsyncIterator[tuple[FakeScheduler, AsyncOpenAI]]:
    """Scheduler and client of a gateway process."""
    joining = parser.startswith("deepseek")
    template = tiny_tokenizer.JOINING_TEMPLATE if joining else tiny_tokenizer.THINKING_TEMPLATE
    tiny_tokenizer.save(folder, "<think>", "</think>", template=template)
    reasoning = REASONING.get(parser, "qwen3")
    flags = ("--reasoning-parser", reasoning, "--enable-auto-tool-choice", "--tool-call-parser")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        running() as scheduler,
        gateway(folder, port, scheduler.port, *flags, parser) as process,
        httpx.AsyncClient(base_url=url) as probe,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        await until_ready(probe, process)
        yield scheduler, client


@pytest.mark.parametrize(
    ("parser", "chunk"),
    [*((parser, 6) for parser in BOTH), ("hermes", 1), ("qwen3_coder", 1)],
)
async def test_a_conversation_with_tools(tmp_path: Path, parser: str, chunk: int) -> None:
    async with served(tmp_path / "tiny", parser) as (scheduler, client):
        tokenizer = Tokenizer.load(tmp_path / "tiny")

        def answer(text: str) -> None:
            ids = tokenizer.encode_now(text, add_special_tokens=False)
            scheduler.script = replay([*ids, EOS_ID], chunk=chunk)

        answer(f"Two cities.\n</think>\n\n{BOTH[parser]}")
        asked: Any = {"model": "tiny", "messages": [USER], "tools": TOOLS}
        whole = await client.chat.completions.create(**asked, tool_choice="auto")
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert message.reasoning_content == "Two cities."
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        thought = tokenizer.encode_now("Two cities.\n", add_special_tokens=False)
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(thought)
        cities = []
        for one in message.tool_calls or ():
            assert one.type == "function"
            cities.append(Weather.model_validate_json(one.function.arguments).city)
        assert cities == ["Oslo", "Rome"]

        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        parsed = [one.function.parsed_arguments for one in streamed.message.tool_calls or ()]
        assert parsed == [Weather(city="Oslo", days=2), Weather(city="Rome", days=2)]

        answer("Fine.\n</think>\n\nOslo 3, Rome 20.")
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": "3"}
            for one in message.tool_calls or ()
        ]
        asked["messages"] = [USER, message, *results]
        final = await client.chat.completions.create(**asked)
        assert final.choices[0].message.content == "Oslo 3, Rome 20."
        assert final.choices[0].finish_reason == "stop"
        prompt = tokenizer.decode(scheduler.requests[-1].prompt_ids, skip_special_tokens=False)
        assert (JOINED if parser.startswith("deepseek") else LATER) in prompt
        assert prompt.count("<|im_start|>tool\n3<|im_end|>") == 2


@pytest.mark.parametrize("parser", BOTH)
async def test_without_tools_a_call_is_text(tmp_path: Path, parser: str) -> None:
    """vllm-project/vllm#46183: one token at a time, and in windows as behind drafts."""
    async with served(tmp_path / "tiny", parser) as (scheduler, client):
        tokenizer = Tokenizer.load(tmp_path / "tiny")
        text = f"a < b, {BOTH[parser]}, and <tool_ca"
        ids = tokenizer.encode_now(f"so\n</think>\n\n{text}", add_special_tokens=False)
        asked: Any = {"model": "tiny", "messages": [USER]}
        for chunk in (1, 6):
            scheduler.script = replay([*ids, EOS_ID], chunk=chunk)
            whole = (await client.chat.completions.create(**asked)).choices[0]
            async with client.chat.completions.stream(**asked) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                said = choice.message
                assert (said.content, said.tool_calls or None) == (text, None)
                assert choice.finish_reason == "stop"


@pytest.mark.parametrize("parser", ["hermes", "deepseek_v31"])
async def test_forced_calls_are_constrained(tmp_path: Path, parser: str) -> None:
    """A grammar goes to the scheduler, and begins behind the reasoning that the prompt begins."""
    async with served(tmp_path / "tiny", parser) as (scheduler, client):
        tokenizer = Tokenizer.load(tmp_path / "tiny")
        text = f"so</think>\n{BOTH[parser]}"
        ids = tokenizer.encode_now(text, add_special_tokens=False)
        scheduler.script = replay([*ids, EOS_ID], chunk=3)
        choices: list[Any] = ["required", {"type": "function", "function": {"name": "Weather"}}]
        for choice in choices:
            answer = await client.chat.completions.create(
                model="tiny", messages=[USER], tools=TOOLS, tool_choice=choice
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            grammar = scheduler.requests[-1].sampling.grammar
            assert list(grammar.begins_after) == [tokenizer.id("</think>")]
            assert "Weather" in grammar.source
        unknown: Any = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(openai.BadRequestError, match="none of the tools"):
            await client.chat.completions.create(
                model="tiny", messages=[USER], tools=TOOLS, tool_choice=unknown
            )
