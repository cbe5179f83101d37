"""Routes that say who may call them, and describe themselves for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from surestep_gateway.http.admission import NO_ROUTE, Access, Rule
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
    """Description of an operation in the OpenAPI document."""

    summary: str
    bodies: tuple[type[Body], ...] = ()  # models of the request's body, of which one must fit
    body_required: bool = True
    parameters: tuple[Parameter, ...] = ()
    media_type: str = "application/json"  # of the response; "" = it has no body
    streams: bool = False  # server-sent events when the body says "stream": true
    errors: tuple[int, ...] = ()  # HTTP statuses besides 403, which any operation may have


class RuledRoute(Route):
    """A route that says how requests to it are admitted."""

    def __init__(
        self, path: str, handler: Handler, *, methods: Sequence[str], access: Access, counted: bool
    ) -> None:
        super().__init__(path, handler, methods=list(methods))
        self.rule = Rule(access, counted)


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
    ) -> None:
        super().__init__(path, handler, methods=[method], access=access, counted=counted)
        self.method = method
        self.description = description


class Rules:
    """The rules of an application's routes, by the path of a request."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """Raise TypeError for a route without a rule, or with another than its path has."""
        self._exact: dict[str, Rule] = {}
        self._patterns: list[RuledRoute] = []
        for route in routes:
            if not isinstance(route, RuledRoute):
                raise TypeError(f"{route} does not say how its requests are admitted")
            if route.param_convertors:
                self._patterns.append(route)
            elif self._exact.setdefault(route.path, route.rule) != route.rule:
                raise TypeError(f"{route.path} has two rules")

    def of(self, path: str) -> Rule:
        """Return the rule of a request for `path`, whatever its method."""
        if (rule := self._exact.get(path)) is not None:
            return rule
        matching = (one.rule for one in self._patterns if one.path_regex.match(path))
        return next(matching, NO_ROUTE)
