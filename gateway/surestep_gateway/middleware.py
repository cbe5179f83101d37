"""What happens around every request: its id, the key, the limits, the count of open ones."""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from surestep_common.errors import Cancelled, InvalidRequest, RequestTooLarge, SurestepError

from .admission import GENERATING, Admission
from .errors import error_response
from .metrics import Metrics
from .tenants import Caller

_BODY_TIMEOUT_S = 30.0  # between two pieces of a body
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class RequestMiddleware:
    """Plain ASGI, because the framework's own middleware class would sit in every stream."""

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, admission: Admission, metrics: Metrics
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        known = bool(_REQUEST_ID.fullmatch(given))
        request_id = given.decode() if known else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, request_id_given=known)
        answer = self._numbered(send, request_id)
        try:
            self._admission.check(scope["path"], headers, Caller.of(scope).name)
            limited = _limited(receive, headers, self._max_body)
        except SurestepError as error:
            await error_response(error)(scope, receive, answer)
            return
        await self._run(scope, limited, answer)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        caller = Caller.of(scope).name
        with self._admission.opened(caller), self._metrics.open_requests.track_inprogress():
            await self._app(scope, receive, send)

    def _numbered(self, send: Send, request_id: str) -> Send:
        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(str(message["status"])).inc()
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        return numbered


def _limited(receive: Receive, headers: dict[bytes, bytes], limit: int) -> Receive:
    """`receive` that raises RequestTooLarge once the body is over the limit.

    A body that stops coming raises InvalidRequest, and Cancelled when its sender is gone: nobody
    holds a place among the open requests without saying what they want.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise RequestTooLarge(f"the body must have at most {limit} bytes, got {int(declared)}")
    size, complete = 0, False

    async def counted() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise InvalidRequest("the body did not arrive in time") from None
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        complete = not message.get("more_body", False)
        size += len(message.get("body", b""))
        if size > limit:
            raise RequestTooLarge(f"the body must have at most {limit} bytes")
        return message

    return counted
