"""KV events: a router's index is what the block pool has, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import settings
from hypothesis.stateful import invariant
from support.clients.kv_events import AllBlocksCleared, BlockStored, EventBatch, Index, decoded
from support.parity.lifecycle import KINDS, OWNERS, PREFIXES, Lifecycle
from surestep_common.errors import InvalidRequest
from surestep_common.tenants import cache_root, told_salt
from surestep_scheduler.cache.log import CacheLog, Content, Source
from surestep_scheduler.cache.prefix import PrefixChain, group_of
from surestep_scheduler.config import KVEventsConfig, SchedulerSettings
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.service.kv_events import Batch, KVEvents, block_hash

TIMEOUT_S = 20


class Indexed(Lifecycle):
    """Random lives beside a router, which is told of them after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.index = CacheLog(lambda: None), Index()
        self.state_class: Any = functools.partial(SchedulerState, log=self.log)

    @invariant()
    def the_router_knows_what_is_there(self) -> None:
        """All of it, but for blocks that tiers brought back for a request that has left.

        So does one that comes late, and it can name all that the other can.
        """
        _, _, payload = Batch(0, self.log.take()).message(b"")
        self.index.apply(decoded(payload))
        late = Index()
        late.apply(decoded(Batch(1, self.log.told.copy()).message(b"")[2]))
        assert late.blocks == self.index.blocks
        assert late.num_orphans <= self.index.num_orphans
        pool, limits = self.state.pool, self.state.limits
        there = {(group_of(key), block_hash(key)) for key in vars(pool)["_block_of"]}
        assert self.index.blocks.keys() <= there
        assert self.index.blocks.keys() == there or limits.has_tiers
        if limits.has_tiers or limits.drafter_has_state or limits.prompt_chunk > 1:
            return  # whose keys name more than tokens
        for salt, owner in OWNERS.items():
            for tokens in PREFIXES:
                shared = limits.shared_len(len(tokens))
                chain = PrefixChain(cache_root(owner, salt), limits.block_size, shared)
                keys = chain.keys(array("I", tokens), 0, len(tokens) // limits.block_size)
                told = told_salt(owner, salt)
                found = self.index.num_leading(tokens, limits.block_size, told)
                assert found == len(pool.leading(keys)) or limits.kv_windows[0] > 0


TestIndexed = Indexed.TestCase
TestIndexed.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no snapshots"])
@pytest.mark.rotates(3, always=("stateless", "window"))
def test_long_life(kind: str) -> None:
    from promises.ledger.test_lifecycle import live

    machine, rng = Indexed(), random.Random(5)
    live(machine, rng, depth=1, num_events=3000, kind=kind)
    machine.the_router_knows_what_is_there()


def content(number: int, parent: int | None = None, **source: Any) -> Content:
    key = number.to_bytes(8) + bytes(8)
    before = None if parent is None else parent.to_bytes(8) + bytes(8)
    return Content(key, before, array("I", [number] * 2), Source(windows=(0, 8), **source))


def batch_of(events: list[Any]) -> EventBatch:
    return decoded(Batch(0, events).message(b"")[2])


def test_successive_blocks_are_one_event() -> None:
    first, then, other = content(1), content(2, 1), content(9)
    window = then._replace(key=then.key + (1).to_bytes(2))
    events = batch_of([first, then, other, window, other.key, first.key, None]).events
    hashes = [getattr(event, "block_hashes", None) for event in events]
    assert hashes == [[1, 2], [9], [2], [9, 1], None]
    stored = events[0]
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (
        [1, 1, 2, 2],
        2,
        None,
    )
    assert (stored.medium, stored.group_idx, stored.kv_cache_spec_kind) == (
        "GPU",
        0,
        "full_attention",
    )
    windowed = events[2]
    assert isinstance(windowed, BlockStored)
    assert (windowed.group_idx, windowed.kv_cache_spec_kind) == (1, "sliding_window")
    assert windowed.kv_cache_spec_sliding_window == 8


def test_salt_and_adapter_are_extra_keys() -> None:
    """The adapter of every block, and the salt of the first: vLLM's order."""
    source: dict[str, Any] = {"salt": "s", "adapter": "a", "adapter_id": 3}
    (event,) = batch_of([content(1, **source), content(2, 1, **source)]).events
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [("a", "s"), ("a",)]
    assert (event.lora_id, event.lora_name, event.cache_salt) == (3, "a", "s")


def test_owners_are_told_apart_and_not_named() -> None:
    """No request of a router's matches an owner's prefix, not even with the owner's own salt."""
    from promises.ledger.test_lifecycle import live

    live(machine := Indexed(), random.Random(5), depth=1, num_events=0, kind="stateless")
    limits, tokens, index = machine.state.limits, array("I", range(9)), Index()
    for owner in ("alice", "bob", ""):
        request = Request(
            id="r",
            prompt_ids=tokens,
            emitted_ids=(),
            max_tokens=1,
            cache_owner=owner,
            cache_salt="s",
        )
        chain = request.chain(limits)
        chain.extend(tokens)
        events = [chain.content(tokens, entry, 0) for entry in range(3)]
        message = Batch(0, events).message(b"")[2]
        assert not owner or owner.encode() not in message
        index.apply(decoded(message))
        assert index.num_leading(tokens, 3, told_salt(owner, "s")) == 3
        assert index.num_leading(tokens, 3, "s") == (0 if owner else 3)
        assert index.num_leading(tokens, 3) == 0
    assert len(index.blocks) == 9


@asynccontextmanager
async def published(folder: Path, **config: Any) -> AsyncIterator[tuple[KVEvents, Any, Any]]:
    """A publisher, the socket of a subscriber that has joined, and one to ask for more."""
    ends = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    asked: dict[str, Any] = {"enable_kv_cache_events": True, "topic": "kv@pod", **ends, **config}
    events = KVEvents(KVEventsConfig(**asked))
    with zmq.asyncio.Context() as context:
        subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        subscriber.connect(ends["endpoint"])
        subscriber.subscribe("kv@")
        asker.connect(ends["replay_endpoint"])
        try:
            async with asyncio.timeout(TIMEOUT_S):
                events.log.cleared()
                await subscriber.poll()
                yield events, subscriber, asker
        finally:
            subscriber.close()
            asker.close()
            await asyncio.to_thread(events.close)


async def replayed(asker: Any, first: int) -> Iterator[tuple[int, EventBatch]]:
    """The batches from a number on."""
    await asker.send_multipart([b"", first.to_bytes(8)])
    found = list[tuple[int, EventBatch]]()
    while True:
        delimiter, topic, number, payload = await asker.recv_multipart()
        assert delimiter == b""
        if not payload:
            assert (topic, int.from_bytes(number, signed=True)) == (b"", -1)
            return iter(found)
        assert topic == b"kv@pod"
        found.append((int.from_bytes(number), decoded(payload)))


async def test_what_was_missed_is_told_again(tmp_path: Path) -> None:
    """A batch that finds no room makes no step wait; its number is missing, and all is told anew."""
    async with published(tmp_path, max_queue_size=1) as (events, subscriber, asker):
        start = events.log.num_batches
        for number in range(2000):
            events.log.stored(content(number))
            vars(KVEvents)["_flush"](events)
        assert 0 < events.log.num_dropped < 2000
        index, newest = Index(), b""
        while len(index.blocks) < 2000:
            topic, newest, payload = await subscriber.recv_multipart()
            assert topic == b"kv@pod"
            batch = decoded(payload)
            if isinstance(batch.events[0], AllBlocksCleared):
                index.apply(batch)
        assert int.from_bytes(newest) == start + 2000 == events.log.num_batches - 1
        [(number, again)] = await replayed(asker, start)
        assert (number, again) == (start + 2000, batch)


async def followed(subscriber: Any, index: Index, until: Callable[[], bool]) -> None:
    while not until():
        index.apply(decoded((await subscriber.recv_multipart())[2]))


@pytest.mark.parametrize("config", [{}, {"buffer_steps": 3}], ids=["all", "few"])
async def test_who_comes_late_learns_what_is_there(tmp_path: Path, config: dict[str, int]) -> None:
    """By a subscription, and by asking for all batches when most are not kept."""
    async with published(tmp_path, **config) as (events, subscriber, asker):
        first, late, asking = Index(), Index(), Index()
        for number in range(9):
            events.log.stored(content(number))
            await asyncio.sleep(0)
        events.log.removed(content(4).key)
        await followed(subscriber, first, lambda: len(first.blocks) == 9)
        await followed(subscriber, first, lambda: len(first.blocks) == 8)
        for _, batch in await replayed(asker, 0):
            asking.apply(batch)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as joined:
            joined.connect(f"ipc://{tmp_path}/events")
            joined.subscribe("kv@")
            await followed(joined, late, lambda: len(late.blocks) == 8)
        assert first.blocks == asking.blocks == late.blocks


async def test_the_buffer_is_bounded(tmp_path: Path) -> None:
    async with published(tmp_path, buffer_steps=3) as (events, _, asker):
        for _ in range(9):
            events.log.cleared()
            await asyncio.sleep(0)
        newest = events.log.num_batches
        again = list(await replayed(asker, 0))
        assert [number for number, _ in again] == [newest - 3, newest - 2, newest - 1]
        assert all(isinstance(batch.events[0], AllBlocksCleared) for _, batch in again)


async def test_an_asker_with_a_large_message_is_cut_off(tmp_path: Path) -> None:
    async with published(tmp_path) as (_, _, asker):
        await asker.send_multipart([b"", b"x" * 300])
        assert not await asker.poll(300)
        assert list(await replayed(asker, 1 << 60)) == []


def settings_with(config: Any) -> SchedulerSettings:
    return SchedulerSettings(worker_addresses=["x:1"], kv_events_config=config)


def test_configurations() -> None:
    assert settings_with({}).kv_events is None
    assert settings_with({"enable_kv_cache_events": False}).kv_events is None
    assert settings_with({"enable_kv_cache_events": True, "publisher": "null"}).kv_events is None
    config = settings_with({"enable_kv_cache_events": True}).kv_events
    assert config is not None
    assert (config.endpoint, config.binds) == ("tcp://*:5557", True)
    assert not config.model_copy(update={"endpoint": "tcp://router:5557"}).binds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"enable_kv_cache_events": True, "port": 1}, "port: Extra inputs are not permitted"),
        ({"enable_kv_cache_events": True, "endpoint": "5557"}, "endpoint: String should match"),
        ({"enable_kv_cache_events": True, "max_queue_size": 0}, "max_queue_size: Input should be"),
        ({"enable_kv_cache_events": True, "publisher": "nats"}, "publisher: Input should be"),
        ({"publisher": "zmq"}, "publisher zmq needs enable_kv_cache_events"),
    ],
)
def test_wrong_configurations(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_with(wrong)


def occupied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is needed: the folder does not exist."""


def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)


@pytest.mark.parametrize(
    ("state", "message"),
    [(occupied, "choose another endpoint"), (not_installed, r"surestep\[events\]")],
)
def test_what_keeps_it_from_starting(
    state: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(monkeypatch)
    with pytest.raises(InvalidRequest, match=message):
        KVEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///no/such/folder/x"))
