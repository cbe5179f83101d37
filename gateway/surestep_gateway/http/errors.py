"""Error responses in the shapes that OpenAI's and Anthropic's clients expect."""

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
    Unauthenticated,
    Unavailable,
    kind_of,
    lack_of,
    shortened,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return `{"error": {...}}`; the details of internal errors are logged, not shown."""
    error = lack_of(error) or error
    kind = kind_of(error)
    message = INTERNAL_MESSAGE
    if isinstance(error, SurestepError) and not isinstance(error, InternalError):
        message = error.message
    param = error.param if isinstance(error, SurestepError) else None
    return error_content(message, kind.openai_type, param, kind.openai_code)


def error_content(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    """Return the object that every error response contains."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(error: BaseException) -> dict[str, Any]:
    """Return the object that errors are in Anthropic's API."""
    shown = error_body(error)["error"]
    return _anthropic(kind_of(lack_of(error) or error).http_status, shown["message"])


def _anthropic(status: int, message: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_anthropic(path: str) -> bool:
    """Return whether clients of Anthropic's API ask for a path."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_response(error: BaseException, path: str = "") -> Response:
    """Return the response to any exception, in the shape of the API that has the path."""
    error, headers = lack_of(error) or error, {}
    if isinstance(error, QueueFull | Unavailable | ModelChanged):
        headers["Retry-After"] = str(math.ceil(error.retry_after or _RETRY_AFTER_S))
    if isinstance(error, Unauthenticated):
        headers["x-should-retry"] = "false"  # else Claude Code tries ten times
    if isinstance(error, ClientTooSlow):
        headers["Connection"] = "close"  # the rest of the body is not read
    body = anthropic_body(error) if is_anthropic(path) else error_body(error)
    return JsonResponse(body, kind_of(error).http_status, headers)


async def on_surestep_error(request: Request, error: Exception) -> Response:
    request.scope["state"]["ending"].fail(error)
    return error_response(error, request.scope["path"])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handle the framework's own errors: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    message = shortened(f"{error.detail}: {request.method} {request.url.path}")
    kind, code = "invalid_request_error", "method_not_supported"
    if error.status_code == HTTPStatus.NOT_FOUND:
        kind, code = "not_found_error", "unknown_url"
    body = error_content(message, kind, None, code)
    if is_anthropic(request.scope["path"]):
        body = _anthropic(error.status_code, message)
    return JsonResponse(body, error.status_code, dict(error.headers or {}))


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Handle our bugs. The framework raises them again, and the server logs the traceback."""
    return error_response(error, request.scope["path"])
