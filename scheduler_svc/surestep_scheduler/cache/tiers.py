"""The tiers behind the block pool: what was ordered of the workers, and what is held for it.

Workers keep the content of blocks and snapshots in tiers, under the keys of the prefix cache. The
scheduler orders what is looked up, loaded, stored and forgotten; see TierOrder in worker.proto. An
order is under way until its answer, and holds what it copies: blocks that are loaded belong to no
request and get their content with the answer, and blocks that are stored are not given away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, LedgerError

from .blocks import BlockPool
from .prefix import SnapshotCache


class Action(Enum):
    """Kinds of orders, by their names in the protocol."""

    LOOK_UP = auto()
    LOAD = auto()
    STORE = auto()
    FORGET = auto()


class BlockLine(NamedTuple):
    """A block in an order."""

    key: bytes
    group: int  # KV group
    id: int = 0  # none where nothing is copied
    drafted: bool = False  # of one that is stored: with the drafter's rows


class SnapshotLine(NamedTuple):
    """A snapshot in an order."""

    key: bytes
    num_blocks: int  # of its prefix
    id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order to the workers."""

    number: int
    action: Action
    blocks: tuple[BlockLine, ...] = ()
    snapshots: tuple[SnapshotLine, ...] = ()
    request_id: str = ""  # that waits for it
    timeout_s: float = 1.0  # for the answer
    held_blocks: tuple[int, ...] = ()  # besides those that are copied
    held_snapshots: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[list[int], list[int]]:
        """Return the blocks and the snapshots that it holds."""
        blocks = [line.id for line in self.blocks if line.id]
        snapshots = [line.id for line in self.snapshots if line.id]
        return [*blocks, *self.held_blocks], [*snapshots, *self.held_snapshots]


class Answer(NamedTuple):
    """Answer of all ranks to an order: what every one of them has done."""

    number: int
    blocks: BoolArray
    drafted: BoolArray
    snapshots: BoolArray

    @classmethod
    def nothing(cls, order: Order) -> Answer:
        """Return the answer of workers that have done nothing."""
        none = np.zeros(len(order.blocks), dtype=np.bool_)
        return cls(order.number, none, none, np.zeros(len(order.snapshots), dtype=np.bool_))


class Stage(Enum):
    """Stage of a request that waits: how far its question to the tiers has come."""

    ASKED = auto()
    FOUND = auto()  # what there is of its prefixes
    LOADING = auto()
    SETTLED = auto()  # there is nothing more to wait for


@dataclass(slots=True)
class Quest:
    """Search of one waiting request."""

    stage: Stage = Stage.ASKED
    blocks: frozenset[bytes] = frozenset()  # keys that the tiers have
    snapshots: frozenset[bytes] = frozenset()
    cached_len: int = 0  # tokens that it would have gone on from without what is loaded

    def loaded(self, num_cached: int) -> int:
        """Return how many of the tokens that a request goes on from the tiers had."""
        return max(num_cached - self.cached_len, 0)

    @property
    def waits(self) -> bool:
        return self.stage in (Stage.ASKED, Stage.LOADING)


@dataclass(slots=True)
class TierBooks:
    """Orders of an epoch."""

    unsent: list[Order] = field(default_factory=list)
    under_way: dict[int, Order] = field(default_factory=dict)
    quests: dict[str, Quest] = field(default_factory=dict)  # by request id
    _count: int = 0

    def order(self, action: Action, **what: object) -> Order:
        """Enter an order, to be sent. What it names must be held already."""
        self._count += 1
        order = Order(number=self._count, action=action, **what)  # type: ignore[arg-type]
        self.under_way[order.number] = order
        self.unsent.append(order)
        return order

    def take_unsent(self) -> list[Order]:
        """Return the orders since the last call."""
        unsent, self.unsent = self.unsent, []
        return unsent

    def answered(self, number: int) -> Order:
        """Return the order with this answer, which is over. Raises LedgerError if there is none."""
        if number not in self.under_way:
            raise LedgerError(f"order {number} to the tiers is answered, but not under way")
        return self.under_way.pop(number)

    def waits(self, request_id: str) -> bool:
        """Return whether a request waits for an answer."""
        quest = self.quests.get(request_id)
        return quest is not None and quest.waits

    def num_under_way(self, action: Action) -> int:
        """Count the orders of a kind."""
        return sum(order.action is action for order in self.under_way.values())

    @property
    def loading(self) -> frozenset[bytes]:
        """Keys of blocks that are being loaded."""
        loads = (order for order in self.under_way.values() if order.action is Action.LOAD)
        return frozenset(line.key for order in loads for line in order.blocks)

    @property
    def held(self) -> Iterator[tuple[list[int], list[int]]]:
        """Blocks and snapshots that each order holds."""
        return (order.held for order in self.under_way.values())

    @property
    def num_held(self) -> int:
        """Blocks that come back with answers."""
        return sum(len(blocks) for blocks, _ in self.held)

    def drop(self, pool: BlockPool, snapshots: SnapshotCache) -> None:
        """End all orders unanswered: the epoch is over, and workers copy nothing of it any more."""
        for order in list(self.under_way.values()):
            release(order, pool, snapshots)
        self.under_way.clear()
        self.unsent.clear()
        self.quests.clear()


def release(order: Order, pool: BlockPool, snapshots: SnapshotCache) -> None:
    """Give back what an order has held."""
    blocks, ids = order.held
    pool.release(blocks)
    snapshots.release(ids)


class Known(NamedTuple):
    """Blocks of the pool, and those that tiers have."""

    pool: BlockPool
    keys: frozenset[bytes]

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this content, 0 for one that is to be loaded."""
        found = self.pool.lookup(key)
        return 0 if found is None and key in self.keys else found

    def leading(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks with these contents, up to the first that is missing."""
        found = list[int]()
        for key in keys:
            block = self.lookup(key)
            if block is None:
                break
            found.append(block)
        return found
