"""Updates of the weights: staged beside the steps, then served from a new epoch on.

All ranks serve them, or none: where one cannot, the weights of before are served again, and the
update has failed. While weights change the engine sleeps.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import supervisor_pb2

from . import operations
from .engine import Engine
from .pauses import RETRY_AFTER_S

_VERSION = re.compile(r"[!-~]{1,128}")  # it becomes an HTTP header
_THERE = (pb.SERVING, pb.DRAINING, pb.PAUSED)
_POLL_S = 0.02
_LOOK_S = 0.2  # between two looks whether ranks fail to start
_QUESTION_S = 2.0
_USE_S = 120.0  # for a supervisor to put parts together, which are in memory
_ATTEMPTS = 3  # of a rank to start with other weights


async def stage(
    engine: Engine, parts: AsyncIterator[supervisor_pb2.WeightPart]
) -> supervisor_pb2.StagedWeights:
    """Take in weights on every rank. Raises InvalidRequest, and Unavailable during an update."""
    _check_alone(engine)
    if not engine.supervisors.exist:
        raise Unavailable("no supervisor is known that could hold other weights")
    return await engine.supervisors.stage_weights(parts)


async def update_weights(
    engine: Engine, request: pb.UpdateWeightsRequest
) -> pb.UpdateWeightsResponse:
    """Serve what was staged. Raises InvalidRequest, and Unavailable during another update."""
    version, mode = request.version, request.mode or pb.PAUSE_ABORT
    if not _VERSION.fullmatch(version):
        message = "a version of weights is named by 1 to 128 visible characters of ASCII"
        raise InvalidRequest(message, param="weight_version")
    if engine.infos and engine.infos[0].weight_version == version:
        message = f"weights of version '{version}' are served already: name these otherwise"
        raise InvalidRequest(message, param="weight_version")
    _check_alone(engine)
    engine.updating = True
    try:
        return await _update(engine, version, mode)
    finally:
        engine.updating = False


def _check_alone(engine: Engine) -> None:
    if engine.updating or engine.next_version is not None:
        raise Unavailable("other weights are on their way", retry_after=RETRY_AFTER_S)


async def _update(engine: Engine, version: str, mode: pb.PauseMode) -> pb.UpdateWeightsResponse:
    before, model = engine.pauses.info, engine.model_fingerprint
    response = pb.UpdateWeightsResponse()
    if before is None and mode == pb.PAUSE_ABORT:
        response.num_aborted = engine.abort(())
        mode = pb.PAUSE_KEEP  # what comes meanwhile waits
    if not engine.pauses.level:
        await operations.pause(engine, 1, pb.PAUSE_KEEP if before is not None else mode, ())
    engine.next_version = version
    try:
        await engine.supervisors.use_weights(version, _USE_S)
    except SurestepError:
        await engine.supervisors.roll_back_weights(_QUESTION_S)
        engine.next_version = None
        await _restore(engine, before)
        raise
    if before is not None and before.level:
        return response
    kept = engine.state.asked_for if engine.state else ()
    response.num_kept = sum(len(seq.tokens) > seq.prompt_len for seq in kept)
    await _restore(engine, before)
    if engine.infos[0].weight_version != version:
        raise Unavailable(f"the ranks came back without the weights of version '{version}'")
    response.epoch = engine.epoch
    response.unchanged = _without_version(engine.model_fingerprint) == _without_version(model)
    response.check_drafts = engine.infos[0].check_drafts
    response.check_accepted = engine.infos[0].check_accepted
    return response


async def _restore(engine: Engine, before: pb.PauseInfo | None) -> None:
    """Return to what an operator had asked for before."""
    if before is not None and before.level:
        return
    engine.pauses.restore(before)
    await workers_back(engine)


async def workers_back(engine: Engine) -> None:
    """Return when there are workers again, or shall be none.

    Raises InvalidRequest where they cannot serve the weights that they were to come back with.
    """
    began = engine.clock()
    while engine.engine_state not in _THERE and not engine.pauses.stops_workers:
        await engine.pauses.change(_POLL_S)
        if engine.next_version is not None and engine.clock() - began > _LOOK_S:
            began = engine.clock()
            await _look(engine, engine.next_version)


async def _look(engine: Engine, version: str) -> None:
    """Go back to the weights of before if ranks fail with those of this version."""
    fault = ""
    for status in await engine.supervisors.statuses(_QUESTION_S):
        others = status.weight_version != version
        if others or status.failure_is_permanent or status.num_failures >= _ATTEMPTS:
            fault = f"rank {status.rank}: {status.failure or 'its supervisor was replaced'}"
    if not fault:
        return
    engine.next_version = None
    await engine.supervisors.roll_back_weights(_USE_S)
    await workers_back(engine)
    message = f"version '{version}' cannot be served, and the one before is again: {fault}"
    raise InvalidRequest(message, param="weights")


def _without_version(fingerprint: str) -> str:
    return fingerprint.partition("@")[0]
