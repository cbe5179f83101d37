"""The load generator against a real HTTP server whose streams are known in advance."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientConnectorError, ClientResponseError, web
from surestep_cli.bench.load import LoadReport, make_prompt, run_load
from surestep_cli.bench.picture import in_characters, to_svg
from surestep_common.errors import Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(completions: Handler, models: Handler | None = None) -> AsyncIterator[str]:
    async def two_models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    models = models or two_models
    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, *events: Any, done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def text(value: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


async def load(url: str, model: str | None = None, **options: Any) -> LoadReport:
    sizes = {"concurrency": 2, "num_requests": 6, "max_tokens": 4, "prompt_tokens": 3}
    return await run_load(url, model, **{**sizes, **options})


async def test_counts_tokens_by_usage_and_times_by_chunk() -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        return await stream(request, text("ab"), text("cd"), usage(4))

    async with serving(reply) as url:
        report = await load(url)
    assert (report.model, report.num_requests, report.num_errors) == ("first", 6, 0)
    assert (report.output_tokens, report.num_chunks, report.prompt_tokens) == (24, 12, 5)
    assert report.output_tok_s == pytest.approx(24 / report.wall_s)
    assert report.ttft_ms.p50 is not None
    assert report.e2e_ms.p50 is not None
    assert 0 < report.ttft_ms.p50 <= report.e2e_ms.p50
    assert json.loads(report.to_json())["itl_ms"].keys() == {"p50", "p99"}
    assert sum(report.tok_s_over_time) * report.bucket_s == pytest.approx(24)
    quantiles = report.ttft_quantiles_ms
    assert quantiles == sorted(quantiles)
    assert quantiles[10] == report.ttft_ms.p50


async def test_keeps_exactly_concurrency_requests_open() -> None:
    num_open, most = 0, 0
    full = asyncio.Event()

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        if num_open == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 10)
        response = await stream(request, text("a"), usage(4))
        num_open -= 1
        return response

    async with serving(reply) as url:
        report = await load(url, concurrency=3)
    assert (most, report.num_errors) == (3, 0)


async def test_sends_the_same_bodies_for_the_same_seed() -> None:
    seen: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, text("x" + seen[-1]["prompt"]), usage(4))

    async with serving(reply) as url:
        one = await load(url, concurrency=1, extra={"top_k": 7})
        two = await load(url, concurrency=1, extra={"top_k": 7}, num_warmup=1)
        other = await load(url, concurrency=1, seed=1)
    assert seen[:6] == seen[7:13]
    assert seen[6]["prompt"] not in {body["prompt"] for body in seen[:6]}
    assert seen[0]["top_k"] == 7
    assert one.output_sha256 == two.output_sha256 != other.output_sha256


@pytest.mark.parametrize(
    ("events", "done", "kind"),
    [
        ([text("a"), {"error": {"message": "gone"}}], True, "error in the stream"),
        ([text("a"), usage(4)], False, "the stream ended without [DONE]"),
        ([text("a"), usage(3)], True, "fewer tokens than asked for"),
    ],
)
async def test_names_what_is_wrong_with_a_stream(
    events: list[dict[str, Any]], done: bool, kind: str
) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events, done=done)

    async with serving(reply) as url:
        report = await load(url)
    assert report.errors == {kind: 6}
    assert (report.output_tokens, report.ttft_ms.p50) == (0, None)
    assert report.ttft_quantiles_ms == []
    assert "nothing was measured" in to_svg(report)
    assert list(in_characters(report, ascii_only=False)) == []


async def test_leaves_out_what_extra_has_as_null_and_then_lets_answers_end_early() -> None:
    seen: list[dict[str, Any]] = []
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}

    async def reply(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, text("a"), text("b"), text("c"), last, done=False)

    async with serving(reply) as url:
        early = await load(url, extra={"ignore_eos": None, "stream_options": None})
        whole = await load(url, extra={"stream_options": None})
    assert seen[0].keys() == {"model", "max_tokens", "temperature", "stream", "prompt"}
    assert (early.errors, early.output_tokens) == ({}, 18)  # of chunks: nobody counts them
    assert seen[6]["ignore_eos"] is True
    assert whole.errors == {"fewer tokens than asked for": 6}


async def test_counts_refusals_by_status_and_keeps_the_message() -> None:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "queue full"}}, status=429)

    async with serving(reply) as url:
        report = await load(url)
    assert report.errors == {"HTTP 429": 6}
    assert "queue full" in (report.error_sample or "")


async def test_a_silent_server_is_a_timeout_and_a_closed_port_a_client_error() -> None:
    release = asyncio.Event()

    async def reply(request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(release.wait(), 10)
        return await stream(request)

    async with serving(reply) as url:
        report = await load(url, model="m", num_requests=2, timeout_s=0.2)
        release.set()
    assert report.errors == {"timeout": 2}
    closed = await load(url, model="m", num_requests=1)
    assert closed.errors == {"ClientConnectorError": 1}


async def test_what_an_idle_connection_swallowed_is_sent_again_and_counted() -> None:
    used: set[object] = set()

    async def reply(request: web.Request) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        if request.transport in used:  # as if it had been closed just before
            request.transport.abort()
            return web.Response()
        used.add(request.transport)
        return await stream(request, text("a"), usage(4))

    async with serving(reply) as url:
        report = await load(url, model="m", concurrency=1)
    assert (report.errors, report.output_tokens) == ({}, 24)
    assert report.num_reconnects == 5  # the first request had a connection of its own


async def test_a_server_that_drops_fresh_connections_or_begun_streams_fails() -> None:
    num_requests = 0

    async def drop(request: web.Request) -> web.StreamResponse:
        nonlocal num_requests
        num_requests += 1
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def begin(request: web.Request) -> web.StreamResponse:
        response = await stream(request, text("a"), done=False)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(drop) as url:
        dropped = await load(url, model="m", concurrency=1)
    assert (dropped.num_errors, dropped.num_reconnects, num_requests) == (6, 0, 6)
    async with serving(begin) as url:
        begun = await load(url, concurrency=1)
    assert (begun.num_errors, begun.num_reconnects) == (6, 0)


async def test_waits_for_a_server_that_has_no_model_yet_or_is_loading_it() -> None:
    models = iter([web.json_response({}, status=503), web.json_response({"data": []})])
    loading = iter([503])
    ready = web.json_response({"data": [{"id": "late"}]})

    async def listed(_: web.Request) -> web.StreamResponse:
        return next(models, None) or web.Response(body=ready.body, content_type="application/json")

    async def reply(request: web.Request) -> web.StreamResponse:
        if (status := next(loading, None)) is not None:
            return web.json_response({"error": {"message": "loading"}}, status=status)
        return await stream(request, text("a"), usage(4))

    async with serving(reply, listed) as url:
        report = await load(url, ready_timeout_s=10)
    assert (report.model, report.num_requests, report.num_errors) == ("late", 6, 0)


async def test_tires_of_a_server_that_stays_unready_but_not_of_one_that_refuses() -> None:
    async def loading(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "loading"}}, status=503)

    async def forbidden(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "who are you?"}}, status=401)

    async with serving(loading) as url:
        with pytest.raises(Unavailable, match=r"not ready: HTTP 503: .*loading"):
            await load(url, ready_timeout_s=1e-3)
    with pytest.raises(ClientConnectorError):  # its port is closed now
        await load(url, ready_timeout_s=1e-3)
    async with serving(forbidden, forbidden) as url:
        with pytest.raises(ClientResponseError, match="401"):
            await load(url, ready_timeout_s=60)
        report = await load(url, "m", ready_timeout_s=60)
    assert report.errors == {"HTTP 401": 6}


def test_prompts_depend_on_index_seed_and_kind_alone() -> None:
    first = make_prompt(0, 64, seed=0, kind="random")
    assert first == make_prompt(0, 64, seed=0, kind="random")
    assert len(first.split()) == 64
    assert first != make_prompt(1, 64, seed=0, kind="random")
    repeat = make_prompt(0, 36, seed=0, kind="repeat").split()
    assert repeat[:12] == repeat[12:24] == repeat[24:]
