"""A router's view of `surestep serve`: vllm.grpc.engine with a real model, drafts, and lost workers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from e2e.conftest import FLAGS, SPECULATION
from support.clients.vllm_wire import WireAnswer, WireClient, new
from support.faults.server import PACED
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=2)]
PROMPT = [97, 98, 99, 97, 98, 99, 32, 97, 98, 99]
LENGTH = 400  # tokens


@pytest.fixture(scope="module")
def routed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server with drafts whose scheduler is open to routers."""
    logs = tmp_path_factory.mktemp("routed")
    drafts = ("--speculative-config", SPECULATION, "--no-adaptive-draft-length")
    flags = (*FLAGS, *drafts, "--max-model-len", "512", "--vllm-grpc-public")
    with serve(tiny_model, logs, *flags, variables=PACED) as running:
        yield running


def address(stack: Stack) -> str:
    return str(stack.status()["scheduler"]["address"])


def ask(request_id: str, stream: bool = True, **sampling: Any) -> Any:
    params = {"ignore_eos": True, "max_tokens": LENGTH, **sampling}
    tokenized = {"input_ids": PROMPT}
    return new(
        "GenerateRequest",
        request_id=request_id,
        tokenized=tokenized,
        sampling_params=params,
        stream=stream,
    )


def over_http(stack: Stack, **sampling: Any) -> list[list[int]]:
    """The same from the gateway, which calls our own Generate: the tokens of every sequence."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True}
    reply = httpx.post(
        stack.url + "/v1/completions",
        json={**body, "return_token_ids": True, **sampling},
        timeout=90,
    )
    choices = reply.raise_for_status().json()["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda one: int(one["index"]))]


async def generate(stack: Stack, request: Any) -> WireAnswer:
    async with grpc.aio.insecure_channel(address(stack)) as channel:
        return await WireClient(channel).generate(request, timeout_s=90)


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "seed": 23,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_our_own_service(routed: Stack, sampling: dict[str, Any]) -> None:
    answer = asyncio.run(generate(routed, ask("one", **sampling)))
    assert [answer.tokens()] == [list(answer.ends[0].output_ids)] == over_http(routed, **sampling)
    if sampling is GREEDY:
        assert answer.ends[0].spec_accepted_tokens > 0


def test_sequences_have_the_seeds_that_the_gateway_gives(routed: Stack) -> None:
    answer = asyncio.run(generate(routed, ask("some", stream=False, n=3, **SAMPLED)))
    assert [list(end.output_ids) for end in answer.ends] == over_http(routed, n=3, **SAMPLED)


def test_constraints_are_those_of_the_gateway(routed: Stack) -> None:
    pattern = "([a-c]{2}/){40}"
    answer = asyncio.run(generate(routed, ask("word", regex=pattern, **SAMPLED)))
    asked = {"structured_outputs": {"regex": pattern}, **SAMPLED}
    assert [answer.tokens()] == over_http(routed, **asked)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        asyncio.run(generate(routed, ask("wrong", regex="(")))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_no_token(routed: Stack, number: signal.Signals) -> None:
    lasting = {"n": 2, "max_tokens": 480, **SAMPLED}  # long enough to be met before its end
    quiet = over_http(routed, **lasting)
    before = routed.status()["scheduler"]
    restarts, pid = before["supervisors"][0]["restarts"], before["ranks"][0]["pid"]

    async def disturbed() -> WireAnswer:
        async with grpc.aio.insecure_channel(address(routed)) as channel:
            call = WireClient(channel).call("Generate", ask("lost", **lasting), 90)
            responses = [await call.read() for _ in range(3)]
            os.kill(pid, number)
            responses += [response async for response in _rest(call)]
            return WireAnswer(responses, {})

    answer = asyncio.run(disturbed())
    routed.wait_until(routed.is_ready, "readiness")
    assert routed.status()["scheduler"]["supervisors"][0]["restarts"] > restarts
    assert [answer.tokens(0), answer.tokens(1)] == quiet
    assert [list(end.output_ids) for end in answer.ends] == quiet
    assert [end.finish_reason for end in answer.ends] == ["length", "length"]


async def _rest(call: Any) -> Any:
    while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs
        yield response


def test_a_router_learns_what_it_needs(routed: Stack, tiny_model: Path) -> None:
    async def learn() -> tuple[Any, bytes, str]:
        async with grpc.aio.insecure_channel(address(routed)) as channel:
            wire = WireClient(channel)
            chunks = await wire.read("GetTokenizer")
            data = b"".join(chunk.data for chunk in chunks)
            return await wire.ask("GetModelInfo"), data, chunks[-1].sha256

    facts, data, digest = asyncio.run(learn())
    assert (facts.served_model_name, facts.max_context_length) == ("tiny", 512)
    assert hashlib.sha256(data).hexdigest() == digest
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert files.read("tokenizer.json") == (tiny_model / "tokenizer.json").read_bytes()
