"""What a request makes the gateway keep, send and tell is bounded, and told in turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from slow_clients import connect, post, stop_reading
from support.fakes.scheduler import default_info, start, tokens
from support.processes.gateway_stack import Stack, StartStack, stacks
from surestep_gateway.request import prepare
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

COMPLETIONS = "/v1/completions"
LONG = default_info(max_model_len=20_000)


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    async with stacks(model) as start:
        yield start


async def long_context(start_stack: StartStack, **settings: Any) -> Stack:
    """A stack whose model has a longer context than the others."""
    stack = await start_stack(**settings)
    await stack.scheduler.stop()
    await stack.until_serving(0)
    stack.scheduler.info = LONG
    await stack.scheduler.start()
    await stack.until_serving()
    return stack


def refusal(answer: Any, param: str | None) -> str:
    assert answer.status_code in (400, 413), answer.text[:300]
    assert answer.json()["error"]["param"] == param
    message: str = answer.json()["error"]["message"]
    return message


async def test_an_answer_has_a_size(start_stack: StartStack) -> None:
    stack = await long_context(start_stack, max_answer_bytes=100_000)

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        for _ in range(100_000):
            yield tokens([70] * 10, logprobs=request.sampling.want_logprobs)
            await asyncio.sleep(0)
        yield tokens([70], finish=LENGTH)

    stack.scheduler.script = script
    for body in ({"logprobs": 1}, {"n": 4}):
        answer = await stack.complete(max_tokens=15_000, **body)
        assert "larger than 100000 bytes" in refusal(answer, None)
        await stack.scheduler.until(lambda fake: fake.num_open == 0)
    assert stack.scheduler.num_cancelled == 5


async def test_answers_about_tokens_have_a_size_too(start_stack: StartStack) -> None:
    stack = await start_stack(max_answer_bytes=10_000)
    for count in (1_000, 100_000):  # on the event loop, and in a process
        for path, body in (
            ("/tokenize", {"prompt": "x" * count, "return_token_strs": True}),
            ("/detokenize", {"tokens": [399] * count}),
        ):
            answer = await stack.client.post(path, json=body)
            if answer.status_code == 200:
                assert len(answer.content) <= 10_000
            else:
                assert "larger than 10000 bytes" in refusal(answer, None)
    assert answer.status_code == 400


async def test_answers_that_nobody_reads_do_not_add_up(start_stack: StartStack) -> None:
    """Each may wait for long, as it is large; all of them have a bound."""
    stack = await start_stack(max_answer_bytes=1_000_000, send_timeout_s=600)
    host, _, port = stack.server.address.rpartition(":")
    body = json.dumps({"prompt": "zq" * 150_000}).encode()
    lazy = []
    for _ in range(8):
        stream = await connect((host, int(port)), receive_bytes=4096)
        stop_reading(stream)
        stream[1].write(post("/tokenize", body))
        lazy.append(stream)
    gateway = stack.server.gateway
    begun = gateway.metrics.responses.labels("200")
    async with asyncio.timeout(60):
        while begun._value.get() < 8 or gateway.admission.num_open > 4:
            await asyncio.sleep(0.01)
    assert (await stack.post("/tokenize", body)).status_code == 200
    for _, writer in lazy:
        writer.close()


async def test_log_probabilities_of_prompts_have_a_number(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await long_context(start_stack)
    monkeypatch.setattr(prepare, "MAX_ALL_PROMPT_LOGPROBS", 100)
    ids = [70] * 20
    fields: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 1, "n": 3}, "prompt_logprobs"),
    ]
    for more, param in fields:
        refused = await stack.complete(prompt=ids, max_tokens=1, **more)
        assert "log-probabilities of prompts" in refusal(refused, param)
    served = await stack.complete(prompt=ids, max_tokens=1, prompt_logprobs=4)
    assert served.status_code == 200


async def test_prompts_of_all_sequences_have_a_length(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await start_stack()
    monkeypatch.setattr(prepare, "MAX_SENT_IDS", 300)
    assert "have 400 tokens" in refusal(await stack.complete(prompt=[70] * 200, n=2), "n")
    assert "have 400 tokens" in refusal(await stack.complete(prompt=[[70] * 200] * 2), "n")
    assert (await stack.complete(prompt=[70] * 150, n=2, max_tokens=1)).status_code == 200


async def test_tools_have_a_size(start_stack: StartStack) -> None:
    stack = await start_stack(enable_auto_tool_choice=True, tool_call_parser="hermes")
    function = {"name": "f", "description": "x" * (1 << 20)}
    answer = await stack.chat(tools=[{"type": "function", "function": function}])
    assert "tools must have at most" in refusal(answer, "tools")


async def test_long_prompts_are_told_as_short_ones_are(start_stack: StartStack) -> None:
    """In slices, which nobody sees."""
    stack = await long_context(start_stack)
    ids = [5 + i % 200 for i in range(3000)]
    given = {"prompt": ids, "max_tokens": 3, "echo": True, "logprobs": 2, "seed": 1}
    given["return_token_ids"] = True
    (choice,) = (await stack.complete(**given, prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 3
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][-1][str(ids[-1])]["logprob"] == -0.5
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert choice["text"].startswith(
        (await stack.client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    )
    events = await stack.stream(COMPLETIONS, **given)
    streamed = events.choices()
    joined = {
        name: [one for each in streamed if each["logprobs"] for one in each["logprobs"][name]]
        for name in choice["logprobs"]
    }
    assert len(joined["tokens"]) == len(ids) + 3
    assert joined["tokens"][: len(ids)] == choice["logprobs"]["tokens"][: len(ids)]
    assert events.text() == choice["text"]


async def test_events_of_many_choices_stay_whole(start_stack: StartStack) -> None:
    """Each choice begins with a large event; others have turns meanwhile, but not inside it."""
    stack = await long_context(start_stack)
    ids = [5 + i % 200 for i in range(3000)]
    body = {"prompt": ids, "n": 8, "max_tokens": 5, "echo": True, "logprobs": 1, "seed": 3}
    events = await stack.stream(COMPLETIONS, **body)
    assert events.done
    for index in range(8):
        pieces = [
            len(each["logprobs"]["tokens"]) for each in events.choices(index) if each["logprobs"]
        ]
        assert pieces[0] == len(ids)
        assert sum(pieces) == len(ids) + 5
    whole = json.loads((await stack.complete(**body)).text)
    assert [choice["index"] for choice in whole["choices"]] == list(range(8))
