"""Servers that speak the real protocols and make tokens up: `toy_servers.py KIND PORT`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from aiohttp import web
from surestep_common.rpc import Server
from surestep_proto import scheduler_pb2, scheduler_pb2_grpc

TOKENS_PER_DRAFTED_STEP = 4
FORWARD_S = 0.01  # of a step, as it says


async def completions(request: web.Request) -> web.StreamResponse:
    """As many tokens as asked for, of a text or a chat."""
    body = await request.json()
    said = {"delta": {"content": " a"}} if "messages" in body else {"text": " a", "token_ids": [7]}
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await _event(response, {"choices": [{"index": 0, **said}]})
    if "stream_options" in body:
        await _event(response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _event(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def health(_: web.Request) -> web.Response:
    """Always well."""
    return web.Response()


async def models(_: web.Request) -> web.Response:
    """One model."""
    return web.json_response({"data": [{"id": "toy"}]})


class ToyScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Counts up from the prompt's last id, several tokens at a time when drafts are allowed."""

    def __init__(self) -> None:
        self._num_steps = 0

    async def Stats(
        self, request: scheduler_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.SchedulerStats:
        """Tell how long its only rank says that it was in the model."""
        rank = scheduler_pb2.RankSeconds(forward_s=FORWARD_S * self._num_steps)
        steps = scheduler_pb2.StepStats(ranks=[rank])
        return scheduler_pb2.SchedulerStats(num_steps=self._num_steps, steps=steps)

    async def Generate(
        self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[scheduler_pb2.GenerateChunk]:
        """See the class."""
        drafts = not (request.HasField("num_draft_tokens") and request.num_draft_tokens == 0)
        stride = TOKENS_PER_DRAFTED_STEP if drafts else 1
        ids = [request.prompt_ids[-1] + 1 + i for i in range(request.max_tokens)]
        steps = [ids[i : i + stride] for i in range(0, len(ids), stride)]
        for step in steps:
            self._num_steps += 1
            yield scheduler_pb2.GenerateChunk(token_ids=step)
        accepted = len(ids) - len(steps)
        end = scheduler_pb2.RequestEnd(
            num_steps=len(steps), num_draft_tokens=2 * accepted, num_accepted_tokens=accepted
        )
        yield scheduler_pb2.GenerateChunk(finish_reason=scheduler_pb2.LENGTH, end=end)


async def start_scheduler(port: int) -> tuple[Server, int]:
    """A listening ToyScheduler and its port."""
    server = Server([scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]])
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(ToyScheduler(), server.grpc)
    return server, await server.start(f"127.0.0.1:{port}")


async def _serve_scheduler(port: int) -> None:
    server, _ = await start_scheduler(port)
    await server.grpc.wait_for_termination()


def main(kind: str, port: int) -> None:
    """Serve until killed."""
    if kind == "scheduler":
        asyncio.run(_serve_scheduler(port))
    app = web.Application(client_max_size=1 << 25)
    routes = [web.get("/v1/models", models), web.get("/health", health)]
    endpoints = ("/v1/completions", "/v1/chat/completions")
    app.add_routes([*(web.post(path, completions) for path in endpoints), *routes])
    web.run_app(app, host="127.0.0.1", port=port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
