"""Endpoints that pause the engine, put it to sleep and wake it: vLLM's, with SGLang's names beside.

Trainers that drive a server also ask what it serves, and empty its prefix cache. The endpoints
exist where the operator has switched them on, and ask for the admin key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_proto import scheduler_pb2 as pb

from surestep_gateway.apis.route import DescribedRoute, Description, Parameter
from surestep_gateway.context import Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.request.protocol import Body
from surestep_gateway.schedulers.scheduler_client import SchedulerClient

from .admin import Act, Administrators

V = TypeVar("V")

MODES = {"abort": pb.PAUSE_ABORT, "wait": pb.PAUSE_WAIT, "keep": pb.PAUSE_KEEP}
_WORDS = {"true": True, "false": False}
_FORMS: dict[str, Callable[[Any], Any]] = {"json": lambda shown: shown, "text": json.dumps}
_LEVELS = {"0": 0, "1": 1, "2": 2}
_ERRORS = (400, 401, 404, 408, 413, 415, 503, 504)
_MODE = Parameter("mode", {"enum": [*MODES], "default": "abort"})
_TAGS = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}


class TagsBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation"""

    tags: list[str] | None = None


class ModeBody(Body):
    """POST /pause_generation"""

    mode: str | None = None


class AbortBody(Body):
    """POST /abort_requests"""

    request_ids: list[str] | None = None


_SLEEP = Description(
    summary="Stop, and give the memory of the workers back.",
    parameters=(Parameter("level", {"enum": [0, 1, 2], "default": 1}), _MODE),
    errors=_ERRORS,
)
_WAKE = Description(
    summary="Go on after a sleep.", parameters=(Parameter("tags", _TAGS),), errors=_ERRORS
)
_RELEASE = Description(
    summary="Sleep of level 1 when open requests are done, by SGLang's name.",
    bodies=(TagsBody,),
    body_required=False,
    errors=_ERRORS,
)
_REOCCUPY = Description(
    summary="Go on after a sleep, by SGLang's name.",
    bodies=(TagsBody,),
    body_required=False,
    errors=_ERRORS,
)
_PAUSE = Description(
    summary="Stop. The workers keep their memory.",
    parameters=(_MODE, Parameter("clear_cache", {"type": "boolean", "default": False})),
    errors=_ERRORS,
)
_PAUSE_SGLANG = Description(
    summary="Stop, by SGLang's name.", bodies=(ModeBody,), body_required=False, errors=_ERRORS
)
_RESUME = Description(summary="Go on.", errors=_ERRORS)
_ABORT = Description(
    summary="End open requests, those named or all, with the tokens they have.",
    bodies=(AbortBody,),
    body_required=False,
    errors=_ERRORS,
)
_CLEAR = Description(summary="Forget all cached prefixes. Open requests go on.", errors=_ERRORS)
_INFO = Description(
    summary="What is served, in vLLM's form.",
    parameters=(Parameter("config_format", {"enum": [*_FORMS], "default": "text"}),),
    errors=_ERRORS,
)
_WORLD_SIZE = Description(summary="How many ranks compute the model.", errors=_ERRORS)
_IS_SLEEPING = Description(summary="Whether it sleeps.", errors=_ERRORS)
_IS_PAUSED = Description(summary="Whether it is stopped.", errors=_ERRORS)


class EngineControlRoutes:
    """Handlers of one gateway."""

    def __init__(self, models: Models) -> None:
        self._settings = models.first.settings
        self._administrators = Administrators(models)
        self._timeout_s = self._settings.request_timeout_s

    def routes(self) -> Iterator[RuledRoute]:
        if not self._settings.enable_sleep_mode:
            return
        post, get = (
            partial(DescribedRoute, method, access=Access.ADMINISTRATORS, counted=False)
            for method in ("POST", "GET")
        )
        yield post("/sleep", self.sleep, _SLEEP)
        yield post("/wake_up", self.wake_up, _WAKE)
        yield get("/is_sleeping", self.is_sleeping, _IS_SLEEPING)
        yield post("/pause", self.pause, _PAUSE)
        yield post("/resume", self.resume, _RESUME)
        yield get("/is_paused", self.is_paused, _IS_PAUSED)
        yield post("/abort_requests", self.abort_requests, _ABORT)
        yield post("/reset_prefix_cache", self.reset_prefix_cache, _CLEAR)
        yield get("/server_info", self.server_info, _INFO)
        yield get("/get_world_size", self.world_size, _WORLD_SIZE)
        yield post("/release_memory_occupation", self.release_memory, _RELEASE)
        yield post("/resume_memory_occupation", self.resume_memory, _REOCCUPY)
        yield post("/pause_generation", self.pause_generation, _PAUSE_SGLANG)
        yield post("/continue_generation", self.resume, _RESUME)

    async def sleep(self, request: Request) -> Response:
        """POST /sleep"""
        level = one_of(_LEVELS, "level", request.query_params.get("level", "1"))
        return await self._pause(request, level, request.query_params.get("mode", "abort"))

    async def pause(self, request: Request) -> Response:
        """POST /pause"""
        query = request.query_params
        clears = one_of(_WORDS, "clear_cache", query.get("clear_cache", "false").lower())
        return await self._pause(request, 0, query.get("mode", "abort"), clear_cache=clears)

    async def pause_generation(self, request: Request) -> Response:
        """POST /pause_generation"""
        mode = (await self._administrators.body(request, ModeBody)).mode
        return await self._pause(request, 0, mode or "abort")

    async def release_memory(self, request: Request) -> Response:
        """POST /release_memory_occupation"""
        tags = (await self._administrators.body(request, TagsBody)).tags
        return await self._pause(request, 1, "wait", tags or ())

    async def _pause(
        self,
        request: Request,
        level: int,
        mode: str,
        tags: Sequence[str] = (),
        *,
        clear_cache: bool = False,
    ) -> Response:
        order = pb.PauseRequest(
            level=level, mode=one_of(MODES, "mode", mode), tags=tags, clear_cache=clear_cache
        )

        async def pause(scheduler: SchedulerClient) -> dict[str, Any]:
            answer = await scheduler.pause(order, self._timeout_s)
            held = answer.held_weight_bytes
            return {"num_aborted": answer.num_aborted, "held_weight_bytes": held}

        return await self._at_each(request, pause)

    async def wake_up(self, request: Request) -> Response:
        """POST /wake_up"""
        return await self._resume(request, request.query_params.getlist("tags"))

    async def resume(self, request: Request) -> Response:
        """POST /resume"""
        return await self._resume(request, ())

    async def resume_memory(self, request: Request) -> Response:
        """POST /resume_memory_occupation"""
        return await self._resume(
            request, (await self._administrators.body(request, TagsBody)).tags or ()
        )

    async def _resume(self, request: Request, tags: Sequence[str]) -> Response:
        return await self._at_each(request, partial(self._resume_one, tags=tags))

    async def _resume_one(self, scheduler: SchedulerClient, tags: Sequence[str]) -> dict[str, Any]:
        answer = await scheduler.resume(tags, self._timeout_s)
        if not answer.asleep:
            scheduler.recheck()  # its earlier health does not count
            await self._administrators.until_admits(scheduler, self._timeout_s)
        return {"asleep": [*answer.asleep], "epoch": answer.epoch}

    async def abort_requests(self, request: Request) -> Response:
        """POST /abort_requests"""
        ids = (await self._administrators.body(request, AbortBody)).request_ids or ()

        async def abort(scheduler: SchedulerClient) -> dict[str, Any]:
            return {"num_aborted": await scheduler.abort(ids)}

        return await self._at_each(request, abort)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache"""
        order = pb.PauseRequest(mode=pb.PAUSE_KEEP, clear_cache=True)

        async def clear(scheduler: SchedulerClient) -> dict[str, Any]:
            if (await scheduler.query_stats()).HasField("pause"):
                raise InvalidRequest("it is paused already: pause it with clear_cache=true")
            await scheduler.pause(order, self._timeout_s)
            await self._resume_one(scheduler, ())
            return {}

        done = await self._administrators.at_each(request, clear)
        return done.response({"success": not done.failures, "schedulers": done.told})

    async def server_info(self, request: Request) -> Response:
        """GET /server_info"""
        info, ranks = await self._served(request)
        shown = {
            "model_config": {
                "model": info.model_path,
                "dtype": f"torch.{info.dtype}",
                "max_model_len": info.max_model_len,
            },
            "cache_config": {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks},
            "parallel_config": {"tensor_parallel_size": ranks, "world_size": ranks},
            "scheduler_config": {"max_num_seqs": info.max_num_seqs},
            "speculative_config": json.loads(info.speculative_config or "null"),
            "lora_config": {"max_loras": info.max_loras} if info.max_loras else None,
        }
        form = one_of(_FORMS, "config_format", request.query_params.get("config_format", "text"))
        return JsonResponse({"vllm_config": form(shown)})

    async def world_size(self, request: Request) -> Response:
        """GET /get_world_size"""
        _, ranks = await self._served(request)
        return JsonResponse({"world_size": ranks})

    async def _served(self, request: Request) -> tuple[pb.SchedulerInfo, int]:
        """Return what the first scheduler serves, and its ranks. Raise Unavailable before it
        serves."""
        self._administrators.check(request)
        scheduler, *_ = self._administrators.of_one_model(request)
        if scheduler.info is None:
            raise Unavailable("the model is being loaded")
        return scheduler.info, len((await scheduler.query_status()).supervisors)

    async def is_sleeping(self, request: Request) -> Response:
        """GET /is_sleeping"""
        pauses = await self._pauses(request)
        return JsonResponse({"is_sleeping": all(pause and pause.level for pause in pauses)})

    async def is_paused(self, request: Request) -> Response:
        """GET /is_paused"""
        return JsonResponse({"is_paused": all(await self._pauses(request))})

    async def _pauses(self, request: Request) -> list[pb.PauseInfo | None]:
        self._administrators.check(request)
        chosen = self._administrators.schedulers(request)
        answers = await asyncio.gather(*(scheduler.query_stats() for scheduler in chosen))
        return [stats.pause if stats.HasField("pause") else None for stats in answers]

    async def _at_each(self, request: Request, act: Act) -> Response:
        done = await self._administrators.at_each(request, act)
        return done.response({"schedulers": done.told})


def one_of(known: dict[str, V], name: str, value: str) -> V:
    """Return what a word of a request stands for. Raise InvalidRequest for an unknown one."""
    if value not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(known)}", param=name)
    return known[value]
