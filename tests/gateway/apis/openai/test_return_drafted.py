"""`speculative.return_drafted`: which tokens were drafts, and nothing else changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import pytest
from support.fakes.scheduler import Script, emulated, start, tokens
from support.processes.gateway_stack import Stack
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

ASKED = {"speculative": {"return_drafted": True}}
DRAFTED = [True, True, False, False, True, False, True, True]  # in two windows to a chunk


def windows(chunk: int) -> Script:
    """Chunks of so many tokens, which say what was drafted if that is wanted."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        ids = emulated(request)[: len(DRAFTED)]
        for first in range(0, len(ids), chunk):
            part = slice(first, first + chunk)
            end = LENGTH if first + chunk >= len(ids) else 0
            made = tokens(ids[part], finish=end, logprobs=request.sampling.want_logprobs)
            if request.want_drafted:
                made.drafted.extend(DRAFTED[part])
            yield made

    return script


def drafted(choices: list[dict[str, Any]]) -> list[bool]:
    return [one for choice in choices for one in choice.get("drafted", [])]


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_events_hold_tokens_of_one_kind(stack: Stack, path: str, chunk: int) -> None:
    stack.scheduler.script = windows(chunk)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    if path == "/v1/completions":
        asked = {"prompt": "hello"}
    asked |= {"max_tokens": 8, "seed": 5, "return_token_ids": True}
    plain = await stack.stream(path, **asked)
    events = await stack.stream(path, **asked, **ASKED)
    told = [choice["drafted"] for choice in events.choices() if "drafted" in choice]
    assert all(len(set(one)) <= 1 for one in told)
    assert drafted(events.choices()) == DRAFTED
    if chunk == 8:
        assert len([one for one in told if one]) == len(list(groupby(DRAFTED)))
    assert events.text() == plain.text()
    ids = [id_ for choice in events.choices() for id_ in choice.get("token_ids", [])]
    assert ids == [id_ for choice in plain.choices() for id_ in choice.get("token_ids", [])]
    assert events.done


@pytest.mark.parametrize("extra", [{}, {"speculative": {"num_tokens": 3}}])
async def test_who_does_not_ask_is_told_nothing(stack: Stack, extra: dict[str, Any]) -> None:
    """Neither is the scheduler asked, nor does a stream have one event or key more than it had."""
    stack.scheduler.script = windows(8)
    events = await stack.stream("/v1/completions", prompt="hello", max_tokens=8, **extra)
    assert [request.want_drafted for request in stack.scheduler.requests] == [False]
    assert len(events) == 1
    (choice,) = events.choices()
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


async def test_whole_answers_have_a_list(stack: Stack) -> None:
    stack.scheduler.script = windows(3)
    for answer in (await stack.chat(max_tokens=8, n=2, **ASKED), await stack.complete(**ASKED)):
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["drafted"] == DRAFTED


async def test_log_probabilities_stay_with_their_tokens(stack: Stack) -> None:
    stack.scheduler.script = windows(8)
    asked = {"prompt": "hello", "max_tokens": 8, "seed": 5, "logprobs": 1}
    told = []
    for extra in ({}, ASKED):
        events = await stack.stream("/v1/completions", **asked, **extra)
        told.append([t for c in events.choices() for t in c["logprobs"]["tokens"]])
    assert told[0] == told[1]
    assert len(told[0]) == 8


async def test_a_stop_string_cuts_the_list(stack: Stack) -> None:
    stack.scheduler.script = windows(8)
    asked = {"max_tokens": 8, "seed": 5, "return_token_ids": True, **ASKED}
    text = (await stack.complete(**asked)).json()["choices"][0]["text"]
    for stop in (text[1:3], text[2:5]):
        choice = (await stack.complete(**asked, stop=[stop])).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["drafted"] == DRAFTED[: len(choice["token_ids"])]
        events = await stack.stream("/v1/completions", prompt="hello", **asked, stop=[stop])
        assert drafted(events.choices()) == choice["drafted"]


async def test_nonsense_is_refused(stack: Stack) -> None:
    answer = await stack.chat(speculative={"return_drafted": "yes"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative.return_drafted"
