"""Error responses in the shape that OpenAI's clients expect."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import (
    INTERNAL_MESSAGE,
    ClientTooSlow,
    InternalError,
    ModelChanged,
    QueueFull,
    SurestepError,
    Unavailable,
    kind_of,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return `{"error": {...}}`; the details of internal errors are logged, not shown."""
    kind = kind_of(error)
    message = INTERNAL_MESSAGE
    if isinstance(error, SurestepError) and not isinstance(error, InternalError):
        message = error.message
    param = error.param if isinstance(error, SurestepError) else None
    return error_content(message, kind.openai_type, param, kind.openai_code)


def error_content(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    """Return the object that every error response contains."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> Response:
    """Return the response for any exception."""
    headers = {}
    if isinstance(error, QueueFull | Unavailable | ModelChanged):
        headers["Retry-After"] = str(math.ceil(error.retry_after or _RETRY_AFTER_S))
    if isinstance(error, ClientTooSlow):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JsonResponse(error_body(error), kind_of(error).http_status, headers)


async def on_surestep_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handle the framework's own errors: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    kind, code = "invalid_request_error", "method_not_supported"
    if error.status_code == HTTPStatus.NOT_FOUND:
        kind, code = "not_found_error", "unknown_url"
    body = error_content(message, kind, None, code)
    return JsonResponse(body, error.status_code, dict(error.headers or {}))


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Handle our bugs. The framework raises them again, and the server logs the traceback."""
    return error_response(error)
