from __future__ import annotations

from typing import Any

import pytest
from support.fakes.scheduler import emulated, replay
from support.processes.gateway_stack import Stack
from surestep_gateway.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


async def test_whole_answer(stack: Stack, tokenizer: Tokenizer) -> None:
    body = (await stack.complete(prompt="the dog", max_tokens=4, seed=1)).json()
    (request,) = stack.scheduler.requests
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert list(request.prompt_ids) == tokenizer.encode_now("the dog", add_special_tokens=True)
    assert body["choices"] == [
        {
            "index": 0,
            "text": tokenizer.decode(emulated(request), skip_special_tokens=True),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


async def test_sixteen_tokens_by_default(stack: Stack) -> None:
    assert (await stack.complete()).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompt", ["one", ["one", "two three"], [40, 41, 42], [[40, 41], [42]]], ids=str
)
async def test_prompt_forms(stack: Stack, tokenizer: Tokenizer, prompt: Any) -> None:
    body = (await stack.complete(prompt=prompt, max_tokens=2, n=2, seed=1)).json()
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids = [
        tokenizer.encode_now(one, add_special_tokens=True) if isinstance(one, str) else one
        for one in prompts
    ]
    assert sorted(list(request.prompt_ids) for request in stack.scheduler.requests) == sorted(
        one for one in ids for _ in range(2)
    )
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 4 * len(prompts)
    events = await stack.stream(COMPLETIONS, prompt=prompt, max_tokens=2, n=2, seed=1)
    for choice in body["choices"]:
        assert events.text(choice["index"]) == choice["text"]


async def test_more_sequences_than_the_scheduler_runs(stack: Stack) -> None:
    body = (await stack.complete(prompt=["x"] * 40, max_tokens=2)).json()
    assert len(body["choices"]) == 40
    assert len(stack.scheduler.requests) == 40


async def test_echo(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_now("the dog", add_special_tokens=False)
    for prompt in ("the dog", ids):
        asked: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": 3, "seed": 1}
        text = (await stack.complete(**asked)).json()["choices"][0]["text"]
        assert text.startswith("the dog")
        events = await stack.stream(COMPLETIONS, **asked)
        assert events.text() == text
        assert events.choices()[0]["text"] == "the dog"


async def test_echo_with_logprobs(stack: Stack) -> None:
    asked: dict[str, Any] = {"prompt": "the dog", "echo": True, "logprobs": 1, "max_tokens": 3}
    choice = (await stack.complete(seed=1, **asked)).json()["choices"][0]
    logprobs = choice["logprobs"]
    prompt_len = len(stack.scheduler.requests[0].prompt_ids)
    assert {len(column) for column in logprobs.values()} == {prompt_len + 3}
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (prompt_len + 2)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:1] == [0]
    assert logprobs["text_offset"][prompt_len] == len("the dog")
    events = await stack.stream(COMPLETIONS, seed=1, **asked)
    pieces = [piece["logprobs"] for piece in events.choices() if piece["logprobs"]]
    for name, column in logprobs.items():
        assert [value for piece in pieces for value in piece[name]] == column


async def test_token_ids_are_returned(stack: Stack) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "seed": 1, "return_token_ids": True}
    (choice,) = (await stack.complete(**asked)).json()["choices"]
    request = stack.scheduler.requests[0]
    assert choice["prompt_token_ids"] == list(request.prompt_ids)
    assert choice["token_ids"] == emulated(request)
    choices = (await stack.stream(COMPLETIONS, prompt="hello", **asked)).choices()
    assert choices[0]["prompt_token_ids"] == list(request.prompt_ids)
    assert [i for choice in choices for i in choice["token_ids"]] == emulated(request)


async def test_prompt_logprobs(stack: Stack) -> None:
    (choice,) = (await stack.complete(prompt_logprobs=0, max_tokens=1)).json()["choices"]
    assert len(choice["prompt_logprobs"]) == len(stack.scheduler.requests[0].prompt_ids)


async def test_special_tokens_can_be_kept(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.scheduler.script = _special
    hidden = (await stack.complete()).json()["choices"][0]["text"]
    shown = (await stack.complete(skip_special_tokens=False)).json()["choices"][0]["text"]
    assert (hidden, shown) == ("!", "<|im_start|>!")


async def _special(request: Any) -> Any:
    from support.fakes.scheduler import start, tokens
    from surestep_proto.scheduler_pb2 import LENGTH

    yield start()
    yield tokens([1])
    yield tokens([3], finish=LENGTH)


async def test_an_output_that_repeats_itself_ends(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = [40, 41, 42, 41, 42, 41, 42, 41, 42, 43]
    stack.scheduler.script = replay(ids, chunk=4)
    asked = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    (choice,) = (await stack.complete(repetition_detection=asked)).json()["choices"]
    assert choice["text"] == tokenizer.decode(ids[:7], skip_special_tokens=True)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    for never in ({"max_pattern_size": 0}, None):
        (choice,) = (await stack.complete(repetition_detection=never)).json()["choices"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "asked",
    [
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 100_000, "min_count": 2},
        {"max_patern_size": 2},
    ],
    ids=str,
)
async def test_repetitions_that_cannot_be(stack: Stack, asked: dict[str, int]) -> None:
    refused = await stack.complete(repetition_detection=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("repetition_detection")
