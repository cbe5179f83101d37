"""Endpoints that change the weights: SGLang's and vLLM's names, tensors as safetensors files.

They exist where the operator has switched them on, and ask for the admin key. Nothing pickled is
read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from surestep_common.errors import (
    Cancelled,
    InvalidRequest,
    SurestepError,
    Unavailable,
    UnsupportedParameter,
)
from surestep_common.fan_out import send_to_all
from surestep_proto.supervisor_pb2 import StagedWeights, WeightPart

from surestep_gateway.apis.route import DescribedRoute, Description, Parameter
from surestep_gateway.context import Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.request.protocol import Body
from surestep_gateway.schedulers.scheduler_client import SchedulerClient

from .admin import Administrators
from .engine_control import MODES, one_of

_PART_BYTES = 1 << 20
_TIMEOUT_S = 3600.0  # for ranks to load what was staged
_SAFETENSORS = "application/octet-stream"
_FORMATS = (None, "auto", "safetensors")
_ERRORS = (400, 401, 404, 415, 503, 504)


class DiskBody(Body):
    """POST /update_weights_from_disk"""

    model_path: str
    weight_version: str | None = None
    mode: str | None = None
    abort_all_requests: bool = False
    load_format: str | None = None
    flush_cache: bool = True


class FinishBody(Body):
    """POST /finish_weight_update"""

    weight_version: str | None = None
    mode: str | None = None


_FROM_DISK = Description(
    summary="Serve the weights in a folder, or a safetensors file, that all workers see.",
    bodies=(DiskBody,),
    errors=_ERRORS,
)
_FROM_TENSOR = Description(
    summary="Serve the tensors in this safetensors file.",
    parameters=(
        Parameter("weight_version", {"type": "string"}),
        Parameter("mode", {"enum": [*MODES], "default": "wait"}),
    ),
    errors=_ERRORS,
)
_START = Description(summary="Begin an update in several parts.", errors=_ERRORS)
_PART = Description(summary="Take in the tensors of this safetensors file.", errors=_ERRORS)
_FINISH = Description(
    summary="Serve the tensors that came.",
    bodies=(FinishBody,),
    body_required=False,
    errors=_ERRORS,
)
_ENGINE = Description(
    summary="Refuse to receive weights over NCCL, and say how they come.", errors=_ERRORS
)
_INFO = Description(summary="Which weights are served.", errors=_ERRORS)


class WeightRoutes:
    """Handlers of one gateway. One update at a time."""

    def __init__(self, models: Models) -> None:
        self._enabled = models.first.settings.enable_weight_updates
        self._administrators = Administrators(models)
        self._turn = asyncio.Lock()
        self._digest: hashlib._Hash | None = None  # of all parts since an update was begun

    def routes(self) -> Iterator[RuledRoute]:
        if not self._enabled:
            return
        post = partial(DescribedRoute, "POST", access=Access.ADMINISTRATORS, counted=False)
        yield post("/update_weights_from_disk", self.from_disk, _FROM_DISK)
        yield post("/update_weights_from_tensor", self.from_tensor, _FROM_TENSOR, large=True)
        yield post("/start_weight_update", self.start, _START)
        yield post("/update_weights", self.add, _PART, large=True)
        yield post("/finish_weight_update", self.finish, _FINISH)
        yield post("/init_weight_transfer_engine", self.refuse_engine, _ENGINE)
        yield DescribedRoute(
            "GET", "/weight_info", self.info, _INFO, access=Access.ADMINISTRATORS, counted=False
        )

    async def refuse_engine(self, request: Request) -> Response:
        """POST /init_weight_transfer_engine"""
        self._administrators.check(request)
        raise UnsupportedParameter(
            "weights are not received over NCCL: send them as safetensors to "
            "/update_weights_from_tensor, or name a folder at /update_weights_from_disk"
        )

    async def from_disk(self, request: Request) -> Response:
        """POST /update_weights_from_disk"""
        body = await self._administrators.body(request, DiskBody)
        if body.load_format not in _FORMATS:
            message = (
                f"load_format '{body.load_format}' is not served: a folder with safetensors is"
            )
            raise UnsupportedParameter(message, param="load_format")
        if not body.flush_cache:
            message = "prefixes that other weights have computed are not kept"
            raise UnsupportedParameter(message, param="flush_cache")
        mode = body.mode or ("abort" if body.abort_all_requests else "wait")
        one_of(MODES, "mode", mode)

        async def parts() -> AsyncIterator[WeightPart]:
            yield WeightPart(first=True, path=body.model_path)

        async with self._turn:
            staged = await _stage(self._administrators.of_one_model(request), parts())
            return await self._serve(request, body.weight_version, mode, staged)

    async def from_tensor(self, request: Request) -> Response:
        """POST /update_weights_from_tensor"""
        query = request.query_params
        mode = query.get("mode", "wait")
        one_of(MODES, "mode", mode)
        if query.get("flush_cache", "true").lower() != "true":
            message = "an update in several parts begins with POST /start_weight_update"
            raise UnsupportedParameter(message, param="flush_cache")
        async with self._turn:
            self._digest = hashlib.sha256()
            staged = await self._add(request, first=True)
            return await self._serve(request, query.get("weight_version"), mode, staged)

    async def start(self, request: Request) -> Response:
        """POST /start_weight_update"""
        self._administrators.check(request)
        async with self._turn:
            self._digest = hashlib.sha256()
        return JsonResponse({"success": True})

    async def add(self, request: Request) -> Response:
        """POST /update_weights"""
        async with self._turn:
            self._administrators.check(request)
            first = self._begun().digest() == hashlib.sha256().digest()
            staged = await self._add(request, first=first)
            return JsonResponse({"success": True} | _shown(staged))

    def _begun(self) -> hashlib._Hash:
        """Return the digest of all parts so far. Raise InvalidRequest before the start."""
        if self._digest is None:
            raise InvalidRequest("no update was begun: POST /start_weight_update", param="weights")
        return self._digest

    async def finish(self, request: Request) -> Response:
        """POST /finish_weight_update"""
        body = await self._administrators.body(request, FinishBody)
        mode = body.mode or "wait"
        one_of(MODES, "mode", mode)
        async with self._turn:
            self._begun()
            return await self._serve(request, body.weight_version, mode, None)

    async def _add(self, request: Request, *, first: bool) -> StagedWeights:
        """Pass the body on as it comes. Raise SurestepError."""
        self._administrators.check(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _SAFETENSORS:
            message = f"weights come as a safetensors file, declared as {_SAFETENSORS}"
            raise InvalidRequest(message, param="content-type")

        digest = self._begun()

        async def parts() -> AsyncIterator[WeightPart]:
            starts = first
            async for piece in request.stream():
                digest.update(piece)
                for at in range(0, len(piece), _PART_BYTES):
                    yield WeightPart(first=starts, data=piece[at : at + _PART_BYTES])
                    starts = False

        try:
            staged = await _stage(self._administrators.of_one_model(request), parts())
        except ClientDisconnect:
            self._digest = None
            raise Cancelled("the client went away") from None
        except SurestepError:
            self._digest = None
            raise
        if staged.digest != digest.hexdigest():
            self._digest = None
            raise Unavailable("a supervisor was replaced and lacks parts: begin the update again")
        return staged

    async def _serve(
        self, request: Request, version: str | None, mode: str, staged: StagedWeights | None
    ) -> Response:
        """Have all schedulers serve what was staged; 503, with those that failed, unless all do."""
        self._digest = None
        name = version or _next(self._administrators.of_one_model(request))

        async def update(scheduler: SchedulerClient) -> dict[str, Any]:
            answer = await scheduler.update_weights(name, MODES[mode], _TIMEOUT_S)
            if answer.epoch:
                await scheduler.learn()
            return {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}

        done = await self._administrators.at_each(request, update)
        shown: dict[str, Any] = {
            "success": not done.failures,
            "message": f"version '{name}'",
            "weight_version": name,
            "num_paused_requests": sum(one.get("num_kept", 0) for one in done.told),
            "schedulers": done.told,
        }
        return done.response(shown | ({} if done.failures else _shown(staged)))

    async def info(self, request: Request) -> Response:
        """GET /weight_info"""
        self._administrators.check(request)
        known = [
            {
                "scheduler": scheduler.address,
                "weight_version": scheduler.info.weight_version,
                "model_fingerprint": scheduler.info.model_fingerprint,
                "model_path": scheduler.info.model_path,
            }
            for scheduler in self._administrators.of_one_model(request)
            if scheduler.info is not None
        ]
        versions = {one["weight_version"] for one in known}
        version = versions.pop() if len(versions) == 1 else None
        return JsonResponse({"weight_version": version, "schedulers": known})


async def _stage(
    schedulers: Sequence[SchedulerClient], parts: AsyncIterator[WeightPart]
) -> StagedWeights:
    """Pass parts on to every scheduler. Raise SurestepError unless all take them."""
    staged: list[StagedWeights] = await send_to_all(
        [scheduler.stage_weights() for scheduler in schedulers], parts
    )
    return staged[0]


def _next(schedulers: Sequence[SchedulerClient]) -> str:
    """Return a name for weights without one: the number behind that of those before."""
    known = [one.info.weight_version for one in schedulers if one.info is not None]
    numbers = [int(version) for version in known if version.isascii() and version.isdigit()]
    return str(max(numbers, default=0) + 1)


def _shown(staged: StagedWeights | None) -> dict[str, Any]:
    if staged is None:
        return {}
    return {"num_tensors": staged.num_tensors, "nbytes": staged.nbytes, "digest": staged.digest}
