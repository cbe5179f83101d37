"""Calls whose chunks go to one stream, through a real scheduler and a fake worker over gRPC."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from support.fakes.model import FakeModel
from support.fakes.worker import fake_worker
from support.processes.scheduler_harness import (
    TIMEOUT_S,
    Answer,
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from surestep_proto import scheduler_pb2 as pb

MODEL = FakeModel()
STREAM = "a stream"


class Reader:
    """What came on a stream, by call."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.chunks: dict[int, list[pb.GenerateChunk]] = defaultdict(list)
        self.batches: list[pb.ChunkBatch] = []

    async def read(self) -> pb.ChunkBatch:
        """The next message."""
        async with asyncio.timeout(TIMEOUT_S):
            batch: pb.ChunkBatch = await self.stream.read()
        for call, chunk in zip(batch.calls, batch.chunks, strict=True):
            self.chunks[call].append(chunk)
        self.batches.append(batch)
        return batch

    async def read_to_the_end(self, calls: set[int]) -> None:
        """Until each of these calls has finished."""
        while not all(self.chunks[call] and self.chunks[call][-1].finish_reason for call in calls):
            await self.read()

    def tokens(self, call: int) -> list[int]:
        """Those of a call."""
        return [token for chunk in self.chunks[call] for token in chunk.token_ids]


@asynccontextmanager
async def delivering(client: Client) -> AsyncIterator[Reader]:
    """A stream that calls may name."""
    stream = client.stub.Deliver(pb.DeliverRequest(stream_id=STREAM))
    reader = Reader(stream)
    assert not (await reader.read()).calls
    yield reader
    stream.cancel()


def delivered(index: int, **changes: Any) -> pb.GenerateRequest:
    """A request of that number whose chunks go to the stream."""
    message = make_request(index, **changes)
    message.delivery.CopyFrom(pb.Delivery(stream_id=STREAM, call=index))
    return message


async def answer(client: Client, reader: Reader, *messages: pb.GenerateRequest) -> list[Answer]:
    """What comes by the calls themselves while their chunks are read from the stream."""
    calls = [asyncio.ensure_future(client.generate(message)) for message in messages]
    await reader.read_to_the_end({message.delivery.call for message in messages})
    return await asyncio.gather(*calls)


async def test_the_chunks_of_all_calls_come_on_the_stream_and_the_ends_by_the_calls() -> None:
    messages = [delivered(i, length=1 + i % 40, max_tokens=1 + i % 50) for i in range(40)]
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker])) as client,
        delivering(client) as reader,
    ):
        calls = [asyncio.ensure_future(client.generate(message)) for message in messages]
        alone = await client.generate(make_request(77))
        await reader.read_to_the_end(set(range(40)))
        answers = await asyncio.gather(*calls)
        stats = await client.idle()
    assert alone.tokens == expected(MODEL, make_request(77))
    for message, named in zip(messages, answers, strict=True):
        call = message.delivery.call
        assert not named.chunks
        assert reader.tokens(call) == expected(MODEL, message)
        starts = [chunk.HasField("start") for chunk in reader.chunks[call]]
        assert starts == [True] + [False] * (len(starts) - 1)
        assert reader.chunks[call][-1].end.num_steps == len(starts)
    assert max(len(batch.calls) for batch in reader.batches) > 1
    assert stats.num_blocks_used == 0


async def test_a_reader_that_is_late_gets_what_came_in_one_chunk_per_call() -> None:
    messages = [delivered(i, stop_token_ids=[], max_tokens=30) for i in range(3)]
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker])) as client,
        delivering(client) as reader,
    ):
        calls = [asyncio.ensure_future(client.generate(message)) for message in messages]
        await client.until(lambda stats: stats.finished_requests["length"] == 3)
        await reader.read_to_the_end({0, 1, 2})
        await asyncio.gather(*calls)
    for message in messages:
        assert reader.tokens(message.delivery.call) == expected(MODEL, message)


async def test_an_error_comes_by_the_call_and_behind_its_tokens() -> None:
    gate = Gate(epoch=1, steps=6)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker])) as client,
        delivering(client) as reader,
    ):
        message = delivered(1, stop_token_ids=[])
        call = client.stub.Generate(message, timeout=2.0)
        await gate.reached.wait()
        assert (await code_of(call.read())).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.opened.set()
        refused = await code_of(client.generate(delivered(2, max_tokens=0)))
        stats = await client.idle()
        await client.generate(make_request(3))
        await answer(client, reader, delivered(4))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    whole = expected(MODEL, message)
    assert 0 < len(reader.tokens(1)) < len(whole)
    assert reader.tokens(1) == whole[: len(reader.tokens(1))]
    assert not reader.chunks[2]
    assert stats.num_aborted_requests == 1


async def test_a_cancelled_call_frees_its_slot_and_sends_no_more() -> None:
    gate = Gate(epoch=1, steps=6)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker])) as client,
        delivering(client) as reader,
    ):
        gone = client.stub.Generate(delivered(1, max_tokens=90, stop_token_ids=[]))
        survivor = asyncio.ensure_future(client.generate(delivered(2, stop_token_ids=[])))
        await gate.reached.wait()
        gone.cancel()
        gate.opened.set()
        await reader.read_to_the_end({2})
        await survivor
        stats = await client.idle()
        count = len(reader.tokens(1))
        await answer(client, reader, delivered(3))
    assert stats.num_aborted_requests == 1
    assert stats.num_blocks_used == 0
    assert len(reader.tokens(1)) == count < 90


async def test_where_no_such_stream_is_open_chunks_come_by_the_call() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        first = await client.generate(delivered(1))
        async with delivering(client) as reader:
            (named,) = await answer(client, reader, delivered(2))
            assert not named.chunks
        async with asyncio.timeout(TIMEOUT_S):  # until it has heard that nobody reads there now
            while not (last := await client.generate(delivered(3))).chunks:
                pass
    for index, got in ((1, first), (3, last)):
        assert got.tokens == expected(MODEL, make_request(index))


async def test_a_stream_has_a_name_of_its_own() -> None:
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker])) as client,
        delivering(client) as reader,
    ):
        for taken in (STREAM, "", "x" * 10_000):
            second = client.stub.Deliver(pb.DeliverRequest(stream_id=taken))
            assert (await code_of(second.read())).code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.OUT_OF_RANGE,
            )
        await answer(client, reader, delivered(1))


async def test_large_chunks_share_no_message() -> None:
    """Log-probabilities of prompts take megabytes, and a message that is too large would end the
    stream of all calls."""
    model = FakeModel(max_model_len=4096, num_blocks=8192, max_step_tokens=1 << 15)
    wants = {"want_prompt_logprobs": True, "num_top_prompt_logprobs": 20}
    messages = [delivered(i, length=4000, max_tokens=2, **wants) for i in range(8)]
    gate = Gate(epoch=1, steps=0)
    async with (
        fake_worker(model, before_step=gate) as worker,
        scheduler(make_settings([worker], max_num_batched_tokens=1 << 15)) as client,
        delivering(client) as reader,
    ):
        calls = [asyncio.ensure_future(client.generate(message)) for message in messages]
        await client.until(lambda stats: stats.num_running + stats.num_waiting == 8)
        gate.opened.set()
        await reader.read_to_the_end(set(range(8)))
        await asyncio.gather(*calls)
    for index in range(8):
        assert len(reader.chunks[index][0].prompt_logprobs.row) == 3999
    sizes = [sum(chunk.ByteSize() for chunk in batch.chunks) for batch in reader.batches]
    assert max(sizes) < 1 << 21 < sum(sizes)
