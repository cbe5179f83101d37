"""Operations on a running engine, for operators: new workers, pauses, sleep, adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from surestep_common.errors import DeadlineExceeded, Unavailable
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import worker_pb2

from surestep_scheduler.core.sequence import Adapter

from . import updates
from .adapters import InUse, PlacesTaken
from .engine import Engine, shutting_down
from .incidents import OperatorRestart
from .pauses import RETRY_AFTER_S, Slept

_POLL_S = 0.02
_SWEEP_S = 0.1  # between two looks whether requests with an adapter have ended


async def restart_workers(engine: Engine, reason: str) -> int:
    """Replace all ranks; open requests go on. Returns the epoch that was ended for it.

    Raises Unavailable when the workers are not there, or no supervisor could bring them back.
    """
    _check_supervised(engine)
    epoch = engine.epoch
    if not engine.interrupt(OperatorRestart(reason or "an operator asked for new workers")):
        raise Unavailable("the workers are being replaced", retry_after=RETRY_AFTER_S)
    await engine.pauses.until(lambda: engine.epoch > epoch, _POLL_S)
    return epoch


async def pause(
    engine: Engine,
    level: int,
    mode: pb.PauseMode,
    tags: Sequence[str],
    *,
    clear_cache: bool = False,
) -> int:
    """Stop planning and, from level 1 on, end the workers; return the number of aborted requests.

    Workers come again when the parts called `tags` were woken, or all. A caller that does not wait
    for the pause has asked for nothing. `clear_cache`: what comes later finds no prefix of before
    in the workers' blocks. Raises InvalidRequest, and Unavailable where no supervisor could bring
    workers back.
    """
    if level:
        _check_supervised(engine)
    pauses, first = engine.pauses, engine.pauses.info is None
    pauses.begin(level, mode, tags)
    try:
        await engine.tell_state()
        if mode == pb.PAUSE_WAIT and not pauses.stopping:
            await pauses.until(lambda: not (pauses.info and _has_requests(engine)), _POLL_S)
        if pauses.info is None:  # its end was asked for meanwhile
            return 0
        pauses.stopping = True
        num_aborted = engine.abort(()) if mode == pb.PAUSE_ABORT else 0
        if pauses.level:
            engine.interrupt(Slept(pauses.words))
        pauses.announce()
        await pauses.until(lambda: _stopped(engine), _POLL_S)
        if clear_cache and engine.state is not None:
            engine.state.clear_prefix_cache()
    except asyncio.CancelledError:
        if first:
            pauses.wake(())
            await engine.tell_state()
        raise
    return num_aborted


def _has_requests(engine: Engine) -> bool:
    return bool(engine.state and engine.state.asked_for)


def _stopped(engine: Engine) -> bool:
    pauses = engine.pauses
    if not pauses.level:
        return not (engine.state and engine.state.in_flight)
    return pauses.slept_level >= pauses.level or not pauses.stops_workers


async def resume(engine: Engine, tags: Iterable[str]) -> Sequence[str]:
    """Wake parts of a sleeping engine, or all; return those that still sleep, or none when it
    serves again. Raises InvalidRequest.
    """
    asleep = engine.pauses.wake(tags)
    if not asleep:
        await engine.tell_state()
        await updates.workers_back(engine)
    return asleep


async def load_adapter(engine: Engine, request: pb.LoadAdapterRequest) -> worker_pb2.Adapter:
    """Load an adapter, in a place that nothing needs any more. Raises as Adapters.load does."""
    await _sweep(engine)
    return await engine.adapters.load(
        engine.group,
        request.name,
        request.path,
        _in_use(engine),
        in_place=request.in_place,
        digest=request.digest,
    )


async def find_adapter(
    engine: Engine, name: str, tenant: str, deadline: float | None
) -> Adapter | None:
    """Return the adapter that a tenant's request names, as soon as it has a place.

    Raises as Adapters.resolve does, PlacesTaken where too many requests wait for a place, and
    DeadlineExceeded at that time of the engine's clock.
    """
    try:
        return await engine.adapters.resolve(engine.group, name, _in_use(engine))
    except PlacesTaken:
        engine.adapters.check_line(tenant, engine.limits.max_queue_len)
    left_s = None if deadline is None else deadline - engine.clock()
    try:
        async with asyncio.timeout(left_s):
            return await _wait_for_place(engine, name, tenant)
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline has passed") from None


async def _wait_for_place(engine: Engine, name: str, tenant: str) -> Adapter | None:
    """Wait until a place is idle; ranks that are being replaced will have one again."""
    with engine.adapters.waiting(name, tenant) as ticket:
        while True:
            await engine.adapters.turn(ticket, _SWEEP_S)
            if engine.engine_state == pb.DRAINING:
                raise shutting_down()
            if engine.group is not None:
                with contextlib.suppress(PlacesTaken):
                    return await engine.adapters.resolve(engine.group, name, _in_use(engine))


def _in_use(engine: Engine) -> InUse:
    return engine.state.uses if engine.state is not None else lambda adapter: False


async def sweep_adapters(engine: Engine) -> None:
    """Free the places of adapters that were given up, as soon as no request has them."""
    while engine.adapters.leaving:
        await _sweep(engine)
        await engine.pauses.change(_SWEEP_S)


async def _sweep(engine: Engine) -> None:
    if engine.state is not None:
        await engine.adapters.sweep(engine.group, engine.state.uses)


def _check_supervised(engine: Engine) -> None:
    if not engine.supervisors.exist:
        raise Unavailable("no supervisor is known that could start workers again")
