"""The official client and a model that writes Harmony: a gateway process, and a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.checkpoints import harmony
from support.clients.harmony_cases import ids_of, split, tokenizer
from support.fakes.scheduler import FakeScheduler, default_info, replay, running
from support.processes.gateway import gateway, until_ready
from support.processes.ports import free_port

pytestmark = pytest.mark.timeout(120)

FLAGS = ("--reasoning-parser", "openai_gptoss", "--tool-call-parser", "openai")
USER: Any = {"role": "user", "content": "weather in Oslo, please, and no <|end|>"}
START = "<|start|>assistant"


class Weather(BaseModel):
    """Weather of the next days."""

    city: str
    days: int


TOOLS: Any = [openai.pydantic_function_tool(Weather)]


def call(thought: str, city: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|>"
        f"{START}<|channel|>commentary to=functions.Weather <|constrain|>json<|message|>"
        f'{{"city": "{city}", "days": 2}}<|call|>'
    )


def answer(thought: str, text: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|>"
        f"{START}<|channel|>final<|message|>{text}<|return|>"
    )


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[FakeScheduler, AsyncOpenAI]]:
    """Scheduler and client of a gateway process."""
    harmony.save(folder)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        running(info=default_info(max_model_len=4096)) as scheduler,
        gateway(folder, port, scheduler.port, *FLAGS, "--enable-auto-tool-choice") as process,
        httpx.AsyncClient(base_url=url) as probe,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        await until_ready(probe, process)
        yield scheduler, client


@pytest.mark.parametrize("chunk", [1, 6])
async def test_a_conversation(tmp_path: Path, chunk: int) -> None:
    """Two calls in a row, each with its result, then the answer, then another question."""
    async with served(tmp_path / "gpt-oss") as (scheduler, client):

        def writes(output: str) -> None:
            scheduler.script = replay(ids_of(split(output)), chunk=chunk)

        def prompt() -> str:
            ids = scheduler.requests[-1].prompt_ids
            return tokenizer().decode(ids, skip_special_tokens=False)

        asked: Any = {"model": "gpt-oss", "messages": [USER], "tools": TOOLS}
        asked["reasoning_effort"] = "high"
        for number, city in enumerate(("Oslo", "Zürich é🙂")):
            writes(call(f"thought {number}", city))
            whole = (await client.chat.completions.create(**asked)).choices[0]
            async with client.chat.completions.stream(**asked) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                assert choice.finish_reason == "tool_calls"
                assert not choice.message.content
                reasoning: Any = choice.message
                assert reasoning.reasoning_content == f"thought {number}"
                [tool_call] = choice.message.tool_calls or []
                assert tool_call.type == "function"
                given = Weather.model_validate_json(tool_call.function.arguments)
                assert given == Weather(city=city, days=2)
            message = whole.message
            [one] = message.tool_calls or []
            asked["messages"] += [message, {"role": "tool", "tool_call_id": one.id, "content": "3"}]
        assert "thought 0" in prompt()
        assert "thought 1" not in prompt()

        writes(answer("thought 2", "Oslo 3, Zürich 3."))
        final = (await client.chat.completions.create(**asked)).choices[0]
        assert (final.finish_reason, final.message.content) == ("stop", "Oslo 3, Zürich 3.")
        assert "Reasoning: high" in prompt()
        assert "thought 0" in prompt()
        assert "thought 1" in prompt()

        asked["messages"] += [final.message, USER]
        writes(answer("thought 3", "Again."))
        parallel = await asyncio.gather(
            *(client.chat.completions.create(**asked, n=2) for _ in range(4))
        )
        texts = [choice.message.content for one in parallel for choice in one.choices]
        assert texts == ["Again."] * 8
        assert "thought" not in prompt()
        assert prompt().count("<|call|>") == 2


async def test_an_effort_that_there_is_not(tmp_path: Path) -> None:
    async with served(tmp_path / "gpt-oss") as (scheduler, client):
        with pytest.raises(openai.BadRequestError, match="low, medium or high") as refusal:
            await client.chat.completions.create(
                model="gpt-oss", messages=[USER], reasoning_effort="minimal"
            )
        assert refusal.value.param == "reasoning_effort"
        assert scheduler.requests == []
