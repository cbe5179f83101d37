"""Requests that are too large, from clients that speak gRPC, and neighbours who notice nothing."""

from __future__ import annotations

import random
import threading
from array import array
from typing import Any, NoReturn

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import fake_worker
from support.processes.scheduler_harness import (
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
    trailing,
)
from surestep_common import request_params as bounds
from surestep_common.errors import RequestTooLarge, Unavailable, Unimplemented
from surestep_common.rpc import from_rpc_error
from surestep_proto import sampling_pb2
from surestep_proto import scheduler_pb2 as pb
from surestep_scheduler.cache.prefix import PrefixChain
from surestep_scheduler.service import service

MODEL = FakeModel()


async def test_a_message_larger_than_any_request_is_refused_unread() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        message = make_request(1)
        message.prompt_ids.extend([1 << 20] * (3 << 20))
        assert message.ByteSize() > bounds.MAX_REQUEST_BYTES
        error = await code_of(client.generate(message))
        assert isinstance(from_rpc_error(error), RequestTooLarge)
        assert (await client.generate(make_request(2))).tokens == expected(MODEL, make_request(2))


async def test_what_this_release_cannot_read_is_refused_and_not_left_out() -> None:
    """A newer gateway's wish, which would be dropped without a word."""
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        message = make_request(1)
        message.sampling.MergeFromString(b"\xa2\x38\x03new")
        error = from_rpc_error(await code_of(client.generate(message)))
        assert isinstance(error, Unimplemented)
        assert "sampling.field 900" in str(error)
        assert (await client.generate(make_request(2))).tokens == expected(MODEL, make_request(2))


async def test_full_queues_are_still_full_queues() -> None:
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker], max_queue_len=0)) as client,
    ):
        error = await code_of(client.generate(make_request(1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not isinstance(from_rpc_error(error), RequestTooLarge)


@pytest.mark.parametrize(
    ("name", "wish"),
    [
        ("bad_words", [sampling_pb2.TokenSequence(token_ids=[7])] * (bounds.MAX_BAD_WORDS + 1)),
        ("stop_token_ids", [7] * (bounds.MAX_STOP_IDS + 1)),
        ("allowed_token_ids", [7] * (bounds.MAX_ALLOWED_IDS + 1)),
    ],
)
async def test_lists_are_bounded_by_name(name: str, wish: Any) -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        error = await code_of(client.generate(make_request(1, **{name: wish})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailing(error)["surestep-param"] == name


LONG = 300_000  # tokens
LONG_MODEL = FakeModel(
    num_blocks=6000, block_size=128, max_model_len=LONG + 100, max_step_tokens=100_000
)


def long_request(index: int) -> pb.GenerateRequest:
    """Requests whose prompts are equal."""
    message = make_request(index, max_tokens=3)
    message.prompt_ids[:] = random.Random(5).choices(range(101), k=LONG)
    return message


async def test_a_request_for_which_there_is_no_memory_may_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a gateway asks another scheduler, or the next one, and its client gets no 500."""

    def lacking(*_: object) -> NoReturn:
        raise MemoryError

    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        with monkeypatch.context() as patch:
            patch.setattr(service, "parse_request", lacking)
            error = from_rpc_error(await code_of(client.generate(make_request(1))))
        assert isinstance(error, Unavailable)
        assert (await client.generate(make_request(2))).tokens == expected(MODEL, make_request(2))


async def test_a_long_prompt_is_hashed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And served like any other: the next one finds it."""
    hashed_on = set[int]()
    extend = PrefixChain.extend

    def noted(self: PrefixChain, tokens: array[int]) -> None:
        hashed_on.add(threading.get_ident())
        extend(self, tokens)

    monkeypatch.setattr(PrefixChain, "extend", noted)
    settings = {"max_num_batched_tokens": 100_000}
    async with (
        fake_worker(LONG_MODEL) as worker,
        scheduler(make_settings([worker], **settings)) as client,
    ):
        answer = await client.generate(long_request(1))
        assert answer.tokens == expected(LONG_MODEL, long_request(1))
        (thread,) = hashed_on
        assert thread != threading.get_ident()
        again = await client.generate(long_request(2))
        assert again.chunks[0].start.num_cached_tokens > LONG - 256


async def test_clients_that_leave_while_their_prompts_are_hashed() -> None:
    async with fake_worker(LONG_MODEL) as worker, scheduler(make_settings([worker])) as client:
        calls = [client.stub.Generate(long_request(index), timeout=30) for index in range(5)]
        await client.until(lambda stats: stats.num_tenants > 0)
        for call in calls:
            call.cancel()
        stats = await client.idle()
        assert stats.num_tenants == 0
        assert (await client.generate(make_request(9))).tokens == expected(
            LONG_MODEL, make_request(9)
        )
