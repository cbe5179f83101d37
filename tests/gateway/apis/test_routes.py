"""Every route says how its requests are admitted, or the application is not made."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from surestep_gateway.http.admission import NO_ROUTE, Access, RuledRoute, Rules


async def handler(request: Request) -> Response:
    return Response()


def ruled(path: str, *, access: Access = Access.CLIENTS, counted: bool = True) -> RuledRoute:
    return RuledRoute(path, handler, methods=["POST"], access=access, counted=counted)


@pytest.mark.parametrize("route", [Route("/v1/fits", handler), Mount("/v1/fits", routes=[])])
def test_a_route_of_another_kind_is_refused(route: Route | Mount) -> None:
    with pytest.raises(TypeError, match="does not say how its requests are admitted"):
        Rules([ruled("/v1/models"), route])


def test_a_path_has_one_rule() -> None:
    Rules([ruled("/a"), ruled("/a")])
    with pytest.raises(TypeError, match="/a has two rules"):
        Rules([ruled("/a"), ruled("/a", counted=False)])


def test_rules_are_found_by_path() -> None:
    several, one = ruled("/a"), ruled("/a/{name}", access=Access.EVERYBODY, counted=False)
    rules = Rules([several, one])
    assert (rules.of("/a"), rules.of("/a/b")) == (several.rule, one.rule)
    assert rules.of("/a/b/c") == rules.of("/admin/other") == NO_ROUTE
    assert NO_ROUTE.access is Access.CLIENTS
