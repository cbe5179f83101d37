"""KV events for routers, as vLLM publishes them: a ZeroMQ socket, and another that repeats batches.

    XPUB:    topic | number, 8 bytes, big endian | msgpack of [time, events, data-parallel rank]
    ROUTER:  asked with the first number wanted, it sends such messages, and one with number -1

Events are maps with vLLM's names. A step never waits: a batch that finds no room is not sent, and
its number is missing. All that is there is told anew, behind AllBlocksCleared, when a router
subscribes, when batches were not sent, and when one asks for batches that are not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

import msgspec
from surestep_common.errors import InvalidRequest
from surestep_common.kv_groups import ALL

from surestep_scheduler.cache.log import KEY_BYTES, CacheLog, Content, Event
from surestep_scheduler.cache.prefix import group_of
from surestep_scheduler.config import KVEventsConfig

_HASH_BYTES = 8
_RANK = 0  # of data parallelism: every scheduler publishes for itself
_MEDIUM = "GPU"  # vLLM's name of the pool, on whatever device it lies
_END = (-1).to_bytes(8, signed=True)
_MOST_ASKED = 256  # bytes of a part, those of the handshake included
_LAST_WORDS_MS = 200  # for what is queued at the end
_LOOK_S = 1.0  # for subscribers, who are told everything at most as often
_SUBSCRIBED = b"\x01"  # what a subscription begins with
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """Events of a step."""

    number: int
    events: Iterable[Event]
    time: float = field(default_factory=time.time)  # Unix seconds
    _payload: bytes = b""

    @property
    def stands_alone(self) -> bool:
        """Return whether batches before it do not matter."""
        return next(iter(self.events)) is None

    def message(self, topic: bytes) -> list[bytes]:
        """Return the parts of its message. The payload is made once."""
        if not self._payload:
            events = []
            for event in wire_events(self.events):
                events.append(event)
                time.sleep(0)  # the scheduler's thread comes first
            self._payload = msgspec.msgpack.encode([self.time, events, _RANK])
        return [topic, self.number.to_bytes(8), self._payload]


class KVEvents:
    """Publisher of a log's events."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Open the sockets; needs a running event loop. Raises InvalidRequest."""
        self.log = CacheLog(self._wake)
        self._config, self._numbers = config, count()
        self._recent = deque[Batch](maxlen=config.buffer_steps)
        self._queue = Queue[Batch | None](config.max_queue_size)
        self._is_short = False  # of a batch that was not sent
        self._open(config)
        self._loop = asyncio.get_running_loop()
        self._threads = [Thread(target=self._send, name="kv-events", daemon=True)]
        if self._router is not None:
            self._threads.append(Thread(target=self._repeat, name="kv-replay", daemon=True))
        for thread in self._threads:
            thread.start()

    def _open(self, config: KVEventsConfig) -> None:
        try:
            import zmq
        except ImportError:
            raise InvalidRequest(
                "--kv-events-config: ZeroMQ is not installed; it comes with "
                "pip install 'surestep[events]'",
                param="kv_events_config",
            ) from None
        self._context, self._closed = zmq.Context(), zmq.ContextTerminated
        self._pub, self._router = self._context.socket(zmq.XPUB), None
        self._pub.set_hwm(config.hwm)
        self._pub.linger, self._pub.maxmsgsize = _LAST_WORDS_MS, _MOST_ASKED
        self._pub.xpub_verbose = 1  # every subscriber is to be noticed
        endpoint = config.endpoint
        try:
            if config.binds:
                self._pub.bind(endpoint)
            else:
                self._pub.connect(endpoint)
            if config.replay_endpoint is not None:
                endpoint = config.replay_endpoint
                self._router = self._context.socket(zmq.ROUTER)
                self._router.linger, self._router.maxmsgsize = 0, _MOST_ASKED
                self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            why = zmq.strerror(error.errno or 0)
            message = f"--kv-events-config: {endpoint}: {why}; choose another endpoint"
            raise InvalidRequest(message, param="kv_events_config") from error
        endpoints = [config.endpoint, *filter(None, [config.replay_endpoint])]
        _logger.info("KV events, prompts' tokens among them, are on %s", " and ".join(endpoints))

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Queue what the log has, without waiting."""
        if events := self.log.take():
            self._put(events)

    async def _tell_all(self) -> None:
        """Queue all that is there, which makes every batch before it superfluous."""
        self._flush()
        self._recent.clear()
        self._put(self.log.told.copy())

    def _put(self, events: Iterable[Event]) -> None:
        log, batch = self.log, Batch(next(self._numbers), events)
        self._recent.append(batch)
        log.num_batches += 1
        try:
            self._queue.put_nowait(batch)
        except Full:
            if not log.num_dropped:
                _logger.warning("KV events are dropped: max_queue_size batches wait to be sent")
            log.num_dropped += 1
            self._is_short = True

    def _send(self) -> None:
        """Send what is queued until the end, and have all told where that is needed."""
        topic, told_at = self._config.topic.encode(), -_LOOK_S
        is_wanted = False
        while True:
            with suppress(Empty):
                if (batch := self._queue.get(timeout=_LOOK_S)) is None:
                    break
                self._pub.send_multipart(batch.message(topic))
            if self._is_short and self._queue.empty():
                self._is_short, is_wanted = False, True
            is_wanted |= self._has_come()
            if is_wanted and time.monotonic() - told_at >= _LOOK_S:
                is_wanted, told_at = False, time.monotonic()
                asyncio.run_coroutine_threadsafe(self._tell_all(), self._loop)
        self._pub.close()

    def _has_come(self) -> bool:
        """Return whether a router has subscribed since the last call."""
        has_come = False
        while self._pub.poll(0):
            has_come |= self._pub.recv().startswith(_SUBSCRIBED)
        return has_come

    def _repeat(self) -> None:
        """Answer who has missed batches, until the sockets are closed."""
        assert self._router is not None
        topic = self._config.topic.encode()
        try:
            while True:
                *envelope, asked = self._router.recv_multipart()
                for batch in self._kept(int.from_bytes(asked)):
                    self._router.send_multipart([*envelope, *batch.message(topic)])
                self._router.send_multipart([*envelope, b"", _END, b""])
        except self._closed:
            self._router.close()

    def _kept(self, first: int) -> Iterable[Batch]:
        """Return the batches from `first` on, or some that say as much."""
        kept = self._recent.copy()
        if kept and first < kept[0].number and not kept[0].stands_alone:
            asyncio.run_coroutine_threadsafe(self._tell_all(), self._loop).result()
            kept = self._recent.copy()
        return [batch for batch in kept if batch.number >= first]

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        self._queue.put(None)
        self._threads[0].join()
        self._context.term()


def wire_events(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Yield vLLM's events for those of a log; successive blocks of a prefix are one."""
    run = list[Content]()
    removed = list[bytes]()
    for event in events:
        if run and not (isinstance(event, Content) and _follows(event, run[-1])):
            yield _stored(run)
            run = []
        if removed and not (isinstance(event, bytes) and group_of(event) == group_of(removed[0])):
            yield _removed(removed)
            removed = []
        if isinstance(event, Content):
            run.append(event)
        elif event is not None:
            removed.append(event)
        else:
            yield {"type": "AllBlocksCleared"}
    if run:
        yield _stored(run)
    if removed:
        yield _removed(removed)


def _follows(content: Content, before: Content) -> bool:
    same = group_of(content.key) == group_of(before.key) and content.source == before.source
    return same and content.parent == before.key[:KEY_BYTES]


def _stored(run: Sequence[Content]) -> dict[str, Any]:
    first, group = run[0], group_of(run[0].key)
    source, window = first.source, first.source.windows[group]
    kind = "full_attention" if window == ALL else "sliding_window"
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash(content.key) for content in run],
        "parent_block_hash": None if first.parent is None else block_hash(first.parent),
        "token_ids": [token for content in run for token in content.tokens],
        "block_size": len(first.tokens),
        "lora_id": source.adapter_id,
        "medium": _MEDIUM,
        "lora_name": source.adapter or None,
        "extra_keys": [_extra_keys(content) for content in run],
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        **({} if window == ALL else {"kv_cache_spec_sliding_window": window}),
        **({"cache_salt": source.salt} if source.salt else {}),  # where Dynamo looks for it
    }


def _removed(keys: Sequence[bytes]) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [block_hash(key) for key in keys],
        "medium": _MEDIUM,
        "group_idx": group_of(keys[0]),
    }


def _extra_keys(content: Content) -> list[str] | None:
    """Return what vLLM names besides tokens: the adapter, and in the first block the salt."""
    salt = content.source.salt if content.parent is None else ""
    return [name for name in (content.source.adapter, salt) if name] or None


def block_hash(key: bytes) -> int:
    """Return the 64 bits that name a block outside."""
    return int.from_bytes(key[:_HASH_BYTES])
