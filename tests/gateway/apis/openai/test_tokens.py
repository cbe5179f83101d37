"""Tokens in, tokens out: answers that go on elsewhere, and vLLM's bodies of token ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.fakes.scheduler import emulated
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer

GENERATE = "/inference/v1/generate"
BODY = {"prompt": "the dog", "max_tokens": 12, "seed": 1, "return_token_ids": True}
# As vLLM 0.26 dumps what it has rendered: most of it is empty.
RENDERED = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 5,
    "stop": [],
    "stop_token_ids": [7],
    "ignore_eos": False,
    "max_tokens": 6,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "flat_logprobs": False,
    "detokenize": True,
    "bad_words": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "output_kind": 2,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "skip_clone": False,
    "thinking_token_budget": None,
}


async def test_an_answer_goes_on_behind_what_was_delivered(stack: Stack) -> None:
    whole = (await stack.complete(**BODY)).json()["choices"][0]
    ids = whole["token_ids"]
    rest = (await stack.complete(**BODY, emitted_ids=ids[:5])).json()
    (choice,) = rest["choices"]
    assert list(stack.scheduler.requests[-1].emitted_ids) == ids[:5]
    assert stack.scheduler.requests[-1].max_tokens == 12
    assert choice["token_ids"] == ids[5:]
    assert whole["text"].endswith(choice["text"])
    assert rest["usage"]["completion_tokens"] == 7


async def test_stop_strings_reach_across(stack: Stack, tokenizer: Tokenizer) -> None:
    whole = (await stack.complete(**BODY)).json()["choices"][0]
    first, second = (
        tokenizer.decode(whole["token_ids"][n : n + 1], skip_special_tokens=True) for n in (4, 5)
    )
    stop = first[-1:] + second[:1]
    ended = (await stack.complete(**BODY, stop=stop)).json()["choices"][0]
    begun = ended["token_ids"][:5] if len(ended["token_ids"]) > 5 else ended["token_ids"][:-1]
    more = (await stack.complete(**BODY, stop=stop, emitted_ids=begun)).json()["choices"][0]
    assert begun + more["token_ids"] == ended["token_ids"]
    assert (more["finish_reason"], more["stop_reason"]) == ("stop", stop)
    over = await stack.complete(**BODY, stop=stop, emitted_ids=whole["token_ids"][:8])
    assert over.status_code == 400
    assert "had ended already" in over.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"seed": None},
        {"emitted_ids": []},
        {"emitted_ids": [400]},
        {"emitted_ids": ["x"]},
        {"emitted_ids": [9, 2]},  # the end of a text
    ],
    ids=str,
)
async def test_what_could_become_another_answer_is_refused(
    stack: Stack, wrong: dict[str, Any]
) -> None:
    reply = await stack.complete(**(BODY | {"emitted_ids": [9]} | wrong))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("emitted_ids")
    assert not stack.scheduler.requests


async def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return await stack.client.post(path, json=body)


async def test_tokens_in_tokens_out(stack: Stack) -> None:
    asked = {"token_ids": [40, 41], "sampling_params": RENDERED, "cache_salt": "s", "priority": 2}
    answer = (await post(stack, GENERATE, **asked, request_id="here")).json()
    (request,) = stack.scheduler.requests
    assert (list(request.prompt_ids), request.cache_salt, request.priority) == ([40, 41], "s", 2)
    assert (request.max_tokens, list(request.sampling.stop_token_ids)) == (6, [7])
    assert answer["request_id"] == "here"
    assert answer["choices"] == [
        {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": emulated(request)}
    ]
    events = await stack.stream(GENERATE, **asked, emitted_ids=emulated(request)[:4])
    assert [one["choices"][0]["token_ids"] for one in events] == [
        [t] for t in emulated(request)[4:]
    ]
    assert events.done
    assert all(one["request_id"] for one in events)


async def test_logprobs_name_tokens_by_their_ids(stack: Stack) -> None:
    params = {"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 2, "seed": 1}
    answer = (await post(stack, GENERATE, token_ids=[40, 41], sampling_params=params)).json()
    (choice,) = answer["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [one["token"] for one in choice["logprobs"]["content"]] == named
    assert answer["prompt_logprobs"][0] is None
    assert list(answer["prompt_logprobs"][1]) == ["41"]


async def test_as_many_tokens_as_fit_by_default(stack: Stack) -> None:
    await post(stack, GENERATE, token_ids=[40] * 6, sampling_params={"seed": 1})
    assert stack.scheduler.requests[0].max_tokens == 250


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [400]}, "prompt"),
        ({"token_ids": "x"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"vllm_xargs": {"a": 1}}}, "vllm_xargs"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
    ],
    ids=str,
)
async def test_wrong_bodies(stack: Stack, wrong: dict[str, Any], param: str) -> None:
    asked: dict[str, Any] = {"token_ids": [4], "sampling_params": {}}
    reply = await post(stack, GENERATE, **(asked | wrong))
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("large", [False, True], ids=["at once", "in a text process"])
async def test_what_is_rendered_asks_for_the_same(start_stack: StartStack, large: bool) -> None:
    """A chat, and each prompt of a completion; large ones are rendered elsewhere."""
    stack = await start_stack()
    content = "hello " * (30_000 if large else 1)
    fields = {"temperature": 0.3, "top_k": 5, "seed": 3, "logit_bias": {"9": 1.0}, "max_tokens": 3}
    fields |= {"stop": ["x"], "cache_salt": "salt", "truncate_prompt_tokens": 90}
    chat = {"messages": [{"role": "user", "content": content}], **fields}
    body = (await post(stack, "/v1/chat/completions/render", **chat)).json()
    assert body["features"] is body["kv_transfer_params"] is None
    await post(stack, GENERATE, **body)
    await stack.client.post("/v1/chat/completions", json=chat)
    one, other = stack.scheduler.requests
    assert one.sampling == other.sampling
    assert (one.prompt_ids, one.cache_salt) == (other.prompt_ids, other.cache_salt)
    if large:
        return
    completion = {"prompt": ["one", "two"], **fields}
    bodies = (await post(stack, "/v1/completions/render", **completion)).json()
    for each, text in zip(bodies, ("one", "two"), strict=True):
        await post(stack, GENERATE, **each)
        await stack.complete(**(completion | {"prompt": text}))
        one, other = stack.scheduler.requests[-2:]
        assert one.sampling == other.sampling
        assert (one.prompt_ids, one.max_tokens) == (other.prompt_ids, other.max_tokens)


async def test_a_grammar_is_not_rendered(stack: Stack) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "a+"}}
    reply = await post(stack, "/v1/completions/render", **body)
    assert reply.status_code == 400
    assert "structured_outputs" in json.dumps(reply.json())
