"""Large and unusual requests are prepared in processes that may be killed, stopped and filled."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import default_info, running
from support.processes.commands import children
from support.processes.gateway import gateway, until_ready
from support.processes.gateway_stack import Stack, StartStack, stacks
from support.processes.ports import free_port
from surestep_common.errors import InvalidRequest, RequestTooLarge, SurestepError
from surestep_gateway.apis.openai.job import CHAT, COMPLETION
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text import wire
from surestep_gateway.text.body_bounds import MAX_CONTAINERS, check_shape
from surestep_gateway.text.process_limits import NeedsProcess
from surestep_gateway.text.service import INLINE_BYTES, Job, TextProcessor

PAD = {"metadata": "y" * INLINE_BYTES}  # whoever sends this is too large for the event loop
USER: Any = {"role": "user", "content": "hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
HUGE = {"type": "object", "properties": {"a": {"maximum": 1 << 70}}}  # an integer of JSON
LARGER = [{"type": "function", "function": {"name": "f", "parameters": HUGE}}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": [USER], "return_token_ids": True, "stop": ["a", "b"]}),
    ("/v1/chat/completions", {"messages": [USER], "prompt_logprobs": 1, "min_tokens": 2}),
    ("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "So", "tool_calls": [CALL]}]}
        | {"continue_final_message": True, "add_generation_prompt": False},
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": LARGER}),
    ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1, "bad_words": ["dog"]}),
    ("/v1/completions", {"prompt": ["a", "bé"], "n": 2, "logit_bias": {"5": 1.5}, "top_k": 7}),
    ("/v1/completions", {"prompt": [5, 6, 7], "echo": True, "stop_token_ids": [9]}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "truncate_prompt_tokens": 1, "priority": 3}),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}, "stream": True}),
    ("/v1/completions", {"prompt": "x", "cache_salt": "s", "speculative": {"num_tokens": 2}}),
    ("/v1/completions", {"prompt": "x" * 10_000}),
    ("/v1/completions", {"prompt": "x", "temperature": 3}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": "x", "model": "other"}),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER]}),
    ("/detokenize", {"tokens": [5, 6, 7, 300]}),
    ("/detokenize", {"tokens": [5, -6]}),
]
VOLATILE = {"id", "created"}


def text_processes() -> list[psutil.Process]:
    """Text processes of this test."""
    return children("surestep_gateway.text_process")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def large(start_stack: StartStack) -> Stack:
    """A stack with one text process, which has done something."""
    stack = await start_stack(
        text_processes=1, enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    assert (await stack.complete(**PAD)).status_code == 200
    assert len(text_processes()) == 1
    return stack


def stable(response: httpx.Response) -> Any:
    if response.headers["content-type"].startswith("text/event-stream"):
        return [line for line in response.text.splitlines() if "choices" not in line]
    return {key: value for key, value in response.json().items() if key not in VOLATILE}


async def test_answers_are_the_same_wherever_a_request_is_prepared(large: Stack) -> None:
    for path, body in BODIES:
        given = body | {"seed": 5, "max_tokens": 4} if path.startswith("/v1") else body
        small = await large.client.post(path, json=given)
        padded = await large.client.post(path, json=given | PAD)
        assert small.status_code == padded.status_code, (body, padded.text)
        assert stable(small) == stable(padded), body
    assert len(text_processes()) == 1


@pytest.mark.parametrize("job", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_what_comes_back_is_what_was_prepared(model: Path, job: Job[Any]) -> None:
    """Field by field, for the bodies that can be prepared at all."""
    path = "/v1/chat/completions" if job is CHAT else "/v1/completions"
    given = {"model": model, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    settings = GatewaySettings.model_validate(given)
    side = TextProcessor.restore(TextProcessor.load(settings).dump())
    compared = 0
    for body in [body for where, body in BODIES if where == path]:
        try:
            draft = job.draft(side, json.dumps(body).encode(), default_info())
            there = draft.finish(side.tokenizer.encode(draft.texts))
        except SurestepError:
            continue
        here = job.load([bytes(part) for part in job.dump(there)])
        for name in ("sampling", "schemas", "opening", "begun"):
            assert getattr(here, name) == getattr(there, name)
        assert [(list(p.token_ids), p.text) for p in here.prompts] == [
            (list(p.token_ids), p.text) for p in there.prompts
        ]
        kept = here.body.model_dump(exclude_none=True)
        assert kept.items() <= there.body.model_dump(exclude_none=True).items()
        assert not kept.keys() & {"messages", "prompt", "tools", "bad_words"}
        compared += 1
    assert compared >= 5


def test_little_comes_back_of_what_the_prompts_are_made_of(model: Path) -> None:
    side = TextProcessor.restore(
        TextProcessor.load(GatewaySettings.model_validate({"model": model})).dump()
    )
    lists: list[Any] = [[]] * 10_000
    options = {"include_usage": True, "unknown": lists}
    body = {"prompt": "x", "stream": True, "stream_options": options, "unknown": lists}
    raw = orjson.dumps(body | {"speculative": {"num_tokens": 2, "unknown": lists}})
    draft = COMPLETION.draft(side, raw, default_info())
    parts = COMPLETION.dump(draft.finish(side.tokenizer.encode(draft.texts)))
    assert sum(map(len, parts)) < 1000
    raw = orjson.dumps({"prompt": "x", "user": "u" * 10_000})
    with pytest.raises(InvalidRequest) as refusal:
        COMPLETION.draft(side, raw, default_info())
    assert refusal.value.param == "user"


def test_unusual_work_is_not_for_the_event_loop(model: Path) -> None:
    settings = GatewaySettings.model_validate({"model": model, "trust_request_chat_template": True})
    side = TextProcessor.load(settings)
    apart = TextProcessor.restore(side.dump())
    unusual: list[tuple[Job[Any], bytes]] = [
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "a <|im_end|> b"}]}'),
        (CHAT, b'{"messages": [' + b",".join([b'{"role": "user", "content": "x"}'] * 129) + b"]}"),
        (
            COMPLETION,
            b'{"prompt": "x", "bad_words": [' + b",".join([b'"%s"' % (b"x" * 20)] * 65) + b"]}",
        ),
        (COMPLETION, b'{"prompt": [' + b",".join([b'"x"'] * 65) + b"]}"),
        (COMPLETION, b'{"prompt": "x", "guided_regex": "x"}'),
        (COMPLETION, b'{"prompt": "x", "structured_outputs": {"choice": ["x"]}}'),
        (COMPLETION, orjson.dumps({"prompt": "x", "response_format": SCHEMA})),
        (CHAT, orjson.dumps({"messages": [USER], "chat_template_kwargs": {"n": 9}})),
    ]
    info = default_info(max_model_len=10_000)
    for job, raw in unusual:
        with pytest.raises(NeedsProcess):
            job.draft(side, raw, info)
        assert job.draft(apart, raw, info).texts.texts
    usual: list[tuple[Job[Any], bytes]] = [
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}]}'),
        (CHAT, orjson.dumps({"messages": [USER], "chat_template_kwargs": {"thinking": False}})),
        (COMPLETION, b'{"prompt": "x", "response_format": {"type": "json_object"}}'),
        (COMPLETION, b'{"prompt": "x", "response_format": {"type": "text"}}'),
    ]
    for job, raw in usual:
        assert job.draft(side, raw, info).texts.texts


def test_strings_without_an_end_are_gone_through_once() -> None:
    """Each quote may begin a string that ends nowhere."""
    raw = b"[" * (MAX_CONTAINERS + 1) + b'\\"' * 1_000_000
    began = time.process_time()
    with pytest.raises(RequestTooLarge):
        check_shape(raw, 1000)
    assert time.process_time() - began < 5


async def test_a_process_that_is_killed_costs_no_request(large: Stack) -> None:
    (first,) = text_processes()
    first.kill()
    assert (await large.complete(**PAD)).status_code == 200
    (second,) = text_processes()
    second.suspend()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(large.complete(**PAD))
        await until(lambda: not large.server.gateway.text._pool._idle)
        await asyncio.sleep(0.1)
        second.kill()
    assert task.result().status_code == 200
    assert await ends(large, "death") >= 1
    assert len(text_processes()) == 1


async def ends(stack: Stack, cause: str) -> int:
    text = (await stack.client.get("/metrics")).text
    line = f'surestep:text_process_ends_total{{cause="{cause}"}} '
    return int(float(text.partition(line)[2].split()[0]))


async def test_a_process_that_takes_too_long_is_ended(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_gateway.text.pool.REQUEST_TIMEOUT_S", 1)
    stack = await start_stack(text_processes=1)
    assert (await stack.complete(**PAD)).status_code == 200
    (process,) = text_processes()
    process.suspend()
    answer = await stack.complete(**PAD)
    assert answer.status_code == 413
    assert "longer than 1 s" in answer.json()["error"]["message"]
    assert not process.is_running()
    assert await ends(stack, "timeout") == 1
    assert (await stack.complete(**PAD)).status_code == 200


async def test_memory_of_a_process_is_bounded(start_stack: StartStack) -> None:
    stack = await start_stack(text_processes=1, text_memory_bytes=64 << 20)
    elements = b",".join([b"{}"] * 900_000)
    hungry = b'{"prompt": "x", "max_tokens": 1, "metadata": [%b]}' % elements
    answer = await stack.post("/v1/completions", hungry)
    assert answer.status_code == 413, answer.text
    assert "memory" in answer.json()["error"]["message"]
    assert (await stack.complete(**PAD)).status_code == 200
    native = await stack.client.post("/tokenize", json={"prompt": "the quick brown " * 60_000})
    assert native.status_code == 413, native.text[:200]
    assert (await stack.complete(**PAD)).status_code == 200


async def test_nothing_is_begun_for_a_client_that_has_left(large: Stack) -> None:
    (process,) = text_processes()
    gate = large.server.gateway.text._pool._gate
    process.suspend()
    begun = asyncio.ensure_future(large.complete(**PAD))
    await until(lambda: not large.server.gateway.text._pool._idle)
    waiting = [asyncio.ensure_future(large.complete(**PAD)) for _ in range(3)]
    await until(lambda: gate.num_waiting == 3)
    for task in waiting[:2]:
        task.cancel()
    await until(lambda: gate.num_waiting == 1)
    assert large.server.gateway.admission.num_open == 2
    process.resume()
    assert (await begun).status_code == 200
    assert (await waiting[2]).status_code == 200
    assert text_processes() == [process]


async def test_short_requests_do_not_wait_for_long_ones(large: Stack) -> None:
    (process,) = text_processes()
    process.suspend()
    long = asyncio.ensure_future(large.complete(**PAD))
    await until(lambda: not large.server.gateway.text._pool._idle)
    assert (await large.chat(max_tokens=2)).status_code == 200
    assert (await large.client.post("/tokenize", json={"prompt": "x" * 5000})).status_code == 200
    assert not long.done()
    process.resume()
    assert (await long).status_code == 200


async def test_processes_end_with_their_gateway(model: Path) -> None:
    port = free_port()
    async with (
        running() as scheduler,
        gateway(
            model, port, scheduler.port, "--api-key", "secret", "--admin-api-key", "hidden"
        ) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        await until_ready(client, process)
        key = {"authorization": "Bearer secret"}
        response = await client.post("/v1/completions", json={"prompt": "x"} | PAD, headers=key)
        assert response.status_code == 200, response.text
        texts = psutil.Process(process.pid).children()  # one, or the warm one too
        assert texts
        for text in texts:
            assert not {"secret", "hidden"} & {*text.environ().values(), *text.cmdline()}
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            for text in texts:
                while text.is_running() and text.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.01)


async def test_a_pipe_that_is_closed_is_a_lost_connection() -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    await wire.send(process.stdin, [b"x"])
    process.stdin.close()
    with pytest.raises(ConnectionError):
        await wire.send(process.stdin, [b"x"])
    assert await process.wait() == 0


async def test_processes_start_without_the_model_folder(tmp_path: Path) -> None:
    """What they need of it is in the gateway's memory."""
    folder = tiny_tokenizer.save(tmp_path / "models" / "tiny")
    async with stacks(folder) as start:
        stack = await start(text_processes=1)
        before = await stack.complete(prompt="hello <|im_end|>", seed=1, **PAD)
        for process in text_processes():
            process.kill()
        shutil.rmtree(folder.parent)
        after = await stack.complete(prompt="hello <|im_end|>", seed=1, **PAD)
        assert after.status_code == 200, after.text
        assert stable(after) == stable(before)
        assert (await stack.chat(messages=[USER | {"content": "<|im_end|>"}])).status_code == 200
