"""Requests on their way to an endpoint, and its first steps.

Each request has an id and a caller, is admitted and counted, and its body is read. Endpoints that
generate give it a deadline and an origin, and prepare its body.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from surestep_common import tracing
from surestep_common.errors import Cancelled, DeadlineExceeded, SurestepError, Unavailable, kind_of
from surestep_common.tracing import Tracer
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.api_keys import Caller, TrustedGateways
from surestep_gateway.context import Gateway, Models
from surestep_gateway.generation.event_stream import until_disconnect
from surestep_gateway.generation.generation import Origin
from surestep_gateway.generation.request_records import begin_span, note_status
from surestep_gateway.http.admission import Access, Admission, HostCheck, Rule, Rules
from surestep_gateway.http.bodies import Bodies, BodyReader
from surestep_gateway.http.errors import error_response
from surestep_gateway.observability.clients import Ending
from surestep_gateway.observability.metrics import GatewayMetrics
from surestep_gateway.request.parse import NAME, model_named
from surestep_gateway.text.service import Job

T = TypeVar("T")

_LAST_ANSWER = ((b"connection", b"close"),)  # the next request should find another server
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_NAMED_AT_ONCE_BYTES = 1 << 20  # of a body in which the event loop looks for the model
_ANY_LENGTH = SchedulerInfo(max_model_len=(1 << 31) - 1)


class RequestMiddleware:
    """Check, count and number each request.

    Plain ASGI, because the framework's own middleware class would sit in every stream. A request
    counts as open once its whole body has arrived.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        rules: Rules,
        bodies: Bodies,
        hosts: HostCheck,
        admission: Admission,
        metrics: GatewayMetrics,
        tracer: Tracer,
        gateways: TrustedGateways,
    ) -> None:
        self._app = app
        self._gateways = gateways
        self._rules = rules
        self._bodies = bodies
        self._hosts = hosts
        self._admission = admission
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"].rstrip("/") or "/", dict(scope["headers"])
        scope["path"] = path  # clients put slashes behind their base URL
        rule = self._rules.of(path)
        span = tracing.NO_SPAN  # for what is answered at once
        if rule.counted:
            span = begin_span(self._tracer, scope, headers)
        with span:
            tracing.current.set(span)
            await self._serve(scope, rule, headers, receive, send)

    async def _serve(
        self, scope: Scope, rule: Rule, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        given = headers.get(b"x-request-id", b"")
        known = bool(_REQUEST_ID.fullmatch(given))
        request_id = given.decode() if known else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        ending = Ending()
        address, _ = scope.get("client") or ("", 0)
        named = self._gateways.named(address, headers)
        state.update(request_id=request_id, request_id_given=known, ending=ending, named=named)
        answer = self._numbered(send, request_id, rule, ending)
        with self._counted(scope, rule, ending):
            await self._admit(scope, rule, headers, receive, answer)

    @contextlib.contextmanager
    def _counted(self, scope: Scope, rule: Rule, ending: Ending) -> Iterator[None]:
        """Count how the answer to the request ends."""
        try:
            yield
        except asyncio.CancelledError:
            ending.fail(Unavailable("the server is shutting down"))
            raise
        except Exception as error:  # a fault of ours, whose answer goes past this middleware
            ending.fail(error)
            if not ending.begun:
                self._metrics.responses.labels(str(kind_of(error).http_status)).inc()
            raise
        finally:
            if rule.counted and scope["method"] == "POST":
                self._metrics.answers.count(scope["path"], ending)

    async def _admit(
        self,
        scope: Scope,
        rule: Rule,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        answer: Send,
    ) -> None:
        state = scope["state"]
        try:
            self._hosts.check(headers)
            self._admission.check_certificate(rule, certified=state.get("certified", False))
            state["client"] = self._admission.identify(rule, headers)
            caller = Caller.of(scope).name
            self._admission.check(rule, caller)
            body = BodyReader(self._bodies, receive, {} if rule.large else headers)
            if rule.counted:
                await body.read()
                if state.get("is_gone", bool)():  # before it costs more than its bytes
                    raise Cancelled("the client went away")
                self._admission.check(rule, caller)  # much may have happened since
        except SurestepError as error:
            state["ending"].fail(error)
            await error_response(error, scope["path"])(scope, receive, answer)
            return
        state["body"] = body
        try:
            await self._run(scope, rule, receive, answer, caller)
        finally:
            body.release()

    async def _run(
        self, scope: Scope, rule: Rule, receive: Receive, send: Send, caller: str
    ) -> None:
        if not rule.counted:
            await self._app(scope, receive, send)
            return
        with (
            self._admission.opened(caller),
            self._metrics.open_requests.track_inprogress(),
            contextlib.ExitStack() as held,
        ):
            scope["state"]["held"] = held
            await self._app(scope, receive, send)

    def _numbered(self, send: Send, request_id: str, rule: Rule, ending: Ending) -> Send:
        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                ending.begun = True
                if rule.access is not Access.PROBES:  # of many, to which 503 is a good answer
                    self._metrics.responses.labels(str(message["status"])).inc()
                note_status(tracing.current.get(), message["status"])
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    *(_LAST_ANSWER if self._admission.leaving else ()),
                ]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ending.complete = True

        return numbered


class RootPath:
    """Strip the path under which a proxy serves the API; requests may come with or without it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root or path.startswith(f"{self._root}/"):
            scope = {**scope, "path": path.removeprefix(self._root) or "/"}
        await self._app(scope, receive, send)


def body_of(request: Request) -> BodyReader:
    body: BodyReader = request.scope["state"]["body"]
    return body


async def model_of(models: Models, request: Request) -> Gateway:
    """Return the model that the body of a counted request names, with a seat there until its end.

    A body that cannot be read is left to the first model to refuse. Raise ModelNotFound,
    MissingParameter, PermissionDenied, QueueFull, and what a text process has against the body.
    """
    caller = Caller.of(request.scope)
    try:
        name = await _model_named(models.first, request)
    except ValueError:
        gateway = models.first
    else:
        gateway = models.unnamed() if name is None else models.answering(name, caller)
    held: contextlib.ExitStack = request.scope["state"]["held"]
    held.enter_context(gateway.seats.taken(caller.name))
    return gateway


async def _model_named(any_model: Gateway, request: Request) -> str | None:
    """Return what `model_named` does, in a text process where the event loop would notice."""
    data = body_of(request).data
    if len(data) <= _NAMED_AT_ONCE_BYTES:
        return model_named(data)
    found = await _prepared(any_model, NAME, data, _ANY_LENGTH, request, deadline_of(any_model))
    if not found.readable:
        raise ValueError
    return found.name


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
    try:
        info = await _facts(gateway, request, deadline)
        prepared = gateway.text.at_once(job, data, info)
    except TimeoutError:
        raise _too_late() from None
    if prepared is not None:
        return prepared
    return await _prepared(gateway, job, data, info, request, deadline)


async def _prepared(
    gateway: Gateway,
    job: Job[T],
    data: bytearray,
    info: SchedulerInfo,
    request: Request,
    deadline: float,
) -> T:
    """Run a job until the deadline, or until the client leaves. Raise SurestepError."""
    work = gateway.text.prepare(job, data, info, Caller.of(request.scope).name)
    try:
        async with asyncio.timeout_at(deadline):
            return await until_disconnect(request.receive, work, gateway.admission)
    except TimeoutError:
        raise _too_late() from None


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request was not prepared in time")


async def _facts(gateway: Gateway, request: Request, deadline: float) -> SchedulerInfo:
    """Return facts of the model, which is loaded for them where it comes and goes."""
    if gateway.pool.is_known:
        return gateway.pool.info
    async with asyncio.timeout_at(deadline):
        known = gateway.pool.known(gateway.settings.admission_timeout_s)
        return await until_disconnect(request.receive, known, gateway.admission)
