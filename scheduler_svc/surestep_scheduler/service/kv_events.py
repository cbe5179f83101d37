"""KV events for routers, as vLLM publishes them: a ZeroMQ socket, and another that repeats batches.

    PUB:     topic | number, 8 bytes, big endian | msgpack of [time, events, data-parallel rank]
    ROUTER:  asked with the first number wanted, it sends such messages, and one with number -1

Events are maps with vLLM's names. A step never waits: a batch that finds no room is not sent, its
number is missing, and the other socket still has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import Full, Queue
from threading import Thread
from typing import Any

import msgspec
from surestep_common.errors import InvalidRequest
from surestep_common.kv_groups import ALL

from surestep_scheduler.cache.log import CacheLog, Content, Event
from surestep_scheduler.cache.prefix import KEY_BYTES, group_of
from surestep_scheduler.config import KVEventsConfig

_HASH_BYTES = 8
_RANK = 0  # of data parallelism: every scheduler publishes for itself
_MEDIUM = "GPU"  # vLLM's name of the pool, on whatever device it lies
_END = (-1).to_bytes(8, signed=True)
_MOST_ASKED = 256  # bytes of a part, those of the handshake included
_LAST_WORDS_MS = 200  # for what is queued at the end
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """Events of a step."""

    number: int
    events: Sequence[Event]
    time: float = field(default_factory=time.time)  # Unix seconds
    _payload: bytes = b""

    def message(self, topic: bytes) -> list[bytes]:
        """Return the parts of its message. The payload is made once."""
        if not self._payload:
            events = list(wire_events(self.events))
            self._payload = msgspec.msgpack.encode([self.time, events, _RANK])
        return [topic, self.number.to_bytes(8), self._payload]


class KVEvents:
    """Publisher of a log's events."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Open the sockets. Raises InvalidRequest."""
        self.log = CacheLog(self._wake)
        self._config, self._numbers = config, count()
        self._recent = deque[Batch](maxlen=config.buffer_steps)
        self._queue = Queue[Batch | None](config.max_queue_size)
        self._open(config)
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
        self._pub, self._router = self._context.socket(zmq.PUB), None
        self._pub.set_hwm(config.hwm)
        self._pub.linger = _LAST_WORDS_MS
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
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Queue what the log has, without waiting."""
        log = self.log
        if not (events := log.take()):
            return
        batch = Batch(next(self._numbers), events)
        self._recent.append(batch)
        log.num_batches += 1
        try:
            self._queue.put_nowait(batch)
        except Full:
            if not log.num_dropped:
                _logger.warning("KV events are dropped: max_queue_size batches wait to be sent")
            log.num_dropped += 1

    def _send(self) -> None:
        topic = self._config.topic.encode()
        while (batch := self._queue.get()) is not None:
            self._pub.send_multipart(batch.message(topic))
        self._pub.close()

    def _repeat(self) -> None:
        """Answer who has missed batches, until the sockets are closed."""
        assert self._router is not None
        topic = self._config.topic.encode()
        try:
            while True:
                *envelope, first = self._router.recv_multipart()
                for batch in self._recent.copy():
                    if batch.number >= int.from_bytes(first):
                        self._router.send_multipart([*envelope, *batch.message(topic)])
                self._router.send_multipart([*envelope, b"", _END, b""])
        except self._closed:
            self._router.close()

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
