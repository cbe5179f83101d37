"""Measure the cost of large, slow and mean clients to a server and its other clients.

python benchmarks/client_abuse.py --command "surestep serve --port 8000"
python benchmarks/client_abuse.py --name vllm --url http://127.0.0.1:8001 \
    --command "vllm serve MODEL --port 8001"

The server is started anew for each part, or with --pid it runs already. HTTP is all that is used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import machine
import psutil
import uvloop
from launch import http_first_token, launched
from nasty_bodies import Nasty, nasty_bodies
from slow_clients import READERS, be, never_reads_pipelined

PROBE = Path(__file__).with_name("probe.py")
JSON = {"content-type": "application/json"}
PROMPT_BYTES = 30 << 20
NASTY_BYTES = 31 << 20
_QUIET_S = 5.0  # for what a server does after its start
Figures = dict[str, Any]


class Watch:
    """Probes /health from another process, and looks at the memory of the server's processes."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self.waits: list[tuple[float, float]] = []  # when asked, seconds until the answer
        self.answered = asyncio.Event()  # by the server, once more
        self.bytes_at_first = self.most_bytes = self.memory()

    def memory(self) -> int:
        """Bytes of the server and all it has started."""
        total = 0
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def longest(self, since: float) -> float:
        """Return the longest wait for answers that came since a moment."""
        return max((took for began, took in self.waits if began + took >= since), default=0.0)

    async def read(self, output: asyncio.StreamReader) -> None:
        """Lines of the probe."""
        async for line in output:
            began, took = line.split()
            self.waits.append((float(began), float(took)))
            self.answered.set()

    async def look(self) -> None:
        """Twenty times a second."""
        while True:
            self.most_bytes = max(self.most_bytes, self.memory())
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def watching(url: str, pid: int) -> AsyncIterator[Watch]:
    """A watch over a server."""
    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROBE), f"{url}/health"), stdout=asyncio.subprocess.PIPE
    )
    assert probe.stdout is not None
    await asyncio.sleep(_QUIET_S)
    watch = Watch(psutil.Process(pid))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(watch.read(probe.stdout)), tasks.create_task(watch.look())]
        await settled(watch)
        yield watch
        for task in running:
            task.cancel()
    probe.kill()
    await probe.wait()


async def answer(args: argparse.Namespace, nasty: Nasty) -> tuple[str, float]:
    """Status of a request, or what went wrong with it, and its seconds."""
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=args.patience)
    try:
        async with (
            aiohttp.ClientSession(args.url, timeout=timeout) as session,
            session.post(nasty.path, data=nasty.body, headers=JSON) as response,
        ):
            await response.read()
            status = str(response.status)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        status = type(error).__name__
    return status, time.monotonic() - began


async def settled(watch: Watch) -> None:
    """Wait until a probe that was sent later than now has been answered."""
    now = time.monotonic()
    while not any(sent > now for sent, _ in watch.waits[-5:]):
        watch.answered.clear()
        await watch.answered.wait()


async def long_prompt(args: argparse.Namespace, pid: int) -> Figures:
    """A prompt of 30 MB."""
    text = b"the quick brown " * (PROMPT_BYTES // 16)
    nasty = Nasty("prompt", "/v1/completions", b'{"prompt": "%b", "max_tokens": 1}' % text)
    async with watching(args.url, pid) as watch:
        began = time.monotonic()
        status, seconds = await answer(args, nasty)
        await settled(watch)
        return {
            "answer": status,
            "seconds": round(seconds, 2),
            "memory_growth_mb": (watch.most_bytes - watch.bytes_at_first) >> 20,
            "longest_health_s": round(watch.longest(began), 3),
        }


async def nasty(args: argparse.Namespace, pid: int) -> Figures:
    """Bodies of 31 MB, one after the other."""
    figures = []
    async with watching(args.url, pid) as watch:
        for body in nasty_bodies(NASTY_BYTES):
            began = time.monotonic()
            status, seconds = await answer(args, body)
            await settled(watch)
            longest = watch.longest(began)
            figures.append((longest, body.name))
            line = {"body": body.name, "answer": status, "seconds": round(seconds, 2)}
            line |= {"longest_health_s": round(longest, 3)}
            print(json.dumps(line), file=sys.stderr, flush=True)
        longest, name = max(figures)
        return {
            "bodies": len(figures),
            "longest_health_s": round(longest, 3),
            "worst_body": name,
            "median_health_s": round(statistics.median(wait for wait, _ in figures), 3),
            "memory_growth_mb": (watch.most_bytes - watch.bytes_at_first) >> 20,
        }


async def slow(args: argparse.Namespace, pid: int) -> Figures:
    """A thousand slow clients, each coming again when it is sent away, and a few honest ones."""
    at = urlsplit(args.url)
    address = (at.hostname or "", at.port or 80)
    kinds = (*READERS, never_reads_pipelined)
    failures: list[str] = []
    took: list[float] = []
    ends = time.monotonic() + args.seconds

    async def stay(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                await be(kinds[number % len(kinds)], address)
            await asyncio.sleep(0.5)

    async def ask() -> None:
        body = Nasty("honest", "/v1/completions", b'{"prompt": "Hello", "max_tokens": 4}')
        while time.monotonic() < ends:
            status, seconds = await answer(args, body)
            (took.append(seconds) if status == "200" else failures.append(status))

    async with asyncio.TaskGroup() as tasks:
        crowd = [tasks.create_task(stay(number)) for number in range(args.clients)]
        await asyncio.sleep(2)
        async with asyncio.TaskGroup() as honest:
            for _ in range(args.honest):
                honest.create_task(ask())
        files = psutil_files(pid)
        for task in crowd:
            task.cancel()
    quantiles = statistics.quantiles(took, n=100) if len(took) > 1 else [float("nan")] * 99
    return {
        "clients": args.clients,
        "honest_served": len(took),
        "honest_failed": len(failures),
        "failures": sorted(set(failures)),
        "latency_s": {"p50": round(quantiles[49], 3), "p99": round(quantiles[98], 3)}
        | {"max": round(max(took, default=float("nan")), 3)},
        "open_files": files,
    }


def psutil_files(pid: int) -> int:
    """Descriptors of the process that has most of them: the one that serves HTTP."""
    root = psutil.Process(pid)
    every = [root, *root.children(recursive=True)]
    return max(process.num_fds() for process in every if process.is_running())


Part = Callable[[argparse.Namespace, int], Awaitable[Figures]]
PARTS: dict[str, Part] = {"prompt": long_prompt, "slow": slow, "nasty": nasty}


async def measure(name: str, args: argparse.Namespace) -> Figures:
    """Run a part, against a server of its own unless a server runs already."""
    if args.pid is not None:
        return await PARTS[name](args, args.pid)
    async with launched(args.command, args.log_dir / f"{args.name}.log") as server:
        await server.first_token(lambda: http_first_token(args.url), args.start_timeout)
        return await PARTS[name](args, server.process.pid)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--name", default="surestep")
    add("--url", default="http://127.0.0.1:8000")
    add("--command", default=f"{sys.executable} -m surestep_cli serve --port 8000")
    add("--pid", type=int, help="of a server that runs already, with all it has started")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--clients", type=int, default=1000, help="slow ones")
    add("--honest", type=int, default=4, help="honest clients beside them")
    add("--seconds", type=float, default=30.0, help="that the slow ones stay")
    add("--patience", type=float, default=300.0, help="seconds to wait for an answer")
    add("--start-timeout", type=float, default=600.0, help="seconds to the first token")
    add("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="of the server's output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """A line of JSON for each part."""
    args = parse(argv)
    for name in args.parts:
        figures = uvloop.run(measure(name, args))
        line = {"server": args.name, "part": name, **figures, "machine": machine.describe()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
