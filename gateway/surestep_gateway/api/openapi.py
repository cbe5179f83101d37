"""GET /openapi.json: the endpoints, described by the models that validate their requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from surestep_gateway.request.embedding_body import EmbeddingRequest
from surestep_gateway.request.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    RestartBody,
    TokenizeBody,
    TokenizeChatBody,
)

_REF = "#/components/schemas/"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "field at fault"},
                "code": {"type": "string", "description": "OpenAI's where it has one"},
            },
        }
    },
}
_ERRORS = {
    400: "The request is wrong.",
    401: "Missing or wrong key.",
    403: "A browser asks, and the server does not answer pages under that name.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "Over a limit on size.",
    415: "The body is not declared to be JSON.",
    429: "Too many requests; Retry-After says when to come again.",
    500: "An internal error, or logits that were not finite.",
    503: "Not ready, or shutting down; Retry-After says when to come again.",
    504: "A deadline of the request passed.",
}


class _Operation(NamedTuple):
    method: str
    path: str
    summary: str
    bodies: tuple[type[Body], ...] = ()
    kind: str = "application/json"  # of the answer
    streams: bool = False  # server-sent events when the body says "stream": true
    keys: bool = False  # asks for an API key, if the server has any
    errors: tuple[int, ...] = (503,)


_COUNTED = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
_OPERATIONS = (
    _Operation(
        *("post", "/v1/chat/completions", "Answer a chat.", (ChatRequest,)),
        streams=True,
        keys=True,
        errors=_COUNTED,
    ),
    _Operation(
        *("post", "/v1/completions", "Go on with a text.", (CompletionRequest,)),
        streams=True,
        keys=True,
        errors=_COUNTED,
    ),
    _Operation(
        *("post", "/v1/embeddings", "Make vectors of texts.", (EmbeddingRequest,)),
        keys=True,
        errors=_COUNTED,
    ),
    _Operation("get", "/v1/models", "Served names.", keys=True, errors=(401, 503)),
    _Operation(
        *("post", "/tokenize", "Tokens of a text or a chat.", (TokenizeBody, TokenizeChatBody)),
        keys=True,
        errors=_COUNTED,
    ),
    _Operation(
        *("post", "/detokenize", "Text of tokens.", (DetokenizeBody,)),
        keys=True,
        errors=_COUNTED,
    ),
    _Operation(
        *("get", "/", "What this server is, for people."),
        kind="text/html",
        keys=True,
        errors=(401,),
    ),
    _Operation(
        *("get", "/docs", "This document, for people."),
        kind="text/html",
        keys=True,
        errors=(401,),
    ),
    _Operation("get", "/ui", "The status page.", kind="text/html", errors=()),
    _Operation("get", "/health", "The process answers.", kind="", errors=()),
    _Operation("get", "/health/ready", "Requests sent now would be served.", kind=""),
    _Operation("get", "/version", "Version of the gateway.", errors=()),
    _Operation(
        *("get", "/metrics", "Prometheus metrics."), kind="text/plain", keys=True, errors=(401,)
    ),
    _Operation("get", "/load", "Requests that are open.", keys=True, errors=(401,)),
    _Operation("get", "/status", "Every process behind this gateway.", keys=True, errors=(401,)),
    _Operation("get", "/overview", "What the status page shows.", keys=True, errors=(401,)),
)
_RESTART = _Operation(
    *("post", "/admin/workers/restart", "Replace the workers, one scheduler after the other."),
    (RestartBody,),
    keys=True,
    errors=(400, 401, 404, 408, 413, 415, 503),
)


def document(
    version: str, root: str = "", *, admin: bool, hidden: Collection[str] = ()
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server whose paths begin with `root`.

    The admin endpoints are part of it only with `admin`; paths in `hidden` are left out.
    """
    known = (*_OPERATIONS, _RESTART) if admin else _OPERATIONS
    operations = [one for one in known if one.path not in hidden]
    bodies = [(body, "validation") for operation in operations for body in operation.bodies]
    _, schemas = models_json_schema(bodies, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Surestep", "version": version},
        "servers": [{"url": root or "/"}],
        "paths": {one.path: {one.method: _describe(one)} for one in operations},
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_") or "home",
        "responses": dict(_responses(operation)),
    }
    if operation.bodies:
        described["requestBody"] = {
            "required": operation is not _RESTART,
            "content": {"application/json": {"schema": _any_of(operation.bodies)}},
        }
    if operation.keys:
        described["security"] = [{}, {"key": []}]  # servers without keys ask for none
    return described


def _any_of(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    refs = [{"$ref": _REF + body.__name__} for body in bodies]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _responses(operation: _Operation) -> Iterator[tuple[str, dict[str, Any]]]:
    success: dict[str, Any] = {"description": "As asked."}
    if operation.kind.startswith("text/"):
        success["content"] = {operation.kind: {"schema": {"type": "string"}}}
    elif operation.kind:
        success["content"] = {operation.kind: {"schema": {"type": "object"}}}
    if operation.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    yield "200", success
    for status in sorted({403, *operation.errors}):
        yield (
            str(status),
            {
                "description": _ERRORS[status],
                "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}},
            },
        )
