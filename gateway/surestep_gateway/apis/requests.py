"""First steps of the endpoints that generate: a request's deadline, its origin, its body."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

from starlette.requests import Request
from surestep_common.errors import DeadlineExceeded

from surestep_gateway.auth.api_keys import Caller
from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import until_disconnect
from surestep_gateway.generation.generation import Origin
from surestep_gateway.text.service import Job

from .middleware import body_of

T = TypeVar("T")


class MayNameItself(Protocol):
    """A body with vLLM's field for the id of its request."""

    @property
    def request_id(self) -> str | None: ...


def deadline_of(gateway: Gateway) -> float:
    """Return the deadline of a request that arrives now, on the event loop's clock."""
    return asyncio.get_running_loop().time() + gateway.settings.request_timeout_s


def origin_of(request: Request, body: MayNameItself, arrived: float) -> Origin:
    """Return where a request came from; a request id in a header goes before one in the body."""
    state, caller = request.scope["state"], Caller.of(request.scope)
    if body.request_id is not None and not state["request_id_given"]:
        return Origin(body.request_id, arrived, caller)
    return Origin(state["request_id"], arrived, caller)


async def prepare(gateway: Gateway, job: Job[T], request: Request, deadline: float) -> T:
    """Run a preparation job on the body and release the body. Raise SurestepError."""
    body = body_of(request)
    try:
        return await prepare_bytes(gateway, job, body.data, request, deadline)
    finally:
        body.release()


async def prepare_bytes(
    gateway: Gateway, job: Job[T], data: bytearray, request: Request, deadline: float
) -> T:
    """Run a preparation job. Raise SurestepError."""
    info = gateway.pool.info
    try:
        prepared = gateway.text.at_once(job, data, info)
        if prepared is not None:
            return prepared
        async with asyncio.timeout_at(deadline):
            work = gateway.text.prepare(job, data, info, Caller.of(request.scope).name)
            return await until_disconnect(request.receive, work, gateway.admission)
    except TimeoutError:
        raise DeadlineExceeded("the request was not prepared in time") from None
