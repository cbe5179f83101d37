"""Routes that carry their own description, of which openapi.py makes the document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from surestep_gateway.request.protocol import Body

Handler = Callable[[Request], Awaitable[Response]]

# What a request with a body, counted while it is open, may be answered with besides 200 and 403.
COUNTED_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


class Parameter(NamedTuple):
    """A parameter of a URL's query, which may be left out."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the OpenAPI document says about an operation."""

    summary: str
    bodies: tuple[type[Body], ...] = ()  # models of the request's body, of which one must fit
    body_required: bool = True
    parameters: tuple[Parameter, ...] = ()
    media_type: str = "application/json"  # of the response; "" = it has no body
    streams: bool = False  # server-sent events when the body says "stream": true
    keys: bool = False  # needs an API key, if the server has any
    errors: tuple[int, ...] = ()  # HTTP statuses besides 403, which any operation may have


class DescribedRoute(Route):
    """A route of one method with its description."""

    def __init__(self, method: str, path: str, handler: Handler, description: Description) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.description = description
