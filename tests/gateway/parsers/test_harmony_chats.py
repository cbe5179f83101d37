"""Chats with a model that writes Harmony, over HTTP: whole and streamed alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import harmony
from support.clients.harmony_cases import ids_of, split, tokenizer
from support.clients.tool_chat import (
    ASK,
    CALLS,
    CHAT,
    TOOLS,
    USER,
    calls_of,
    comparable,
    message_of,
)
from support.fakes.scheduler import losing, replay
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import InvalidRequest
from surestep_proto.scheduler_pb2 import LENGTH

FLAGS: dict[str, Any] = {
    "reasoning_parser": "openai_gptoss",
    "tool_call_parser": "openai",
    "enable_auto_tool_choice": True,
}
START = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I think\nso é🙂.<|end|>"
ANSWER = f"{THOUGHT}{START}<|channel|>final<|message|>Yes é🙂.<|return|>"
TWO_CALLS = (
    f"{THOUGHT}{START}<|channel|>commentary<|message|>Let me see.<|end|>"
    f"{START}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Zürich \\"é🙂\\"", "days": 2}<|end|>'
    f"{START} to=functions.book<|channel|>commentary json<|message|>{{}}<|call|>"
)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer and template are Harmony's."""
    return harmony.save(tmp_path_factory.mktemp("models") / "gpt-oss")


@pytest.fixture
async def stack(start_stack: StartStack, gpt_oss: Path) -> Stack:
    return await start_stack(model=gpt_oss, **FLAGS)


def script(stack: Stack, output: str, **options: Any) -> list[int]:
    """Have the scheduler answer with `output`, whose markers are special tokens."""
    ids = ids_of(split(output))
    stack.scheduler.script = replay(ids, **options)
    return ids


def prompt_of(stack: Stack) -> str:
    ids = stack.scheduler.requests[-1].prompt_ids
    return tokenizer().decode(ids, skip_special_tokens=False)


async def test_streamed_is_whole(stack: Stack) -> None:
    ids = script(stack, TWO_CALLS)
    choice = (await stack.chat(**ASK)).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning"] == message["reasoning_content"] == "I think\nso é🙂."
    assert message["content"] == "Let me see."
    assert calls_of(message) == CALLS
    for chunk in (1, 2, 3, 7, len(ids)):
        script(stack, TWO_CALLS, chunk=chunk)
        events = await stack.stream(CHAT, **ASK)
        assert events.done
        assert comparable(message_of(events)) == comparable(message)
        reasons = [one["finish_reason"] for one in events.choices()]
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


async def test_an_answer(stack: Stack) -> None:
    ids = script(stack, ANSWER, chunk=4)
    body = (await stack.chat(n=2)).json()
    for choice in body["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == (
            "stop",
            tokenizer().id("<|return|>"),
        )
        assert choice["message"]["content"] == "Yes é🙂."
    thought = len(ids_of(["I think\nso é🙂."]))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
    assert body["usage"]["completion_tokens"] == 2 * len(ids)
    events = await stack.stream(CHAT, messages=USER, n=2, stream_options={"include_usage": True})
    assert events[-1]["usage"] == body["usage"]


async def test_siblings_and_neighbours_have_parsers_of_their_own(stack: Stack) -> None:
    script(stack, TWO_CALLS, chunk=2)
    answers = await asyncio.gather(*(stack.stream(CHAT, **ASK, n=2) for _ in range(8)))
    messages = [message_of(events, index) for events in answers for index in (0, 1)]
    assert [calls_of(message) for message in messages] == [CALLS] * 16
    assert {message["reasoning"] for message in messages} == {"I think\nso é🙂."}
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 32


async def test_reasoning_can_be_left_out(stack: Stack) -> None:
    script(stack, ANSWER)
    events = await stack.stream(CHAT, messages=USER, include_reasoning=False)
    assert message_of(events) == {"role": "assistant", "content": "Yes é🙂."}


@pytest.mark.parametrize("refusing", [{"tool_choice": "none"}, {"tools": None}])
async def test_calls_that_were_not_asked_for(stack: Stack, refusing: dict[str, Any]) -> None:
    script(stack, TWO_CALLS)
    choice = (await stack.chat(**(ASK | refusing))).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('Let me see.\n{"city"')


async def test_one_call_at_most(stack: Stack) -> None:
    script(stack, TWO_CALLS)
    one = (await stack.chat(**ASK, parallel_tool_calls=False)).json()["choices"][0]
    assert calls_of(one["message"]) == CALLS[:1]


async def test_cut_short_anywhere(stack: Stack) -> None:
    ids = ids_of(split(TWO_CALLS))
    for end in range(1, len(ids), 7):
        stack.scheduler.script = replay(ids[:end], finish=LENGTH, chunk=3)
        choice = (await stack.chat(**ASK)).json()["choices"][0]
        events = await stack.stream(CHAT, **ASK)
        assert choice["finish_reason"] == events.choices()[-1]["finish_reason"] == "length"
        assert comparable(message_of(events)) == comparable(choice["message"])
        assert (choice["message"]["content"] or "") in "Let me see."


async def test_logprobs_and_ids_cover_every_token(stack: Stack) -> None:
    """Special tokens and headers too, although they are no text."""
    ids = script(stack, TWO_CALLS, chunk=4)
    asked: dict[str, Any] = ASK | {"logprobs": True, "return_token_ids": True}
    choice = (await stack.chat(**asked)).json()["choices"][0]
    assert choice["token_ids"] == ids
    assert len(choice["logprobs"]["content"]) == len(ids)
    assert choice["logprobs"]["content"][0]["token"] == "<|channel|>"
    choices = (await stack.stream(CHAT, **asked)).choices()
    assert [i for one in choices for i in one.get("token_ids", ())] == ids
    objects = [one["logprobs"] for one in choices if one["logprobs"]]
    assert [entry for one in objects for entry in one["content"]] == choice["logprobs"]["content"]


async def test_stop_strings(stack: Stack) -> None:
    script(stack, TWO_CALLS, chunk=5)
    choice = (await stack.chat(**ASK, stop=["assistant", "<|end|>", "see"])).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "see")
    assert choice["message"]["content"] == "Let me "
    choice = (await stack.chat(**ASK, stop=["Z"], include_stop_str_in_output=True)).json()[
        "choices"
    ][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Z")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Z'


async def test_special_tokens_that_are_not_skipped(stack: Stack) -> None:
    """They show none of the format, which is no text."""
    script(stack, ANSWER)
    asked = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    message = (await stack.chat(**asked)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think\nso é🙂.", "Yes é🙂.")


async def test_what_ends_an_answer(stack: Stack) -> None:
    """A call and the return do, whatever the checkpoint says; the end of a message does not."""
    call, back, end = (ids_of([f"<|{name}|>"])[0] for name in ("call", "return", "end"))
    script(stack, ANSWER)
    await stack.chat(stop_token_ids=[50], min_tokens=3)
    sampling = stack.scheduler.requests[-1].sampling
    assert [*sampling.stop_token_ids] == sorted([50, int(call or 0), int(back or 0)])
    assert end not in sampling.stop_token_ids
    assert sampling.min_tokens == 3
    await stack.chat(ignore_eos=True)
    assert [*stack.scheduler.requests[-1].sampling.stop_token_ids] == []
    await stack.complete(max_tokens=1)
    assert [*stack.scheduler.requests[-1].sampling.stop_token_ids] == []


async def test_a_scheduler_lost_at_any_token(stack: Stack) -> None:
    ids = script(stack, TWO_CALLS)
    whole = (await stack.chat(**ASK)).json()["choices"][0]["message"]

    for after in range(1, len(ids), 6):
        stack.scheduler.script = losing(ids, after)
        events = await stack.stream(CHAT, **ASK)
        assert events.done
        assert comparable(message_of(events)) == comparable(whole)


@pytest.mark.parametrize(
    "flags",
    [
        {},  # the template says it
        {"reasoning_parser": "openai_gptoss"},
        {"tool_call_parser": "openai", "enable_auto_tool_choice": True},
    ],
)
async def test_either_flag_will_do(
    start_stack: StartStack, gpt_oss: Path, flags: dict[str, Any]
) -> None:
    stack = await start_stack(model=gpt_oss, **flags)
    script(stack, ANSWER)
    message = (await stack.chat()).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think\nso é🙂.", "Yes é🙂.")
    if "tool_call_parser" in flags:
        script(stack, TWO_CALLS)
        assert calls_of((await stack.chat(**ASK)).json()["choices"][0]["message"]) == CALLS


async def test_a_tokenizer_without_the_tokens(start_stack: StartStack) -> None:
    with pytest.raises(InvalidRequest, match=r"the tokenizer has no <\|start\|>"):
        await start_stack(reasoning_parser="openai_gptoss")


async def test_continuing_an_answer(stack: Stack) -> None:
    script(stack, " more.<|return|>")
    begun = {"role": "assistant", "content": "Some", "reasoning": "hm"}
    asked: dict[str, Any] = {"messages": [*USER, begun], "continue_final_message": True}
    message = (await stack.chat(**asked)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, " more.")
    assert prompt_of(stack).endswith("<|channel|>final<|message|>Some")
    events = await stack.stream(CHAT, **asked)
    assert message_of(events)["content"] == " more."


async def test_a_chat_without_a_generation_prompt(stack: Stack) -> None:
    script(stack, START + ANSWER)
    message = (await stack.chat(add_generation_prompt=False)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think\nso é🙂.", "Yes é🙂.")


async def test_tools_without_description(stack: Stack) -> None:
    script(stack, ANSWER)
    assert (await stack.chat(**ASK)).status_code == 200
    assert "// \nweather;// \nbook;" in prompt_of(stack)
    assert "description" not in TOOLS[0]["function"]
