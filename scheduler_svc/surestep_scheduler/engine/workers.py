"""The ranks, and two streams to each: of steps, and of orders to its tiers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from surestep_common.errors import (
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    SurestepError,
    Unavailable,
    kind_of_code,
)
from surestep_common.invariants import LedgerError
from surestep_common.rpc import connect, translate_errors
from surestep_common.tenants import cache_root
from surestep_proto import worker_pb2 as pb
from surestep_proto.sampling_pb2 import Grammar
from surestep_proto.worker_pb2_grpc import WorkerStub

from surestep_scheduler.cache.tiers import Answer, Order
from surestep_scheduler.core.messages import Outcome
from surestep_scheduler.core.sequence import Request

from .wire import from_proto, tier_answer, tier_order

_COMPILE_S = 35.0  # for a rank to compile a grammar; its own limit is shorter
_RECOMPILE_S = 15.0  # for those of open requests, before the first step
_MOST_COMPILED = 32  # of which a rank remembers more
_LOAD_S = 60.0  # for a rank to read an adapter
_TELL_S = 0.5  # for a rank to say what ended its stream
# In which ranks of a group must not differ.
_COMMON = (
    "weight_version",
    "model_fingerprint",
    "vocab_size",
    "max_model_len",
    "num_slots",
    "num_blocks",
    "block_size",
    "max_step_tokens",
    "max_draft_tokens",
    "max_forced_drafts",
    "num_snapshots",
    "prompt_chunk",
    "linear_backend",
    "max_loras",
    "max_lora_rank",
    "kv_windows",
    "tiers",
)


class WorkerGroup:
    """Channels to all ranks of a model. Made by `open`, closed by `close`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [connect(address) for address in addresses]
        self._stubs: list[Any] = [
            WorkerStub(channel)  # generated
            for channel in self._channels
        ]
        self._calls: list[Any] = []  # stub types know no aio calls
        self._epoch = 0
        self._compiled = OrderedDict[bytes, None]()  # grammars by owner, the latest last
        self._results: list[deque[pb.StepResult]] = [deque() for _ in addresses]
        self.tiers = TierStreams(self._stubs)

    async def infos(self, timeout_s: float) -> list[pb.WorkerInfo]:
        """Ask every rank for facts. Raises a SurestepError unless all are ready, in one group."""
        with translate_errors():
            infos = await asyncio.gather(
                *(stub.Info(pb.WorkerInfoRequest(), timeout=timeout_s) for stub in self._stubs)
            )
        for rank, info in enumerate(infos):
            if (info.rank, info.world_size) != (rank, len(infos)):
                raise Unavailable(
                    f"address {rank} of {len(infos)} is rank {info.rank} of {info.world_size}"
                )
        return list(infos)

    async def compile(self, grammar: Grammar) -> bool:
        """Have rank 0 compile a grammar, unless it did lately. Return False if the rank is lost.

        Raises InvalidRequest if the grammar is wrong or too costly, Unavailable if there is no time
        for it.
        """
        key = cache_root(grammar.owner, grammar.source)
        if key not in self._compiled:
            request = pb.CompileRequest(grammar=grammar)
            try:
                with translate_errors():
                    await self._stubs[0].Compile(request, timeout=_COMPILE_S)
            except (ConnectionLost, DeadlineExceeded):
                return False
        self._compiled[key] = None
        self._compiled.move_to_end(key)
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return True

    async def load_adapter(
        self, wanted: pb.Adapter, ranks: Sequence[int] | None = None
    ) -> pb.Adapter:
        """Load an adapter on these ranks, or all; return it as each has it. Raises what the first
        rank that fails does: then none of them has it."""
        calls = (_answer(stub.LoadAdapter(wanted, timeout=_LOAD_S)) for stub in self._of(ranks))
        told = await asyncio.gather(*calls, return_exceptions=True)
        failed = [one for one in told if isinstance(one, BaseException)]
        loaded = [one for one in told if isinstance(one, pb.Adapter)]
        if not failed and any(one != loaded[0] for one in loaded):
            failed = [InvalidRequest("the ranks find different adapters", param="lora_path")]
        if failed:
            await self.unload_adapter(wanted, ranks)
            raise failed[0]
        return loaded[0]

    async def check_adapter(self, wanted: pb.Adapter) -> None:
        """Raise what the first rank does that could not load an adapter; nothing is touched."""
        request = pb.Adapter(path=wanted.path, only_check=True)
        await asyncio.gather(
            *(_answer(stub.LoadAdapter(request, timeout=_LOAD_S)) for stub in self._stubs)
        )

    async def unload_adapter(self, adapter: pb.Adapter, ranks: Sequence[int] | None = None) -> None:
        """Have these ranks, or all, forget an adapter; those that are gone have none."""
        calls = (_answer(stub.UnloadAdapter(adapter, timeout=_LOAD_S)) for stub in self._of(ranks))
        await asyncio.gather(*calls, return_exceptions=True)

    def _of(self, ranks: Sequence[int] | None) -> Sequence[Any]:
        """Return the stubs of these ranks, or all."""
        return self._stubs if ranks is None else [self._stubs[rank] for rank in ranks]

    async def recompile(self, requests: Iterable[Request]) -> None:
        """Compile the grammars of requests that go on, before steps would have to wait for them.

        Those that cannot be compiled any more end their requests in a step.
        """
        guided = [request for request in requests if request.has_grammar]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RECOMPILE_S):
                await asyncio.gather(
                    *(self.compile(request.sampling.grammar) for request in guided),
                    return_exceptions=True,
                )

    def start(self, tasks: asyncio.TaskGroup, wake: Callable[[], None], epoch: int) -> None:
        """Open the step streams. The task group fails when one is lost; results call `wake`."""
        self._epoch = epoch
        self._calls = [_run(channel) for channel in self._channels]
        for rank in range(len(self._calls)):
            tasks.create_task(self._read(rank, wake), name=f"rank {rank}")

    async def _read(self, rank: int, wake: Callable[[], None]) -> None:
        try:
            with translate_errors():
                while isinstance(result := await self._calls[rank].read(), pb.StepResult):
                    self._results[rank].append(result)
                    wake()
        except SurestepError as error:
            told = await self._told(rank) if isinstance(error, ConnectionLost) else None
            known = type(told or error)(f"rank {rank}: {told or error}")
            known.rank = rank
            raise known from error
        raise Unavailable(f"rank {rank} closed its stream")

    async def _told(self, rank: int) -> SurestepError | None:
        """Ask a rank why it ended its stream; None if it does not say, or is gone.

        A write that fails hides the status of its stream.
        """
        ask = self._stubs[rank].Info(pb.WorkerInfoRequest(), timeout=_TELL_S)
        with contextlib.suppress(grpc.aio.AioRpcError):
            ended = (await ask).stream_error
            if ended.epoch == self._epoch:
                return kind_of_code(grpc.StatusCode[ended.code]).error(ended.message)
        return None

    async def send(self, plan: bytes, timeout_s: float) -> None:
        """Send a StepPlan to every rank. Raises DeadlineExceeded when one does not take it.

        When a stream is lost its reader raises why, not the write.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for call in self._calls:
                    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        await call.write(plan)
        except TimeoutError as error:
            raise DeadlineExceeded("a rank does not take plans") from error

    def take(self) -> list[Outcome]:
        """Return the outcomes of the steps that all ranks have answered."""
        outcomes = []
        while self.has_outcome:
            outcomes.append(from_proto([results.popleft() for results in self._results]))
        return outcomes

    @property
    def has_outcome(self) -> bool:
        """Return whether all ranks have answered the oldest step."""
        return all(self._results)

    @property
    def num_unread(self) -> int:
        """Results that were not taken."""
        return sum(map(len, self._results))

    async def close(self) -> None:
        """Cancel the streams and close the channels."""
        for call in self._calls:
            call.cancel()
        self.tiers.cancel()
        for channel in self._channels:
            await channel.close(None)


class TierStreams:
    """Orders to the tiers of all ranks, one stream to each, and their answers, of one epoch.

    Each rank has its share of every page: what one of them has not done, none has. Nothing here
    waits for a worker to take an order.
    """

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
            self._unwritten.put_nowait(tier_order(order, self._epoch, block_size))

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
        self._whole.append(tier_answer(order, [told.pop(number) for told in self._answers]))

    def take(self) -> list[Answer]:
        """Return the answers that all ranks have given."""
        answers = list(self._whole)
        self._whole.clear()
        return answers

    def cancel(self) -> None:
        """End the streams."""
        for call in self._calls:
            call.cancel()


def check_alike(infos: Sequence[pb.WorkerInfo]) -> None:
    """Raise Unavailable when ranks of one group have loaded or allocated different things."""
    first = infos[0]
    for info in infos[1:]:
        for field in _COMMON:
            here, there = getattr(first, field), getattr(info, field)
            if here != there:
                raise Unavailable(
                    f"rank {info.rank} ({info.model_path}) has another {field} than rank 0 "
                    f"({first.model_path}): {there}, not {here}"
                )


async def _answer(call: Any) -> Any:
    with translate_errors():
        return await call


def _run(channel: Any) -> Any:
    """A call of Run to which plans are written as bytes: a plan for all ranks is made once."""
    run = pb.DESCRIPTOR.services_by_name["Worker"].methods_by_name["Run"]
    name = f"/{run.containing_service.full_name}/{run.name}"
    return channel.stream_stream(name, response_deserializer=pb.StepResult.FromString)()
