"""The supervisors: they end hung ranks and say where the ranks are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from surestep_common.errors import SurestepError, Unavailable
from surestep_common.fan_out import send_to_all
from surestep_common.releases import name_of
from surestep_common.rpc import connect, translate_errors
from surestep_proto import supervisor_pb2 as pb
from surestep_proto.supervisor_pb2_grpc import SupervisorStub

logger = logging.getLogger(__name__)

_ROLL_BACK_S = 20.0  # for a rank that runs to end
_WATCH_MS, _WATCH_TIMEOUT_S = 200, 1.0
_STATUS = pb.SupervisorStatusRequest()  # without watching
_BY_WORK = (pb.AWAITING_COMPILER, pb.WAITING, pb.ACTIVITY_UNKNOWN, pb.RUNNING, pb.AT_REST)


class Supervisors:
    """Channels to the supervisor of each rank; may be empty."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [connect(address) for address in addresses]
        self._stubs: list[Any] = [
            SupervisorStub(channel)  # generated
            for channel in self._channels
        ]
        self._rank = {stub: index for index, stub in enumerate(self._stubs)}  # as they say

    @property
    def exist(self) -> bool:
        """Return whether anyone could start ranks again."""
        return bool(self._stubs)

    async def statuses(self, timeout_s: float) -> list[pb.SupervisorStatus]:
        """Status of those that answer in time, in rank order."""
        answers = await asyncio.gather(*(self._status(stub, timeout_s) for stub in self._stubs))
        return sorted((a for a in answers if a is not None), key=lambda status: status.rank)

    async def _status(
        self, stub: Any, timeout_s: float, request: pb.SupervisorStatusRequest = _STATUS
    ) -> pb.SupervisorStatus | None:
        try:
            with translate_errors():
                status = await stub.Status(request, timeout=timeout_s)
        except SurestepError as error:
            logger.debug("a supervisor does not answer: %s", error)
            return None
        self._rank[stub] = status.rank
        return cast(pb.SupervisorStatus, status)

    async def activity(self) -> pb.Activity:
        """Watch what the ranks do: what the busiest does, since the others may wait for it."""
        request = pb.SupervisorStatusRequest(watch_ms=_WATCH_MS)
        answers = await asyncio.gather(
            *(self._status(stub, _WATCH_TIMEOUT_S, request) for stub in self._stubs)
        )
        doing = [pb.ACTIVITY_UNKNOWN if a is None else a.activity for a in answers]
        return next((d for d in _BY_WORK if d in doing), pb.ACTIVITY_UNKNOWN)

    def check_ready(self, statuses: Sequence[pb.SupervisorStatus]) -> None:
        """Raise Unavailable unless every supervisor has answered, and every rank is ready."""
        if len(statuses) < len(self._stubs):
            raise Unavailable(f"{len(statuses)} of {len(self._stubs)} supervisors answer")
        for status in statuses:
            if status.rank_state != pb.READY:
                state = name_of(pb.RankState, status.rank_state).lower()
                why = f": {status.failure}" if status.failure else ""
                raise Unavailable(f"rank {status.rank} is {state}{why}")

    async def restart(self, reason: str, pids: Sequence[int], timeout_s: float) -> None:
        """Have every rank process of a lost epoch replaced, all at once; failures are logged.

        `pids` are in rank order. Returns when the processes are gone; those that were dead already
        take no time.
        """
        requests = [pb.RestartRequest(reason=reason, expected_pid=pid) for pid in pids]
        stubs = sorted(self._stubs, key=self._rank.__getitem__)
        await asyncio.gather(*map(self._restart, stubs, requests, [timeout_s] * len(pids)))

    async def _restart(self, stub: Any, request: pb.RestartRequest, timeout_s: float) -> None:
        try:
            with translate_errors():
                await stub.Restart(request, timeout=timeout_s)
        except SurestepError as error:
            logger.warning("supervisor could not restart pid %d: %s", request.expected_pid, error)

    async def sleep(self, level: int, timeout_s: float) -> int:
        """End every rank, and have none started; return the bytes of weights that are held.

        Raises a SurestepError unless all supervisors have done so.
        """
        request = pb.SleepRequest(level=level)
        with translate_errors():
            answers = await asyncio.gather(
                *(stub.Sleep(request, timeout=timeout_s) for stub in self._stubs)
            )
        return sum(answer.held_weight_bytes for answer in answers)

    async def wake(self, timeout_s: float) -> None:
        """Have ranks started again. Raises a SurestepError unless all supervisors do so."""
        with translate_errors():
            await asyncio.gather(
                *(stub.Wake(pb.WakeRequest(), timeout=timeout_s) for stub in self._stubs)
            )

    async def stage_weights(self, parts: AsyncIterator[pb.WeightPart]) -> pb.StagedWeights:
        """Pass weights on to every supervisor. Raises a SurestepError unless all take them."""
        staged = await send_to_all([stub.StageWeights() for stub in self._stubs], parts)
        if len({one.digest for one in staged}) > 1:
            raise Unavailable("the ranks have taken in different weights")
        return cast(pb.StagedWeights, staged[0])

    async def use_weights(self, version: str, timeout_s: float) -> None:
        """Have all ranks, which sleep, come back with what was staged. Raises a SurestepError."""
        request = pb.UseWeightsRequest(version=version)
        with translate_errors():
            await asyncio.gather(
                *(stub.UseWeights(request, timeout=timeout_s) for stub in self._stubs)
            )

    async def settle_weights(self, timeout_s: float) -> None:
        """Have all give up the weights of before. Who does not hear it is told again."""
        request = pb.SettleWeightsRequest()
        await asyncio.gather(
            *(stub.SettleWeights(request, timeout=timeout_s) for stub in self._stubs),
            return_exceptions=True,
        )

    async def roll_back_weights(self, timeout_s: float) -> None:
        """Have all ranks that can come back with the weights of before."""
        request = pb.RollBackWeightsRequest()
        answers = await asyncio.gather(
            *(stub.RollBackWeights(request, timeout=timeout_s) for stub in self._stubs),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.info("a rank has no other weights to go back to: %s", answer)

    async def agree(self, statuses: Sequence[pb.SupervisorStatus], *, ordered: bool) -> bool:
        """Have all ranks go back to the weights of before if they differ, unless this was ordered.

        A scheduler before this one has ended in an update then. Return whether they can go back.
        """
        versions = sorted({status.weight_version for status in statuses})
        unsettled = any(status.weights_unsettled for status in statuses)
        if unsettled and not ordered and len(versions) > 1:
            logger.warning("an update was not finished, and is undone: %s", ", ".join(versions))
            await self.roll_back_weights(_ROLL_BACK_S)
        return unsettled

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close(None)
