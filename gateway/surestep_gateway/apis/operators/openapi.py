"""The document of GET /openapi.json, put together from what the routes say about themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from surestep_gateway.apis.route import DescribedRoute, Description
from surestep_gateway.http.admission import Access
from surestep_gateway.request.protocol import Body

_REF = "#/components/schemas/"
_KEYED = (Access.METRICS, Access.OPERATORS, Access.CLIENTS, Access.ADMINISTRATORS)
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


def document(version: str, routes: Iterable[BaseRoute], root: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server whose paths begin with `root`.

    Routes without a description are left out.
    """
    described = [route for route in routes if isinstance(route, DescribedRoute)]
    bodies = [(body, "validation") for route in described for body in route.description.bodies]
    _, schemas = models_json_schema(bodies, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Surestep", "version": version},
        "servers": [{"url": root or "/"}],
        "paths": _paths(described),
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(routes: Iterable[DescribedRoute]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return paths


def _operation(route: DescribedRoute) -> dict[str, Any]:
    description = route.description
    operation: dict[str, Any] = {
        "summary": description.summary,
        "operationId": _name(route),
        "responses": dict(_responses(description)),
    }
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ),
        *(
            {"name": one.name, "in": "query", "schema": one.schema}
            for one in description.parameters
        ),
    ]
    if parameters:
        operation["parameters"] = parameters
    if description.bodies:
        operation["requestBody"] = {
            "required": description.body_required,
            "content": {"application/json": {"schema": _any_of(description.bodies)}},
        }
    if route.rule.access in _KEYED:
        operation["security"] = [{}, {"key": []}]  # servers without keys ask for none
    return operation


def _name(route: DescribedRoute) -> str:
    """Return a name that no other operation has: several may share a path with parameters."""
    name = re.sub(r"[/{}]+", "_", route.path).strip("_")
    return f"{route.method.lower()}_{name}" if route.param_convertors else name or "home"


def _any_of(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    refs = [{"$ref": _REF + body.__name__} for body in bodies]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _responses(description: Description) -> Iterator[tuple[str, dict[str, Any]]]:
    success: dict[str, Any] = {"description": "As asked."}
    if description.media_type.startswith("text/"):
        success["content"] = {description.media_type: {"schema": {"type": "string"}}}
    elif description.media_type:
        success["content"] = {description.media_type: {"schema": {"type": "object"}}}
    if description.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    yield "200", success
    for status in sorted({403, *description.errors}):
        yield (
            str(status),
            {
                "description": _ERRORS[status],
                "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}},
            },
        )
