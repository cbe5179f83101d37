"""Prompts that are scored, echoed or cut."""

from __future__ import annotations

from typing import Any

import pytest
from support.fakes.scheduler import replay
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import STOP

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
TEXTS = ["the dog", "<|im_start|>the<|im_end|> dog", "a🙂b<|im_end|>"]


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_offsets_point_at_their_tokens(
    stack: Stack, tokenizer: Tokenizer, text: str, as_ids: bool, max_tokens: int
) -> None:
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    asked: dict[str, Any] = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 1}
    asked |= {"max_tokens": max_tokens, "seed": 1, "skip_special_tokens": False}
    choice = (await stack.complete(**asked)).json()["choices"][0]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids) + max_tokens}
    places = [*logprobs["text_offset"], len(choice["text"])]
    for token_id, token, begin, end in zip(
        ids, logprobs["tokens"], places, places[1:], strict=False
    ):
        if tokenizer.is_special(token_id) or token.isascii():
            assert choice["text"][begin:end] == token
    assert places[len(ids)] == len(text)
    assert choice["finish_reason"] == "length"
    events = await stack.stream(COMPLETIONS, **asked)
    assert events.text() == choice["text"]
    pieces = [piece["logprobs"] for piece in events.choices() if piece["logprobs"]]
    for name, column in logprobs.items():
        assert [value for piece in pieces for value in piece[name]] == column


async def test_scores_of_prompts_without_any_output(stack: Stack, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode_now(text, add_special_tokens=False) for text in TEXTS]
    asked: dict[str, Any] = {"prompt": prompts, "echo": True, "max_tokens": 0, "logprobs": 1}
    body = (await stack.complete(**asked)).json()
    assert [choice["text"] for choice in body["choices"]] == TEXTS
    for choice, ids in zip(body["choices"], prompts, strict=True):
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
        assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_nothing_is_generated_where_nothing_is_asked_for(stack: Stack) -> None:
    stack.scheduler.script = replay([70], finish=STOP)
    for n in (1, 2):
        body = (await stack.complete(max_tokens=0, n=n)).json()
        assert len(body["choices"]) == n
        for choice in body["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("", "length")
    whole = (await stack.complete(max_tokens=0, return_token_ids=True, logprobs=0)).json()
    assert whole["choices"][0]["token_ids"] == []
    assert whole["choices"][0]["logprobs"]["tokens"] == []
    options = {"include_usage": True}
    events = await stack.stream(COMPLETIONS, prompt="x", max_tokens=0, stream_options=options)
    assert events.done
    assert events.text() == ""
    assert events[-1]["usage"]["completion_tokens"] == 0


async def test_echo_after_truncation_is_what_was_kept(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_now("one two three four", add_special_tokens=False)
    for side, kept in ((None, ids[-2:]), ("left", ids[-2:]), ("right", ids[:2])):
        asked = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 0}
        for prompt in (ids, "one two three four"):
            body = (await stack.complete(prompt=prompt, echo=True, **asked)).json()
            assert body["choices"][0]["text"] == spelled(tokenizer, kept)
            assert list(stack.scheduler.requests[-1].prompt_ids) == kept


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("words", [300, 60_000])  # the latter in a text process
@pytest.mark.rotates(1)
async def test_chats_are_cut_on_the_side_that_was_asked_for(
    stack: Stack, tokenizer: Tokenizer, side: str, words: int
) -> None:
    content = "first " + "word " * words + "<|im_end|> last"  # which is hidden as the user's
    messages = [{"role": "user", "content": content}]
    asked: dict[str, Any] = {"truncate_prompt_tokens": 20, "truncation_side": side}
    assert (await stack.chat(messages=messages, max_tokens=1, **asked)).status_code == 200
    (request,) = stack.scheduler.requests
    assert len(request.prompt_ids) == 20
    prompt = spelled(tokenizer, list(request.prompt_ids))
    if side == "left":
        assert prompt.endswith(" last<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert prompt.startswith("<|im_start|>user\nfirst word")


async def test_a_prompt_that_is_cut_to_the_context_leaves_room_for_a_token(stack: Stack) -> None:
    long = {"prompt": [5] * 300, "truncate_prompt_tokens": -1}
    body = (await stack.complete(**long, max_tokens=20)).json()
    assert body["usage"] == body["usage"] | {"prompt_tokens": 255, "completion_tokens": 1}
    assert body["choices"][0]["finish_reason"] == "length"


async def test_chats_that_echo(stack: Stack) -> None:
    begun = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    asked: dict[str, Any] = {"max_tokens": 2, "seed": 3, "n": 2, "continue_final_message": True}
    plain = (await stack.chat(messages=begun, **asked)).json()["choices"]
    shown = (await stack.chat(messages=begun, echo=True, **asked)).json()["choices"]
    events = await stack.stream(CHAT, messages=begun, echo=True, **asked)
    for index in range(2):
        text = "It is" + plain[index]["message"]["content"]
        assert shown[index]["message"]["content"] == text
        assert events.text(index) == text
        assert events.choices(index)[0]["delta"] == {"role": "assistant", "content": "It is"}
    theirs = (await stack.chat(echo=True, max_tokens=2, seed=3)).json()["choices"][0]
    ours = (await stack.chat(max_tokens=2, seed=3)).json()["choices"][0]
    assert theirs == ours  # the user's words are not the assistant's


async def test_refusals_in_a_history(stack: Stack, tokenizer: Tokenizer) -> None:
    part = {"type": "refusal", "refusal": "I cannot"}
    for refused in (
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": None, "refusal": "I cannot"},
        {"role": "assistant", "refusal": "I cannot", "audio": None, "function_call": None},
    ):
        await stack.chat(messages=[*USER, refused, *USER], max_tokens=1)
        prompt = spelled(tokenizer, list(stack.scheduler.requests[-1].prompt_ids))
        assert "<|im_start|>assistant\nI cannot<|im_end|>" in prompt


async def test_paths_may_end_with_a_slash(stack: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path in (COMPLETIONS, "/tokenize"):
        assert (await stack.client.post(f"{path}/", json=body)).status_code == 200
    for path in ("/v1/models/", "/v1/models/tiny/", "/health/", "/metrics/"):
        assert (await stack.client.get(path)).status_code == 200


async def test_echoes_are_bounded(start_stack: StartStack) -> None:
    stack = await start_stack(max_answer_bytes=2000)
    messages = [*USER, {"role": "assistant", "content": "go on " * 100}]
    asked: dict[str, Any] = {"messages": messages, "echo": True, "truncate_prompt_tokens": 9}
    assert (await stack.chat(max_tokens=1, **asked)).status_code == 200
    refused = await stack.chat(max_tokens=1, n=8, **asked)
    assert refused.status_code == 400
    assert "larger than 2000 bytes" in refused.json()["error"]["message"]
    messages[-1]["content"] = "go on " * 20_000
    refused = await stack.chat(max_tokens=1, stream=True, **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
