from __future__ import annotations

from typing import Any

import pytest
from support.fakes.scheduler import emulated, replay
from support.processes.gateway_stack import Stack
from surestep_common.request_params import sibling_seed
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import STOP

USER = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


async def test_whole_answer(stack: Stack, tokenizer: Tokenizer) -> None:
    response = await stack.chat(max_tokens=6, seed=5)
    body = response.json()
    (request,) = stack.scheduler.requests
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    prompt = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (request.sampling.seed, request.max_tokens) == (5, 6)
    (choice,) = body["choices"]
    text = tokenizer.decode(emulated(request), skip_special_tokens=True)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert body["usage"] == {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": 6,
        "total_tokens": len(request.prompt_ids) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_stream(stack: Stack) -> None:
    whole = (await stack.chat(max_tokens=9, seed=5)).json()["choices"][0]
    events = await stack.stream(CHAT, messages=USER, max_tokens=9, seed=5)
    assert events.done
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events.text() == whole["message"]["content"]
    reasons = [choice["finish_reason"] for choice in events.choices()]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_usage_in_the_stream(stack: Stack) -> None:
    options = {"include_usage": True}
    events = await stack.stream(CHAT, messages=USER, max_tokens=3, stream_options=options)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    options["continuous_usage_stats"] = True
    events = await stack.stream(CHAT, messages=USER, max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    first = events[0]  # the chunk of the role has what the prompt took
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] > 0
    assert first["usage"]["completion_tokens"] == 0
    del options["include_usage"]  # without which the other has no effect
    events = await stack.stream(CHAT, messages=USER, max_tokens=3, stream_options=options)
    assert all("usage" not in event for event in events)


async def test_siblings_run_interleaved_with_their_own_seeds(stack: Stack) -> None:
    events = await stack.stream(CHAT, messages=USER, max_tokens=4, seed=7, n=3)
    assert events.done
    seeds = sorted(request.sampling.seed for request in stack.scheduler.requests)
    assert seeds == sorted(sibling_seed(7, i) for i in range(3))
    whole = (await stack.chat(max_tokens=4, seed=7, n=3)).json()
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index
        assert events.text(index) == choice["message"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["usage"]["prompt_tokens"] == len(stack.scheduler.requests[0].prompt_ids)
    ids = [request.request_id for request in stack.scheduler.requests]
    assert len(set(ids)) == len(ids)


async def test_unseeded_requests_draw_a_seed(stack: Stack) -> None:
    for _ in range(2):
        await stack.chat(max_tokens=1)
    first, second = (request.sampling.seed for request in stack.scheduler.requests)
    assert first != second


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, -(1 << 63)])
async def test_any_int64_is_a_seed(stack: Stack, seed: int) -> None:
    assert (await stack.chat(max_tokens=1, seed=seed)).status_code == 200
    assert stack.scheduler.requests[0].sampling.seed == seed % (1 << 64)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(stack: Stack, tokenizer: Tokenizer, chunk: int, include: bool) -> None:
    ids = tokenizer.encode_now("one two three four five", add_special_tokens=False)
    stack.scheduler.script = replay(ids, chunk=chunk)
    settings: dict[str, Any] = {"stop": ["e f", "xyz"], "include_stop_str_in_output": include}
    choice = (await stack.chat(return_token_ids=True, **settings)).json()["choices"][0]
    assert choice["message"]["content"] == ("one two three f" if include else "one two thre")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e f")
    used = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert used.startswith("one two three f")
    assert used != "one two three four five"
    events = await stack.stream(CHAT, messages=USER, **settings)
    assert events.text() == choice["message"]["content"]
    assert events.choices()[-1]["stop_reason"] == "e f"
    await stack.scheduler.until(lambda fake: fake.num_open == 0)


async def test_stop_reasons(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_now("one two", add_special_tokens=False)
    stack.scheduler.script = replay([*ids, 2], finish=STOP)
    choice = (await stack.chat()).json()["choices"][0]
    assert choice["message"]["content"] == "one two"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    stack.scheduler.script = replay([*ids, 99], finish=STOP)
    choice = (await stack.chat(stop_token_ids=[99])).json()["choices"][0]
    assert choice["message"]["content"] == "one two"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 99)


async def test_token_ids_are_returned(stack: Stack) -> None:
    whole = (await stack.chat(max_tokens=5, seed=1, return_token_ids=True)).json()
    request = stack.scheduler.requests[0]
    assert whole["prompt_token_ids"] == list(request.prompt_ids)
    assert whole["choices"][0]["token_ids"] == emulated(request)
    events = await stack.stream(CHAT, messages=USER, max_tokens=5, seed=1, return_token_ids=True)
    assert events[0]["prompt_token_ids"] == list(request.prompt_ids)
    streamed = [i for choice in events.choices() for i in choice.get("token_ids", ())]
    assert streamed == emulated(request)


async def test_logprobs(stack: Stack) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, "seed": 3, "logprobs": True, "top_logprobs": 2}
    content = (await stack.chat(**asked)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["logprob"] == -0.5 for entry in content)
    assert all(
        [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5] for entry in content
    )
    events = await stack.stream(CHAT, messages=USER, **asked)
    streamed = [
        entry
        for choice in events.choices()
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_prompt_logprobs(stack: Stack) -> None:
    body = (await stack.chat(max_tokens=1, prompt_logprobs=1)).json()
    (request,) = stack.scheduler.requests
    shown = body["prompt_logprobs"]
    assert len(shown) == len(request.prompt_ids)
    assert shown[0] is None
    assert list(shown[1]) == [str(request.prompt_ids[1])]


async def test_fields_for_the_scheduler(stack: Stack) -> None:
    fields: dict[str, Any] = {
        "priority": -3,
        "cache_salt": "tenant",
        "speculative": {"num_tokens": 0},
        "request_id": "mine",
    }
    body = (await stack.chat(max_tokens=1, **fields)).json()
    await stack.chat(max_tokens=1)
    first, second = stack.scheduler.requests
    assert body["id"] == "chatcmpl-mine"
    assert (first.priority, first.cache_salt) == (-3, "tenant")
    assert first.HasField("num_draft_tokens")
    assert first.num_draft_tokens == 0
    assert not second.HasField("num_draft_tokens")


@pytest.mark.parametrize("num_tokens", [0, 1, 16])
async def test_a_bound_on_drafts_reaches_the_scheduler(stack: Stack, num_tokens: int) -> None:
    response = await stack.chat(max_tokens=1, speculative={"num_tokens": num_tokens})
    assert response.status_code == 200
    assert stack.scheduler.requests[0].num_draft_tokens == num_tokens


async def test_message_parts_and_template_variables(stack: Stack, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    messages.append({"role": "assistant", "content": [{"type": "output_text", "text": "thr"}]})
    await stack.chat(messages=messages, continue_final_message=True, max_tokens=1)
    prompt = tokenizer.decode(stack.scheduler.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt == ("<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nthr")
