"""An answer whose scheduler was lost on the way reads like one whose scheduler was not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fakes.scheduler import emulating
from support.processes.gateway_stack import Stack, StartStack
from surestep_cli.api.stream import events
from surestep_common.errors import ConnectionLost
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest


class Losing:
    """Loses each sequence after so many chunks, as often as it comes until it gets this far."""

    def __init__(self, *cuts: int) -> None:
        self.cuts = cuts  # chunks until the loss, of the first call, of the second, ...
        self.calls: Counter[str] = Counter()

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        sequence = request.request_id.partition(".")[0]
        call = self.calls[sequence]
        self.calls[sequence] += 1
        left = self.cuts[call] if call < len(self.cuts) else 1 << 30
        async for chunk in emulating(request):
            if not left:
                raise ConnectionLost("gone")
            left -= 1
            yield chunk


PLAIN: dict[str, Any] = {"prompt": "the quick brown", "max_tokens": 24, "seed": 9}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1, "repetition_penalty": 1.1, "min_tokens": 5, "min_p": 0.1},
    "n": {"n": 3},
    "logprobs": {"logprobs": 2, "return_token_ids": True},
    "prompt-logprobs": {"prompt_logprobs": 1, "echo": True},
    "bias": {"logit_bias": {"5": 1.5}, "bad_words": ["x"], "stop_token_ids": [7]},
}


def answer(response: str, stream: bool) -> Any:
    """Return the part that must be equal: everything but names, times and what a cache held."""
    if not stream:
        parsed = json.loads(response)
        return parsed["choices"], parsed["usage"]["completion_tokens"]
    text: Counter[int] = Counter()
    parts: dict[int, list[Any]] = {}
    for event in events(response.encode().splitlines()):
        for choice in event["choices"]:
            text[choice["index"]] += len(choice["text"])
            parts.setdefault(choice["index"], []).append(choice)
    return parts, text


SHAPES = [(name, stream) for name in BODIES for stream in (False, True)]
SHAPES.remove(("prompt-logprobs", True))  # prompt_logprobs are not streamed


@pytest.mark.parametrize(("name", "stream"), SHAPES)
@pytest.mark.parametrize("cuts", [(0,), (1,), (2,), (9, 4), (20, 1, 1)], ids=str)
@pytest.mark.rotates(4)
async def test_the_answer_is_the_same(
    stack: Stack, cuts: tuple[int, ...], name: str, stream: bool
) -> None:
    body = PLAIN | BODIES[name] | {"stream": stream}
    quiet = answer((await stack.client.post("/v1/completions", json=body)).text, stream)
    sent = len(stack.scheduler.requests)
    stack.scheduler.script = losing = Losing(*cuts)
    disturbed = answer((await stack.client.post("/v1/completions", json=body)).text, stream)
    assert disturbed == quiet
    assert set(losing.calls.values()) == {len(cuts) + 1}
    first = stack.scheduler.requests[0]
    for request in stack.scheduler.requests[sent:]:  # nothing is forgotten on the way
        assert request.max_tokens == first.max_tokens
        assert request.sampling.presence_penalty == first.sampling.presence_penalty
        assert request.sampling.min_tokens == first.sampling.min_tokens
        assert request.sampling.logit_bias == first.sampling.logit_bias


@pytest.mark.parametrize("cut", range(1, 16))
@pytest.mark.rotates(1)
async def test_a_stop_string_across_the_loss(stack: Stack, cut: int) -> None:
    whole = (await stack.client.post("/v1/completions", json=PLAIN)).json()["choices"][0]["text"]
    stop = whole[len(whole) // 3 : len(whole) // 3 + 6]
    assert whole.count(stop) == 1
    stack.scheduler.script = Losing(cut)
    body = PLAIN | {"stop": stop}
    (choice,) = (await stack.client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("cut", [1, 2, 5, 11])
async def test_reasoning_across_the_loss(start_stack: StartStack, cut: int) -> None:
    stack = await start_stack(reasoning_parser="qwen3")
    body = {"max_tokens": 24, "seed": 9}
    quiet = (await stack.chat(**body)).json()["choices"]
    stack.scheduler.script = Losing(cut)
    assert (await stack.chat(**body)).json()["choices"] == quiet
