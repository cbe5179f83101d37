"""Orders to the tiers of all ranks, one stream to each, and their answers.

Each rank has its share of every page: what one of them has not done, none has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import numpy as np
from surestep_common.errors import ConnectionLost, SurestepError, Unavailable
from surestep_common.invariants import BoolArray, LedgerError, as_bits, of_bits
from surestep_common.rpc import translate_errors
from surestep_proto import worker_pb2 as pb

from surestep_scheduler.cache.tiers import Action, Answer, Order


class TierStreams:
    """Streams of one epoch. Nothing here waits for a worker to take an order."""

    def __init__(self, stubs: Sequence[Any]) -> None:
        self._stubs = stubs
        self._epoch = 0
        self._calls: list[Any] = []
        self._orders = dict[int, Order]()  # under way
        self._answers: list[dict[int, pb.TierAnswer]] = [{} for _ in stubs]  # by rank
        self._unwritten: asyncio.Queue[pb.TierOrder] = asyncio.Queue()
        self._whole = deque[Answer]()

    def start(self, tasks: asyncio.TaskGroup, wake: Callable[[], None], epoch: int) -> None:
        """Open the streams. The task group fails when one is lost; answers call `wake`."""
        self._epoch = epoch
        self._calls = [stub.Move() for stub in self._stubs]
        for rank in range(len(self._calls)):
            tasks.create_task(self._read(rank, wake), name=f"tiers of rank {rank}")
        tasks.create_task(self._write(), name="orders to the tiers")

    def send(self, orders: Iterable[Order], block_size: int) -> None:
        """Send orders to every rank."""
        for order in orders:
            self._orders[order.number] = order
            self._unwritten.put_nowait(to_proto(order, self._epoch, block_size))

    async def _write(self) -> None:
        """Write orders as they come; a stream that is lost is noticed by its reader."""
        while True:
            order = await self._unwritten.get()
            for call in self._calls:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(order)

    async def _read(self, rank: int, wake: Callable[[], None]) -> None:
        try:
            with translate_errors():
                while isinstance(answer := await self._calls[rank].read(), pb.TierAnswer):
                    self._answers[rank][answer.number] = answer
                    if all(answer.number in told for told in self._answers):
                        self._complete(answer.number)
                        wake()
        except ConnectionLost:  # the stream of steps says why
            return
        except SurestepError as error:
            known = type(error)(f"rank {rank}: {error}")
            known.rank = rank
            raise known from error
        raise Unavailable(f"rank {rank} closed the stream of its tiers")

    def _complete(self, number: int) -> None:
        order = self._orders.pop(number, None)
        if order is None:
            raise LedgerError(f"order {number} to the tiers is answered, but not under way")
        self._whole.append(from_proto(order, [told.pop(number) for told in self._answers]))

    def take(self) -> list[Answer]:
        """Return the answers that all ranks have given."""
        answers = list(self._whole)
        self._whole.clear()
        return answers

    def cancel(self) -> None:
        """End the streams."""
        for call in self._calls:
            call.cancel()


def to_proto(order: Order, epoch: int, block_size: int) -> pb.TierOrder:
    """Return the message that every rank gets."""
    drafted = np.array([line.drafted for line in order.blocks], dtype=np.bool_)
    return pb.TierOrder(
        epoch=epoch,
        number=order.number,
        action=order.action.name,
        timeout_ms=round(1000 * order.timeout_s),
        keys=[line.key for line in order.blocks],
        groups=[line.group for line in order.blocks],
        blocks=[line.id for line in order.blocks if line.id],
        drafted=as_bits(drafted) if order.action is Action.STORE else b"",
        snapshot_keys=[line.key for line in order.snapshots],
        snapshot_lens=[line.num_blocks * block_size for line in order.snapshots],
        snapshot_ids=[line.id for line in order.snapshots if line.id],
    )


def from_proto(order: Order, answers: Sequence[pb.TierAnswer]) -> Answer:
    """Return what all ranks have done of an order. Raises LedgerError."""
    blocks, snapshots = len(order.blocks), len(order.snapshots)
    whole = _common([answer.blocks for answer in answers], blocks)
    drafted = _common([answer.drafted or bytes(-(-blocks // 8)) for answer in answers], blocks)
    taken = _common([answer.snapshots for answer in answers], snapshots)
    return Answer(order.number, whole, whole & drafted, taken)


def _common(told: Sequence[bytes], count: int) -> BoolArray:
    if any(len(bits) != -(-count // 8) for bits in told):
        raise LedgerError(f"a rank does not answer for {count} keys of the tiers")
    mask: BoolArray = np.logical_and.reduce([of_bits(bits, count) for bits in told])
    return mask
