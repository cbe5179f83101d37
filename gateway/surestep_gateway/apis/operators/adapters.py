"""Endpoints that load and unload adapters while requests run, with vLLM's bodies and answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from surestep_common.errors import InvalidRequest, ModelNotFound, SurestepError
from surestep_proto.scheduler_pb2 import LoadAdapterRequest, UnloadAdapterRequest

from surestep_gateway.apis.route import DescribedRoute, Description
from surestep_gateway.context import Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse, error_body
from surestep_gateway.request.protocol import Body
from surestep_gateway.schedulers.scheduler_client import SchedulerClient

from .admin import Administrators

_ERRORS = (400, 401, 404, 415, 429, 503, 504)


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's, which says nothing that the name does not


_LOAD = Description(
    summary="Load an adapter from a folder that all workers see.",
    bodies=(LoadAdapterBody,),
    errors=_ERRORS,
)
_UNLOAD = Description(
    summary="Answer no more requests with an adapter.", bodies=(UnloadAdapterBody,), errors=_ERRORS
)


class AdapterRoutes:
    """Handlers of one gateway, where adapters are served and there is an admin key."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._administrators = Administrators(models)

    def routes(self) -> Iterator[RuledRoute]:
        if not (self._models.first.settings.enable_lora and self._administrators.exist):
            return
        post = partial(DescribedRoute, "POST", access=Access.ADMINISTRATORS, counted=False)
        yield post("/v1/load_lora_adapter", self.load, _LOAD)
        yield post("/v1/unload_lora_adapter", self.unload, _UNLOAD)

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter"""
        body = await self._administrators.body(request, LoadAdapterBody)
        name = body.lora_name
        schedulers = self._administrators.of_one_model(request)
        if name in self._models.names:
            raise InvalidRequest(f"'{name}' is the name of a model", param="lora_name")

        async def load(scheduler: SchedulerClient) -> dict[str, Any]:
            wanted = LoadAdapterRequest(name=name, path=body.lora_path, in_place=body.load_inplace)
            return {"digest": (await scheduler.load_adapter(wanted)).digest}

        async with self._administrators.model(request).pool.adapters_turn:
            done = await self._administrators.at_each(request, load)
            if done.failures:
                succeeded = [one["scheduler"] for one in done.told if "digest" in one]
                for scheduler in schedulers:
                    if scheduler.address in succeeded:
                        await scheduler.unload_adapter(UnloadAdapterRequest(name=name))
                return JsonResponse(error_body(done.failures[0]), 503)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter"""
        body = await self._administrators.body(request, UnloadAdapterBody)
        name, missing = body.lora_name, list[SurestepError]()
        self._administrators.of_one_model(request)

        async def unload(scheduler: SchedulerClient) -> dict[str, Any]:
            try:
                await scheduler.unload_adapter(UnloadAdapterRequest(name=name))
            except ModelNotFound as error:  # at one of several, it is gone already
                missing.append(error)
            return {}

        async with self._administrators.model(request).pool.adapters_turn:
            done = await self._administrators.at_each(request, unload)
        if len(missing) == len(done.told):
            raise missing[0]
        if done.failures:
            return JsonResponse(error_body(done.failures[0]), 503)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
