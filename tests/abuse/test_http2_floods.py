"""Floods of HTTP/2 frames at the gRPC services, of strangers: a neighbour's stream goes on."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from support.clients.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    connection,
    field,
    frame,
    head,
    send,
    stream_ids,
)
from support.processes.stack import Stack, serve
from surestep_cli.api.stream import events

pytestmark = [pytest.mark.timeout(120), pytest.mark.rotates(2, turn=1)]
_FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "0.01")
_STREAMS = 20_000
_FLOOD_S = 20.0
_GAP_S = 10.0  # as long as a busy machine may take; 0.3 s where nothing else runs on it
_MOST_GROWN = 400  # MiB; pings in the millions take 240 for a while
_MOST_LOGGED = 16 << 10  # bytes
_HEALTH = "/grpc.health.v1.Health"
_OURS = {"Scheduler": "Info", "Supervisor": "Status", "Worker": "Info"}
_EMPTY = bytes(5)  # a gRPC message


class Served(NamedTuple):
    """A server, the addresses of its services and their processes."""

    stack: Stack
    addresses: dict[str, str]
    processes: list[psutil.Process]

    @property
    def logged(self) -> int:
        """Bytes in all logs."""
        return sum(path.stat().st_size for path in self.stack.logs.rglob("*.log"))


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model, tmp_path_factory.mktemp("logs"), *_FLAGS) as stack:
        scheduler = stack.scheduler()
        supervisor = scheduler["supervisors"][0]
        addresses = {
            "Scheduler": scheduler["address"],
            "Supervisor": supervisor["address"],
            "Worker": supervisor["rank_address"],
        }
        pids = scheduler["pid"], supervisor["pid"], supervisor["rank_pid"]
        yield Served(stack, addresses, list(map(psutil.Process, pids)))


def of_streams(path: str | None, *each: tuple[int, int, bytes]) -> Callable[[str], bytes]:
    """Calls, each a head and these frames (kind, flags, body); None = the service's own method."""

    def flood(service: str) -> bytes:
        block = head(path or f"/surestep.v1.{service}/{_OURS[service]}")
        all_frames = ((HEADERS, END_HEADERS, block), *each)
        streams = itertools.islice(stream_ids(), _STREAMS)
        return b"".join(frame(k, flags, s, body) for s in streams for k, flags, body in all_frames)

    return flood


def repeated(*once: bytes, first: bytes = b"", times: int = 200_000) -> Callable[[str], bytes]:
    """The same frames again and again."""
    return lambda service: first + b"".join(once) * times


_CANCEL = (RST_STREAM, 0, struct.pack(">I", 8))
_UNENDED = frame(HEADERS, 0, 1, head(f"{_HEALTH}/Check"))
_FLOODS = {
    "resets": of_streams(None, _CANCEL),
    "resets of health checks": of_streams(f"{_HEALTH}/Check", (DATA, END_STREAM, _EMPTY), _CANCEL),
    "resets of what is unknown": of_streams("/no.such.Service/Method", _CANCEL),
    "calls without a message": of_streams(None),
    "watches": of_streams(f"{_HEALTH}/Watch", (DATA, END_STREAM, _EMPTY)),
    "pings": repeated(frame(PING, body=bytes(8))),
    "settings": repeated(frame(SETTINGS, body=struct.pack(">HI", 4, 65535))),
    "continuations": repeated(
        frame(CONTINUATION, 0, 1, field("x", "y" * 200)), first=_UNENDED, times=50_000
    ),
    "empty continuations": repeated(frame(CONTINUATION, 0, 1), first=_UNENDED),
}


@pytest.fixture(scope="module")
def quiet(served: Served) -> tuple[int, ...]:
    """The tokens of a stream that nobody has disturbed."""
    ids, _ = neighbour(served.stack)
    return ids


def neighbour(stack: Stack) -> tuple[tuple[int, ...], float]:
    """The tokens of a stream, and the longest wait for some."""
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 100,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids, times = list[int](), [time.monotonic()]
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for event in events(line.encode() for line in answer.iter_lines()):
            times.append(time.monotonic())
            (choice,) = event["choices"]
            ids += choice["token_ids"]
    assert len(ids) == body["max_tokens"]
    return tuple(ids), max(b - a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kind", _FLOODS)
def test_a_neighbours_stream_goes_on(served: Served, quiet: tuple[int, ...], kind: str) -> None:
    before = [process.memory_info().rss for process in served.processes]
    logged = served.logged
    with ThreadPoolExecutor() as pool:
        floods = [
            pool.submit(_flood, address, _FLOODS[kind](service))
            for service, address in served.addresses.items()
            for _ in range(2)
        ]
        answers, gaps, most = _meanwhile(served, floods, before)
    assert answers == {quiet}
    assert max(gaps) < _GAP_S
    assert all(process.is_running() for process in served.processes)
    scheduler = served.stack.scheduler()
    assert scheduler["pid"] == served.processes[0].pid
    assert scheduler["supervisors"][0]["rank_pid"] == served.processes[2].pid
    grown = [(high - low) >> 20 for high, low in zip(most, before, strict=True)]
    assert max(grown) < _MOST_GROWN, f"MiB: {grown}"
    assert served.logged - logged < _MOST_LOGGED, served.stack.tail()


def _flood(address: str, data: bytes) -> None:
    with connection(address) as end:
        send(end, data, _FLOOD_S)


def _meanwhile(
    served: Served, floods: list[Future[None]], before: list[int]
) -> tuple[set[tuple[int, ...]], list[float], list[int]]:
    """The neighbour's tokens and gaps while the floods last, and the most memory of each process."""
    answers, gaps, most = set[tuple[int, ...]](), list[float](), before
    while not all(flood.done() for flood in floods) or not gaps:
        ids, gap = neighbour(served.stack)
        answers.add(ids)
        gaps.append(gap)
        most = [max(m, p.memory_info().rss) for m, p in zip(most, served.processes, strict=True)]
    for flood in floods:
        flood.result()
    return answers, gaps, most
