"""Routes that describe themselves for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from surestep_gateway.http.admission import Access, Handler, RuledRoute
from surestep_gateway.request.protocol import Body

# What a request with a body, counted while it is open, may be answered with besides 200 and 403.
COUNTED_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


class Parameter(NamedTuple):
    """A parameter of a URL's query, which may be left out."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of an operation in the OpenAPI document."""

    summary: str
    bodies: tuple[type[Body], ...] = ()  # models of the request's body, of which one must fit
    body_required: bool = True
    parameters: tuple[Parameter, ...] = ()
    media_type: str = "application/json"  # of the response; "" = it has no body
    streams: bool = False  # server-sent events when the body says "stream": true
    errors: tuple[int, ...] = ()  # HTTP statuses besides 403, which any operation may have


class DescribedRoute(RuledRoute):
    """A route of one method with its description."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        description: Description,
        *,
        access: Access,
        counted: bool,
        large: bool = False,
    ) -> None:
        methods = [method]
        super().__init__(
            path, handler, methods=methods, access=access, counted=counted, large=large
        )
        self.method = method
        self.description = description
