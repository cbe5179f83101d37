"""Surestep under Ray Serve: replicas with a server each, as many as their own metrics ask for.

    pip install 'ray[serve]' surestep
    python examples/ray_serve.py MODEL --port 8000 --max-replicas 4 --gpus 1

A replica starts `surestep serve` on a Unix socket and hands requests on, streams as they come. Its
load is what the server's metrics say runs and waits; a replica for every `--requests` of it is
wanted. Ray replaces a replica whose server has ended. A rank that dies is none of its business: the
server has another one within seconds, and its streams go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import shlex
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import StreamingResponse

_LOADS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_OF_A_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_STOP_S = 60  # for open requests to end
_PATIENCE = 20  # times as long to take a replica back as to add one, which has to start: Ray's own


class Server:
    """A replica: the server beside it, and what Ray Serve asks of it."""

    async def __init__(self, command: Sequence[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the server and wait until it serves the model."""
        self._folder = tempfile.TemporaryDirectory()
        socket = str(Path(self._folder.name) / "http")
        self._process = _start([*command, "--uds", socket])
        self._session = aiohttp.ClientSession(
            "http://server",
            connector=aiohttp.UnixConnector(socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        while not await self._is_ready():
            self._check_process()
            await asyncio.sleep(0.1)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Hand a request on. Whoever leaves is noticed: the answer is closed then."""
        answer = await self._session.request(
            request.method,
            request.url.path,
            params=list(request.query_params.multi_items()),
            headers=[(k, v) for k, v in request.headers.items() if k not in _OF_A_HOP],
            data=await request.body(),
            allow_redirects=False,
        )
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_A_HOP}
        return StreamingResponse(_chunks(answer), answer.status, headers)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the requests that its server has, which `by_load` is told."""
        async with self._session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {"load": sum(float(x.split()[-1]) for x in lines if x.startswith(_LOADS))}

    async def check_health(self) -> None:
        """Raise RuntimeError when the server has ended, and another replica is needed."""
        self._check_process()

    async def __del__(self) -> None:
        """End the server when its requests have."""
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, _STOP_S)
        await self._session.close()

    async def _is_ready(self) -> bool:
        try:
            async with self._session.get("/health/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def _check_process(self) -> None:
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"the server has ended with status {status}")


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk


class ByLoad:
    """A replica for every so many requests that run or wait at the servers."""

    def __init__(self, requests: int) -> None:
        """`requests` of a replica."""
        self._requests = requests

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many replicas are wanted, and nothing to remember."""
        loads = context.aggregated_metrics.get("load", {}).values()
        wanted = math.ceil(sum(loads) / self._requests)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}


def application(args: argparse.Namespace) -> Any:
    """Return what `serve.run` takes."""
    scaling = AutoscalingConfig(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        metrics_interval_s=1,
        look_back_period_s=2,
        upscale_delay_s=args.delay_s,
        downscale_delay_s=_PATIENCE * args.delay_s,
        policy=AutoscalingPolicy(policy_function=ByLoad, policy_kwargs={"requests": args.requests}),
    )
    deployment = serve.deployment(
        Server,
        autoscaling_config=scaling,
        max_ongoing_requests=16 * args.requests,  # they wait in the server, by its own policy
        graceful_shutdown_timeout_s=2 * _STOP_S,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
    )
    return deployment.bind([*shlex.split(args.command), args.model, *args.flags])


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model")
    add("flags", nargs="*", help="of `surestep serve`, behind --")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--command", default="surestep serve", help="that starts a server")
    add("--requests", type=int, default=64, help="of a replica before there is another one")
    add("--min-replicas", type=int, default=1)
    add("--max-replicas", type=int, default=4)
    add("--delay-s", type=float, default=30, help="for which more must have been wanted")
    add("--cpus", type=float, default=1, help="of a replica")
    add("--gpus", type=float, default=0, help="of a replica")
    args = parser.parse_args()
    serve.start(http_options={"host": args.host, "port": args.port})
    with contextlib.suppress(KeyboardInterrupt):
        serve.run(application(args), blocking=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
