"""Measure the cost of a fault to a server's clients: a line per fault, with eight streams open.

python benchmarks/faults.py
python benchmarks/faults.py --name vllm --url http://127.0.0.1:8001 \
    --command "vllm serve MODEL --port 8001" --victim EngineCore --patience 60

The server is started anew for every fault. The streams run once without it, so that tokens that
are missing, repeated or others can be counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import machine
import psutil
import uvloop
from fault_stream import Stream, read
from launch import Launched, http_first_token, launched

INJECT = Path(__file__).parents[1] / "tests" / "support" / "faults" / "inject"
FOREVER_S = 3600
Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a fault. Times in seconds from the fault; None = there is no such thing."""

    server: str
    fault: str
    streams: int
    lost: int  # streams with an error, broken off, or without a token within the patience
    failure: str  # in the words of the first lost stream
    detect_s: float | None  # as the server itself says
    first_token_s: tuple[float | None, float | None]  # median and longest of the streams
    missing: int  # tokens that streams which ended well did not get
    repeated: int  # tokens that they got beyond what they asked for
    equal: int  # of the streams, those with exactly the tokens of the run without the fault


@dataclass(frozen=True, slots=True)
class Victim:
    """Finds who is to suffer, and how."""

    pids: Callable[[psutil.Process, Status], list[int]]
    number: signal.Signals


def ranks(_: psutil.Process, status: Status) -> list[int]:
    """The first rank process."""
    return [status["supervisors"][0]["rank_pid"]]


def all_ranks(_: psutil.Process, status: Status) -> list[int]:
    """Every rank process."""
    return [each["rank_pid"] for each in status["supervisors"]]


def scheduler(_: psutil.Process, status: Status) -> list[int]:
    """The scheduler."""
    return [status["pid"]]


def named(pattern: str) -> Callable[[psutil.Process, Status], list[int]]:
    """The first process below the server's whose title matches."""

    def find(root: psutil.Process, _: Status) -> list[int]:
        everyone = root.children(recursive=True)
        titles = [(each.pid, " ".join(each.cmdline()) or each.name()) for each in everyone]
        found = [pid for pid, title in titles if re.search(pattern, title)]
        if not found:
            raise SystemExit(f"no process matches {pattern!r}: {titles}")
        return found[:1]

    return find


SIGNALS = {
    "SIGKILL rank": Victim(ranks, signal.SIGKILL),
    "SIGKILL all ranks": Victim(all_ranks, signal.SIGKILL),
    "SIGSTOP rank": Victim(ranks, signal.SIGSTOP),
    "SIGKILL scheduler": Victim(scheduler, signal.SIGKILL),
    "SIGSTOP scheduler": Victim(scheduler, signal.SIGSTOP),
}
# See tests/support/faults/inject/sitecustomize.py: file, and what it says.
ORDERS: dict[str, tuple[str, dict[str, object]]] = {
    "event loop blocked": ("result-0", {"do": "sleep", "s": FOREVER_S}),
    "interpreter lock held": ("forward-0", {"do": "hold-the-lock", "s": FOREVER_S}),
    "exception in forward": ("forward-0", {"do": "raise"}),
    "out of memory": ("forward-0", {"do": "memory"}),
    "logits not finite": ("logits-0", {"do": "nan", "rows": 1 << 20}),
    "drafter raises": ("propose-0", {"do": "raise"}),
    "drafter stalls": ("propose-0", {"do": "sleep", "s": FOREVER_S}),
    "result lost": ("result-0", {"do": "drop"}),
}


async def measure(fault: str, args: argparse.Namespace) -> Cost:
    """Start the server, run the streams twice, the second time with the fault, and stop it."""
    with tempfile.TemporaryDirectory() as triggers:
        os.environ["FAULT_TRIGGERS"] = triggers  # for the server
        log = args.log_dir / f"{args.name}.log"
        async with launched(args.command, log) as server:
            await server.first_token(lambda: http_first_token(args.url), args.start_timeout)
            quiet = await streams(args, lambda: None)
            bad = [each.failure for each in quiet if each.failure]
            if bad:
                raise SystemExit(f"the run without a fault failed: {bad[0]}")
            status = await status_of(args.url)
            moments: list[float] = []

            def strike() -> None:
                moments.append(time.monotonic())
                inject(fault, server, status, Path(triggers), args)

            hurt = await streams(args, strike)
            if left := os.listdir(triggers):
                raise SystemExit(f"{fault} did not happen: no worker came by {left}")
            now = await status_of(args.url)
            return cost(fault, quiet, hurt, moments[0], detected(status, now), args)


def inject(
    fault: str, server: Launched, status: Status, triggers: Path, args: argparse.Namespace
) -> None:
    """Do it."""
    if fault in ORDERS:
        name, order = ORDERS[fault]
        scratch = triggers / "new"
        scratch.write_text(json.dumps(order))
        scratch.rename(triggers / name)
        return
    victim = SIGNALS.get(fault) or Victim(named(args.victim), signal.Signals[fault])
    for pid in victim.pids(psutil.Process(server.process.pid), status):
        os.kill(pid, victim.number)


async def streams(args: argparse.Namespace, strike: Callable[[], None]) -> list[Stream]:
    """All streams to their ends; `strike` is called when they have a quarter of their tokens."""
    total = 0
    wanted = args.streams * args.max_tokens // 4

    def arrived(count: int) -> None:
        nonlocal total
        before, total = total, total + count
        if before < wanted <= total:
            strike()

    timeout = aiohttp.ClientTimeout(total=None, sock_read=args.patience)
    async with aiohttp.ClientSession(args.url, timeout=timeout) as session:
        async with session.get("/v1/models", raise_for_status=True) as answer:
            model = (await answer.json())["data"][0]["id"]
        bodies = [body(model, index, args) for index in range(args.streams)]
        return list(await asyncio.gather(*(read(session, each, arrived) for each in bodies)))


def body(model: str, index: int, args: argparse.Namespace) -> dict[str, Any]:
    """Request of one stream."""
    return {
        "model": model,
        "prompt": f"{index + 1}. Once upon a time",
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def status_of(url: str) -> Status:
    """Status of Surestep's first scheduler; empty where there is none."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(url, timeout=timeout) as session,
            session.get("/status", raise_for_status=True) as answer,
        ):
            document = await answer.json()
            return document["schedulers"][0]["status"] or {}
    except (aiohttp.ClientError, TimeoutError):
        return {}


def detected(before: Status, after: Status) -> float | None:
    """Seconds until the server noticed, when it has a new incident."""
    old, new = (status.get("incidents", []) for status in (before, after))
    known = {incident["epoch"] for incident in old}
    fresh = [incident["detect_s"] for incident in new if incident["epoch"] not in known]
    return max(fresh, default=None)


def cost(
    fault: str,
    quiet: Sequence[Stream],
    hurt: Sequence[Stream],
    moment: float,
    detect_s: float | None,
    args: argparse.Namespace,
) -> Cost:
    """Compare the second run with the first."""
    lost = [stream for stream in hurt if stream.failure]
    good = [stream for stream in hurt if not stream.failure]
    waits = [wait for stream in good if (wait := stream.resumed_s(moment)) is not None]
    surplus = [len(stream.token_ids) - args.max_tokens for stream in good]
    return Cost(
        server=args.name,
        fault=fault,
        streams=len(hurt),
        lost=len(lost),
        failure=lost[0].failure if lost else "",
        detect_s=detect_s,
        first_token_s=(statistics.median(waits), max(waits)) if waits else (None, None),
        missing=sum(max(0, -count) for count in surplus),
        repeated=sum(max(0, count) for count in surplus),
        equal=sum(a.token_ids == b.token_ids for a, b in zip(quiet, hurt, strict=True)),
    )


def row(cost: Cost) -> str:
    """A line of the table."""
    median, longest = cost.first_token_s
    cells = (
        *(cost.server, cost.fault, f"{cost.lost} of {cost.streams}", _seconds(cost.detect_s)),
        *(_seconds(median), _seconds(longest), cost.missing, cost.repeated),
        *(f"{cost.equal} of {cost.streams}", cost.failure),
    )
    return f"| {' | '.join(map(str, cells))} |"


HEADER = """| server | fault | lost | detected, s | first token after it: median, s | longest, s \
| missing | repeated | equal | failure |
|---|---|---|---|---|---|---|---|---|---|"""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--name", default="surestep")
    add("--url", default="http://127.0.0.1:8000")
    add("--command", default=f"{sys.executable} -m surestep_cli serve --port 8000")
    add("--victim", help="of another server: pattern that the title of the process to hit matches")
    add("--faults", nargs="+", help=f"of: {', '.join([*SIGNALS, *ORDERS])}; with --victim: signals")
    add("--streams", type=int, default=8)
    add("--max-tokens", type=int, default=256)
    add("--patience", type=float, default=60.0, help="seconds without a token: the stream is lost")
    add("--start-timeout", type=float, default=600.0, help="seconds to the first token")
    add("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="of the server's output")
    add("--json", type=Path, default=Path("/dev/stderr"), help="each fault as it ends")
    args = parser.parse_args(argv)
    others = ["SIGKILL", "SIGSTOP"] if args.victim else [*SIGNALS, *ORDERS]
    args.faults = args.faults or others
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure every fault and print the table."""
    args = parse(argv)
    if not args.victim:
        paths = (str(INJECT), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    costs = []
    for fault in args.faults:
        costs.append(uvloop.run(measure(fault, args)))
        line = {**asdict(costs[-1]), "machine": machine.describe()}
        with args.json.open("a") as lines:
            print(json.dumps(line), file=lines)
    print(HEADER, *map(row, costs), sep="\n")


if __name__ == "__main__":
    main()
