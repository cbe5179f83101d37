"""KV events as vLLM 0.26 declares them, and a router's index made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Fields without a default are always on the wire."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # of Dynamo, which takes it from no other place


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decoded(payload: bytes) -> EventBatch:
    """The batch of a message."""
    return _decoder.decode(payload)


class Index:
    """Blocks that an engine has, by KV group and hash, and what they hold."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, int], tuple[Any, ...]] = {}
        self.num_orphans = 0  # whose prefix was never told, so that no router could name them
        self._named = set[int]()

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.blocks[event.group_idx, each]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        self.num_orphans += parent is not None and parent not in self._named
        self._named |= {*event.block_hashes}
        for number, (each, extra) in enumerate(
            zip(event.block_hashes, event.extra_keys, strict=True)
        ):
            assert (event.group_idx, each) not in self.blocks, "told twice"
            tokens = event.token_ids[number * size : (number + 1) * size]
            self.blocks[event.group_idx, each] = (parent, tuple(tokens), extra)
            parent = each

    def num_leading(self, tokens: Sequence[int], size: int, salt: str = "") -> int:
        """How many leading blocks of a prompt the engine has, in the first group."""
        known = {content: each for (group, each), content in self.blocks.items() if group == 0}
        count, parent, extra = 0, None, (salt,) if salt else None
        while len(tokens) >= (count + 1) * size:
            content = parent, tuple(tokens[count * size : (count + 1) * size]), extra
            if content not in known:
                break
            count, parent, extra = count + 1, known[content], None
        return count
