"""The gRPC client of one scheduler, and the scheduler's state as far as it is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from surestep_common import addresses
from surestep_common.access import Metadata
from surestep_common.errors import ConnectionLost, DeadlineExceeded, SurestepError
from surestep_common.rpc import connect, translate_errors
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import scheduler_pb2_grpc
from surestep_proto.worker_pb2 import Adapter

from surestep_gateway.schedulers.generate_call import RETRY_S, DeliveryStream, GenerateCall
from surestep_gateway.schedulers.history import History
from surestep_gateway.schedulers.losses import CircuitBreaker

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name
GENERATE = f"{SERVICE}/Generate"
RETRY_AFTER_S = 1.0  # for clients, without a better estimate
_QUERY_TIMEOUT_S = 2.0
_LOAD_S = 60.0  # for ranks to read an adapter
_PROBE_S = 1.0  # between two probes, and for the answer to one
_PROBES = 2  # missed in a row: silent
_HELPLESS_S = 10.0  # without workers; most are replaced in less


class _Loss(NamedTuple):
    """The calls, by number, that were open when the scheduler was lost."""

    upto: int  # the latest of them
    silent: frozenset[int]  # without tokens


class SchedulerClient:
    """Channel to a scheduler, its open calls, and whether the scheduler serves.

    `run` must be running. `on_change` is called whenever the scheduler may have become able to
    accept requests.
    """

    def __init__(
        self, address: str, on_change: Callable[[], None], number: int = 0, *, proven: bool = True
    ) -> None:
        self.address = address
        self.number = number  # among those of its model
        self.proven = proven  # it is one of ours: it was named, or serves their model
        self.leaving = False  # no list names it any more
        self.host_and_port = addresses.split(address)  # for spans
        self.breaker = CircuitBreaker()
        self.serving = False  # by its health service
        self.silent = False  # it is connected and does not answer
        self.is_new = False  # it serves since lately: it may lack adapters that the others have
        self.info: pb.SchedulerInfo | None = None  # None before it served for the first time
        self.trouble = ""  # its reason for not serving; empty while it serves
        self._helpless_since: float | None = None  # by time.monotonic(); None while it has workers
        self.drained_at = -math.inf  # when it was last known to drain, by time.monotonic()
        self.stats = pb.SchedulerStats()  # of its last reply
        self.history = History()
        self._on_change = on_change
        self._tasks = asyncio.TaskGroup()
        self._calls: dict[int, GenerateCall] = {}  # open ones by number
        self._others = 0  # requests it had, besides ours, when it was asked last
        self._questions = 0  # open calls besides those of Generate
        self.closed = False  # no call begins any more
        self._missed = 0  # probes without an answer, in a row
        self._loss = _Loss(0, frozenset())  # the latest
        self._channel = connect(address)
        self._stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self.delivery = DeliveryStream(self._stub, self._deliver, self._lose_delivered)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._watching: grpc.aio.UnaryStreamCall[Any, Any] | None = None

    async def run(self) -> None:
        """Follow the scheduler's health until cancelled."""
        async with self._tasks as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._probe())
            tasks.create_task(self.delivery.run())

    async def close(self) -> None:
        """Close the channel, which cancels open calls."""
        self.closed = True
        await self._channel.close(None)

    @property
    def idle(self) -> bool:
        """Return whether no call is open."""
        return not self._calls and not self._questions

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        """Make a call, which counts as open, and return its answer. Raise SurestepError."""
        self._check_open()
        self._questions += 1
        try:
            with translate_errors():
                return await method(request, timeout=timeout_s)
        finally:
            self._answered()

    def _answered(self, call: Any = None) -> None:
        self._questions -= 1

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionLost(f"scheduler {self.address} has left")

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent, as far as known. `now` is time.monotonic()."""
        return self.serving and not self.silent and self.breaker.admits(now)

    @property
    def model(self) -> str | None:
        """Fingerprint of the model that it serves; None before it has said so."""
        return None if self.info is None else self.info.model_fingerprint

    def may_have(self, model: str) -> bool:
        """Return whether it may serve the model of this fingerprint; an empty one matches any
        model.
        """
        return not model or self.model in (None, "", model)

    @property
    def full(self) -> bool:
        """Return whether its queue had no room when it was asked last."""
        most = self.info.max_queue_len if self.info is not None else 0
        return 0 < most <= self.stats.num_waiting

    def stalled(self, limit_s: float) -> bool:
        """Return whether it runs requests and has emitted no token for longer than `limit_s`."""
        return self.stats.num_running > 0 and self.stats.last_token_age_s > limit_s

    @property
    def load(self) -> int:
        """Approximate number of requests that the scheduler runs or has waiting."""
        return len(self._calls) + self._others

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await self._watch_once()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError
            self._set_serving(False)
            await asyncio.sleep(RETRY_S)

    async def _watch_once(self) -> None:
        self._watching = self._health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for reply in self._watching:
            self.heard()
            serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            await self.learn()
            self._set_serving(serving)

    async def learn(self) -> None:
        """Update the facts of the served model, or the reason why none is served."""
        try:
            info = await self._ask(self._stub.Info, pb.SchedulerInfoRequest(), _QUERY_TIMEOUT_S)
        except (ConnectionLost, DeadlineExceeded):
            self.trouble = f"no answer from scheduler {self.address}"
            return
        except SurestepError as error:
            self.trouble = error.message
            with contextlib.suppress(SurestepError):
                self._note(await self.query_stats())  # an operator may have stopped it
            since = self._helpless_since or time.monotonic()
            self._helpless_since = None if self.paused else since
            return
        self._helpless_since = None
        before = self.info.weight_version if self.info is not None else info.weight_version
        if info.weight_version != before:
            logger.info("scheduler %s serves weights '%s'", self.address, info.weight_version)
        elif not self.may_have(info.model_fingerprint):
            logger.warning(
                "scheduler %s serves another model now; tokenizer and chat template here are those "
                "of the model before, until the gateway is started again",
                self.address,
            )
        self.info, self.trouble = info, ""
        if info.draining:
            self.trouble = f"scheduler {self.address} is shutting down"
            self.drained_at = time.monotonic()

    def _set_serving(self, serving: bool) -> None:
        if serving != self.serving:
            logger.info("scheduler %s %s", self.address, "serves" if serving else "does not serve")
            self.is_new = serving
        self.serving = serving
        self._on_change()

    def recheck(self) -> None:
        """Assume after a failed call that it does not serve, until its health says otherwise."""
        if self.serving and self._watching is not None:
            self._set_serving(False)
            self._watching.cancel()

    async def _probe(self) -> None:
        """Query the load every second, which also detects a process that hangs or is stopped.

        Calls that break need no probe, but connections stay up while the process behind them hangs.
        """
        while True:
            try:
                stats = await self.query_stats(_PROBE_S)
            except DeadlineExceeded:
                self.history.missed(time.monotonic())
                self._missed += 1
                if self._missed >= _PROBES and not self.silent:
                    self._fall_silent()
            except SurestepError:
                self.history.missed(time.monotonic())  # not connected, or an error
            else:
                self.history.add(stats, time.monotonic())
                self._note(stats)
                self.heard()
            if not self.serving or self.info is None or self._has_other_adapters:
                await self.learn()
                self._on_change()
            await asyncio.sleep(_PROBE_S)

    def _note(self, stats: pb.SchedulerStats) -> None:
        self.stats = stats
        self._others = max(0, stats.num_running + stats.num_waiting - len(self._calls))

    @property
    def _has_other_adapters(self) -> bool:
        """Return whether adapters were loaded or unloaded since its facts were learnt."""
        served = {(one.name, one.digest) for one in self.stats.adapters if not one.leaving}
        return {(one.name, one.digest) for one in self.adapters} != served

    @property
    def paused(self) -> bool:
        """Return whether an operator has stopped it: requests wait, and nothing is wrong."""
        return self.stats.HasField("pause")

    @property
    def asleep(self) -> bool:
        """Return whether its workers sleep, and requests may wait for them."""
        return self.paused and self.stats.pause.level > 0 and not self.refuses

    async def look(self) -> None:
        """Renew what is known of its load and of pauses. Raise SurestepError."""
        self._note(await self.query_stats())
        self._on_change()

    @property
    def refuses(self) -> bool:
        """Return whether requests are not to wait for the end of a pause."""
        return self.paused and self.stats.pause.mode == pb.PAUSE_ABORT

    def _fall_silent(self) -> None:
        self.silent = True
        self._lose_all(ConnectionLost("the scheduler does not answer"))

    def is_helpless(self, now: float) -> bool:
        """Return whether requests have long waited for its workers. `now` is time.monotonic()."""
        since = self._helpless_since if self._calls else None
        return since is not None and now - since > _HELPLESS_S

    def hand_over(self) -> None:
        """Have its requests go on elsewhere, as it has no workers."""
        self._helpless_since = time.monotonic()
        self._lose_all(ConnectionLost("the scheduler has no workers"))

    def _lose_all(self, loss: ConnectionLost) -> None:
        what = len(self._calls), self.address, loss.message
        logger.warning("%d requests at %s go on elsewhere or when it is back: %s", *what)
        for call in self._calls.values():
            call.fail(ConnectionLost(loss.message))  # one each: they are raised

    def heard(self) -> None:
        """Record that the scheduler has sent something."""
        self._missed = 0
        if self.silent:
            self.silent = False
            logger.info("scheduler %s answers again", self.address)
            self._on_change()

    @contextlib.contextmanager
    def generate(
        self, request: pb.GenerateRequest, timeout_s: float, metadata: Metadata = ()
    ) -> Iterator[GenerateCall]:
        """Open a call of Generate; leaving the block aborts it unless it is over."""
        self._check_open()
        number = self.breaker.begin(time.monotonic())
        delivery = self.delivery.of(number)
        # Log-probabilities of a prompt are megabytes, which the tokens of others would wait for.
        if delivery is not None and not request.sampling.want_prompt_logprobs:
            request.delivery.CopyFrom(delivery)
        stream = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        delivered = request.HasField("delivery")
        call = GenerateCall(self, stream, number, self._tasks, delivered=delivered)
        self._calls[number] = call
        try:
            yield call
        finally:
            del self._calls[number]
            call.close()
            self._on_change()  # a half-open breaker may admit the next

    def _deliver(self, batch: pb.ChunkBatch) -> None:
        """Hand the chunks of a step to their calls; some may have been closed meanwhile."""
        self.heard()
        for number, chunk in zip(batch.calls, batch.chunks, strict=True):
            call = self._calls.get(number)
            if call is not None:
                call.put(chunk)

    def _lose_delivered(self, error: ConnectionLost) -> None:
        for call in self._calls.values():
            if call.delivered:
                call.fail(error)

    def is_lost_alone(self, lost: GenerateCall) -> bool:
        """Return whether a call was the only one without tokens at the loss that ended it."""
        if lost.number > self._loss.upto:  # the first that hears of another loss
            silent = (number for number, call in self._calls.items() if not call.has_tokens)
            self._loss = _Loss(max(self._calls), frozenset(silent))
        return self._loss.silent <= {lost.number}

    async def query_stats(self, timeout_s: float = _QUERY_TIMEOUT_S) -> pb.SchedulerStats:
        """Return counters and gauges. Raise SurestepError when the scheduler does not respond."""
        stats: pb.SchedulerStats = await self._ask(self._stub.Stats, pb.StatsRequest(), timeout_s)
        return stats

    async def query_status(self, num_steps: int = 0) -> pb.SchedulerStatus:
        """Return its processes, and at most `num_steps` latest steps. Raise SurestepError."""
        request = pb.SchedulerStatusRequest(num_steps=num_steps)
        status: pb.SchedulerStatus = await self._ask(self._stub.Status, request, _QUERY_TIMEOUT_S)
        return status

    async def restart_workers(self, reason: str, timeout_s: float) -> pb.RestartWorkersResponse:
        """Have every rank replaced. Raise SurestepError."""
        answer: pb.RestartWorkersResponse = await self._ask(
            self._stub.RestartWorkers, pb.RestartWorkersRequest(reason=reason), timeout_s
        )
        return answer

    async def pause(self, request: pb.PauseRequest, timeout_s: float) -> pb.PauseResponse:
        """Have it stop, and its workers from level 1 on. Raise SurestepError."""
        answer: pb.PauseResponse = await self._ask(self._stub.Pause, request, timeout_s)
        self._note(await self.query_stats())
        return answer

    async def resume(self, tags: Sequence[str], timeout_s: float) -> pb.ResumeResponse:
        """Have it go on, or wake parts of its workers. Raise SurestepError."""
        request = pb.ResumeRequest(tags=tags)
        answer: pb.ResumeResponse = await self._ask(self._stub.Resume, request, timeout_s)
        return answer

    def stage_weights(self) -> Any:
        """Open the call that takes parts of weights in, and is answered when all have come."""
        self._check_open()
        self._questions += 1
        call = self._stub.StageWeights()
        call.add_done_callback(self._answered)
        return call

    async def update_weights(
        self, version: str, mode: pb.PauseMode, timeout_s: float
    ) -> pb.UpdateWeightsResponse:
        """Have it serve what was staged. Raise SurestepError."""
        request = pb.UpdateWeightsRequest(version=version, mode=mode)
        call = self._stub.UpdateWeights
        answer: pb.UpdateWeightsResponse = await self._ask(call, request, timeout_s)
        return answer

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters that are loaded there."""
        return () if self.info is None else self.info.adapters

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> Adapter:
        """Have it load an adapter, which requests may name then. Raise SurestepError."""
        loaded: Adapter = await self._ask(self._stub.LoadAdapter, request, _LOAD_S)
        await self.learn()
        return loaded

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> None:
        """Have it answer no more requests with an adapter. Raise SurestepError."""
        await self._ask(self._stub.UnloadAdapter, request, _QUERY_TIMEOUT_S)
        await self.learn()

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Have it end requests, those named or all; return how many. Raise SurestepError."""
        request = pb.AbortRequest(request_ids=request_ids)
        answer = await self._ask(self._stub.Abort, request, _QUERY_TIMEOUT_S)
        return int(answer.num_aborted)
