"""An endpoint as docs/change/extend.md says: a body, a handler, and a route that states its rule

What it is worth to be counted comes with the rule: nothing else names the path.
"""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from support.processes.gateway_stack import Paused, Stack, StartStack
from support.processes.trace_collector import collecting
from surestep_gateway import app
from surestep_gateway.apis.openai.routes import OpenAIRoutes
from surestep_gateway.apis.requests import body_of
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.request.parse import parse
from surestep_gateway.request.protocol import Body, Natural, Positive


class FitsBody(Body):
    """POST /v1/fits"""

    prompt_len: Positive  # tokens
    max_tokens: Natural


FITS = Description(summary="Room for an answer.", bodies=(FitsBody,), errors=COUNTED_ERRORS)


class WithFits(OpenAIRoutes):
    def routes(self) -> list[RuledRoute]:
        fits = DescribedRoute(
            "POST", "/v1/fits", self.fits, FITS, access=Access.CLIENTS, counted=True
        )
        return [*super().routes(), fits]

    async def fits(self, request: Request) -> Response:
        """POST /v1/fits"""
        asked = parse(FitsBody, body_of(request).data)
        most = self._models.first.pool.info.max_model_len
        return JsonResponse({"fits": asked.prompt_len + asked.max_tokens <= most})


@pytest.fixture(autouse=True)
def _with_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "OpenAIRoutes", WithFits)


async def ask(stack: Stack, **fields: object) -> httpx.Response:
    body = {"prompt_len": 1, "max_tokens": 1} | fields
    return await stack.client.post("/v1/fits", json=body)


async def test_it_answers(stack: Stack) -> None:
    most = stack.scheduler.info.max_model_len
    for max_tokens, fits in ((most - 3, True), (most - 2, False)):
        answer = await ask(stack, prompt_len=3, max_tokens=max_tokens)
        assert answer.json() == {"fits": fits}


async def test_it_is_described(stack: Stack) -> None:
    document = (await stack.client.get("/openapi.json")).json()
    assert document["components"]["schemas"]["FitsBody"]["required"] == ["prompt_len", "max_tokens"]
    content = document["paths"]["/v1/fits"]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/FitsBody"}
    assert "POST /v1/fits" in (await stack.client.get("/docs")).text


async def test_wrong_bodies_name_the_field(stack: Stack) -> None:
    refused = await ask(stack, prompt_len=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_len")


async def test_it_is_bounded(start_stack: StartStack) -> None:
    stack = await start_stack(max_concurrent_requests=1)
    stack.scheduler.script = Paused(1)
    async with stack.begun("/v1/completions", prompt="x"):
        assert (await ask(stack)).status_code == 429


async def test_its_body_is_bounded(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_bytes=1024)
    assert (await ask(stack, user="u" * 2000)).status_code == 413


async def test_its_ends_are_counted(stack: Stack) -> None:
    def counted(code: str, end: str) -> str:
        return f'surestep:answers_total{{code="{code}",end="{end}",path="/v1/fits"'

    assert counted("", "complete") in (await stack.client.get("/metrics")).text  # from the start
    assert (await ask(stack)).status_code == 200
    lines = (await stack.client.get("/metrics")).text.splitlines()
    (line,) = [one for one in lines if one.startswith(counted("", "complete"))]
    assert line.endswith(" 1.0")


async def test_it_is_traced(start_stack: StartStack) -> None:
    with collecting() as collector:
        stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
        await ask(stack)
        await stack.server.gateway.tracer.close()
        assert [span.attributes["http.response.status_code"] for span in collector.spans] == [200]
        assert len(collector.named("POST /v1/fits")) == 1


async def test_it_is_refused_while_the_server_drains(stack: Stack) -> None:
    stack.server.gateway.admission.draining = True
    assert (await ask(stack)).status_code == 503


async def test_it_needs_a_key_where_there_are_some(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="k")
    assert (await ask(stack)).status_code == 401
    stack.client.headers["authorization"] = "Bearer k"
    assert (await ask(stack)).status_code == 200


@pytest.mark.parametrize("rule", [{}, {"access": Access.CLIENTS}, {"counted": True}])
def test_without_a_decision_it_is_not_made(rule: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="missing"):
        DescribedRoute("POST", "/v1/fits", _nothing, FITS, **rule)  # type: ignore[arg-type]


async def _nothing(request: Request) -> Response:
    return Response()
