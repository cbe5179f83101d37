"""Whatever is sent by vllm.grpc.engine, the answer is tokens or a status that names a mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.vllm_calls import served
from support.clients.vllm_wire import TABLE, WireClient, WireField, fields, new
from support.processes.scheduler_harness import Client

_MESSAGES = fields(TABLE)
_MISTAKES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}
_MISTAKES |= {grpc.StatusCode.RESOURCE_EXHAUSTED}  # more sequences than may wait
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "float": st.floats(width=32) | st.floats(0, 2, width=32),
    "bool": st.booleans(),
    "string": st.text(max_size=8),
    "uint32": st.integers(0, 120) | st.integers(0, (1 << 32) - 1),
    "int32": st.integers(-2, 120) | st.integers(-(1 << 31), (1 << 31) - 1),
}


def _values(field: WireField) -> st.SearchStrategy[Any]:
    one = _VALUES.get(field.kind)
    if one is None:
        one = _message(field.kind)
    return st.lists(one, max_size=4) if field.repeated else one


def _message(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={f.name: _values(f) for f in _MESSAGES[name]})


REQUESTS = st.fixed_dictionaries(
    {
        "request_id": st.sampled_from(["a", "canary", "ä" * 20]),
        "tokenized": st.just({"input_ids": [1, 2, 3]}) | _message("TokenizedInput"),
    },
    optional={
        "sampling_params": _message("SamplingParams"),
        **{
            field.name: _values(field)
            for field in _MESSAGES["GenerateRequest"]
            if field.name not in ("request_id", "tokenized", "sampling_params")
        },
    },
)
# Of these half are served.
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8)},
    optional={
        field.name: _values(field)
        for field in _MESSAGES["SamplingParams"]
        if field.name in ("top_k", "n", "seed", "logprobs", "prompt_logprobs", "ignore_eos", "stop")
        or field.name in ("top_p", "min_tokens", "stop_token_ids", "truncate_prompt_tokens")
    },
)


class Fuzzed:
    """A scheduler that lives as long as the test, in a loop of its own."""

    def __init__(self, runner: asyncio.Runner, client: Client, wire: WireClient) -> None:
        self._runner = runner
        self._client = client
        self._wire = wire

    def send(self, values: dict[str, Any]) -> list[str] | grpc.StatusCode:
        """The reasons for which the sequences ended, or the status."""
        return self._runner.run(self._send(values))

    async def _send(self, values: dict[str, Any]) -> list[str] | grpc.StatusCode:
        try:
            answer = await self._wire.generate(new("GenerateRequest", **values))
        except grpc.aio.AioRpcError as error:
            return error.code()
        return [end.finish_reason for end in answer.ends]

    def at_rest(self) -> bool:
        """Nothing is left of what was sent."""
        stats = self._runner.run(self._client.idle())
        return stats.num_blocks_used == 0 and stats.num_epochs == 1


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        client, wire = runner.run(stack.enter_async_context(served()))
        try:
            yield Fuzzed(runner, client, wire)
        finally:
            runner.run(stack.aclose())


@settings(max_examples=50, deadline=None)
@given(values=REQUESTS)
def test_any_request(fuzzed: Fuzzed, values: dict[str, Any]) -> None:
    outcome = fuzzed.send(values)
    assert isinstance(outcome, list) or outcome in _MISTAKES, outcome
    assert fuzzed.at_rest()


@settings(max_examples=40, deadline=None)
@given(sampling=SAMPLING, stream=st.booleans())
def test_nearly_right_requests(fuzzed: Fuzzed, sampling: dict[str, Any], stream: bool) -> None:
    tokenized = {"input_ids": [4, 5, 6, 7]}
    outcome = fuzzed.send(
        {
            "request_id": "a",
            "tokenized": tokenized,
            "sampling_params": sampling,
            "stream": stream,
        }
    )
    if isinstance(outcome, list):
        assert len(outcome) == (sampling.get("n") or 1)
        assert set(outcome) <= {"stop", "length"}
    else:
        assert outcome in _MISTAKES, outcome
    assert fuzzed.at_rest()
