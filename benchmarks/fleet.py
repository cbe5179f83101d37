"""Past one machine: what requests cost gateway and scheduler, and which of them fills first.

    python benchmarks/fleet.py costs MODEL --out benchmarks/results/fleet_costs.json
    python benchmarks/fleet.py simulate --gpus 1 10 100 1000

`costs` puts loads of several kinds on gateways before one scheduler and fits the processor time of
each process to what was asked. `simulate` lets a fleet with those costs serve requests that arrive
at random, and prints a row of a table per number of GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import math
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import machine
import numpy as np
import uvloop
from launch import cpu_seconds, http_first_token
from surestep_cli.bench.load import LoadReport, run_load
from surestep_cli.serve.ports import free_addresses
from surestep_common.process import python_module
from surestep_gateway.schedulers.pool import RoutingCandidate, choose

RESULTS = Path(__file__).with_name("results") / "fleet_costs.json"
US = 1e-6
# Milliseconds of a decode step by rows, bfloat16, context 1024, and microseconds per prompt token:
# 1B as it was measured on an H200 (docs/run/gpu.md), 8B as results/gpu_model.json models it, with
# prompts as many times slower as it has parameters.
STEP_MS = {
    "1B": {1: 1.29, 8: 1.42, 64: 2.58, 256: 6.69},
    "8B": {1: 4.718, 8: 5.148, 64: 8.594, 256: 20.408},
}
PROMPT_US = {"1B": 5.4, "8B": 35.0}
START_S = 300
PROBE_S = 1.0  # between two looks of a gateway at a scheduler
BUSY = 0.7  # of its time that a gateway may be
SLACK, FACTOR = 4, 1.5  # of the gateway's choice: what a cached prefix is worth


class Load(NamedTuple):
    """What one measurement asks for, of how many gateways."""

    gateways: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int


LOADS = (
    *(Load(1, 32, 16, 8), Load(1, 32, 16, 64), Load(1, 32, 160, 8)),
    *(Load(1, 4, 16, 64), Load(4, 32, 16, 64)),
)


class Services:
    """A scheduler with its worker, and the gateways before it, each a process of its own."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model, self._logs = str(model), logs
        self._environ = {**os.environ, "SURESTEP_GRPC_SECRET": secrets.token_hex(16)}
        self._at = {
            name: address.rpartition(":")[2]
            for name, address in free_addresses(
                dict.fromkeys(("worker", "supervisor", "scheduler"), 1)
            ).items()
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        worker, supervisor = (f"127.0.0.1:{self._at[n]}" for n in ("worker", "supervisor"))
        listen = "--worker-listen", worker, "--supervisor-listen", supervisor
        self._start("worker", "--model", self._model, *listen)
        below = "--worker-addresses", worker, "--supervisor-addresses", supervisor
        self._start("scheduler", "--scheduler-listen", f"0.0.0.0:{self._at['scheduler']}", *below)

    def _start(self, name: str, *flags: str) -> None:
        """Start one; what is behind a dash in its name only tells it from others."""
        command = python_module(f"surestep_{name.partition('-')[0]}", *flags)
        with (self._logs / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self._environ, stdout=log, stderr=subprocess.STDOUT
            )

    def gateway(self, name: str, num_schedulers: int = 1) -> str:
        """Start a gateway that takes the scheduler's addresses for as many replicas; its URL."""
        port = free_addresses({"port": 1})["port"].rpartition(":")[2]
        urls = [f"127.0.0.{n + 1}:{self._at['scheduler']}" for n in range(num_schedulers)]
        self._start(name, "--model", self._model, "--port", port, "--scheduler-url", ",".join(urls))
        return f"http://127.0.0.1:{port}"

    def used(self) -> dict[str, float]:
        """Processor time of each by now, in seconds."""
        return {name: sum(cpu_seconds(p.pid).values()) for name, p in self.processes.items()}

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def services(model: Path) -> Iterator[Services]:
    """Run them while the context lasts."""
    with tempfile.TemporaryDirectory() as logs:
        running = Services(model, Path(logs))
        try:
            yield running
        finally:
            running.stop()


async def until_ready(url: str) -> None:
    """Wait for a gateway's first token. Raise TimeoutError."""
    async with asyncio.timeout(START_S):
        while not await http_first_token(url):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.2)


async def num_steps(url: str) -> float:
    """Steps of the scheduler so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(
        float(x.split()[-1]) for x in lines if x.startswith("vllm:iteration_tokens_total_count")
    )


async def put(load: Load, urls: Sequence[str], requests: int, seed: int) -> list[LoadReport]:
    """Put a load on its gateways, each its share."""
    return await asyncio.gather(
        *(
            run_load(
                url,
                concurrency=max(1, load.concurrency // load.gateways),
                num_requests=max(1, requests // load.gateways),
                max_tokens=load.max_tokens,
                prompt_tokens=load.prompt_tokens,
                seed=seed + index,
                num_warmup=2,
            )
            for index, url in enumerate(urls[: load.gateways])
        )
    )


async def measured(running: Services, load: Load, urls: list[str], args: Any) -> dict[str, float]:
    """What a load asked for, and the seconds of processor time that it took."""
    seed = hash(load) % 2**31
    await put(load, urls, load.concurrency, seed + 1000)
    await asyncio.sleep(2 * PROBE_S)  # until the count of steps is told
    before, steps, began = running.used(), await num_steps(urls[0]), time.monotonic()
    reports = await put(load, urls, args.num_requests, seed)
    await asyncio.sleep(2 * PROBE_S)
    after = running.used()
    if any(report.num_errors for report in reports):
        raise RuntimeError([report.error_sample for report in reports])
    steps = await num_steps(urls[0]) - steps
    used = {name: after[name] - before[name] for name in after}
    return {
        "requests": sum(report.num_requests for report in reports),
        "prompt_tokens": sum(report.num_requests * report.prompt_tokens for report in reports),
        "tokens": sum(report.output_tokens for report in reports),
        "looks": (time.monotonic() - began) / PROBE_S * load.gateways,
        "steps": steps,
        "messages": steps * load.gateways,
        "gateway_s": sum(s for name, s in used.items() if name.startswith("gateway")),
        "scheduler_s": used["scheduler"],
        "tok_s": sum(report.output_tok_s for report in reports),
    }


def fitted(
    loads: Sequence[dict[str, float]], process: str, look_us: float, *terms: str
) -> dict[str, float]:
    """Microseconds per term that explain the process's time best, but for the looks of gateways;
    none is below zero."""
    kept = list(terms)
    looks = np.array([load["looks"] for load in loads]) * look_us * US
    seconds = np.maximum(np.array([load[f"{process}_s"] for load in loads]) - looks, 0.01)
    while True:
        columns = np.array([[load[term] for term in kept] for load in loads])
        # Shares of each load's time: a long one does not count for more.
        found = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(loads)), rcond=None)[0]
        if found.min() >= 0:
            return dict.fromkeys(terms, 0.0) | dict(zip(kept, np.round(found / US, 1), strict=True))
        kept.pop(int(found.argmin()))


async def probe_cost(running: Services, num_schedulers: int, seconds: float) -> dict[str, float]:
    """Microseconds of a look at a scheduler, at either side, by a gateway that only looks."""
    url = running.gateway("gateway-of-many", num_schedulers)
    await until_ready(url)
    await asyncio.sleep(10 * PROBE_S)  # what is done once
    before = running.used()
    await asyncio.sleep(seconds)
    after = running.used()
    used = {name: after[name] - before[name] for name in after}
    looks = num_schedulers * seconds / PROBE_S
    idle = used["gateway-0"]
    return {
        "gateway": round((used["gateway-of-many"] - idle) / looks / US, 1),
        "scheduler": round(used["scheduler"] / looks / US, 1),
    }


def choice_cost(num_schedulers: int = 1000, times: int = 50) -> float:
    """Microseconds per scheduler that a choice takes, at the best of times."""
    candidates = [
        RoutingCandidate(f"10.0.{n // 250}.{n % 250}:50051", n % 7) for n in range(num_schedulers)
    ]
    taken = []
    for index in range(times):
        began = time.thread_time()
        choose(index.to_bytes(8), candidates)
        taken.append(time.thread_time() - began)
    return round(min(taken) / num_schedulers / US, 3)


async def costs(args: argparse.Namespace) -> None:
    """Measure, fit and write the file that `simulate` reads."""
    before = machine.describe()
    with services(args.model) as running:
        urls = [running.gateway(f"gateway-{n}") for n in range(max(x.gateways for x in args.loads))]
        for url in urls:
            await until_ready(url)
        rounds = [
            [await measured(running, load, urls, args) for load in args.loads]
            for _ in range(args.rounds)
        ]
        probe = await probe_cost(running, args.schedulers, args.idle_s)
    # What else ran on the machine only adds.
    loads = [
        min(ones, key=lambda one: one["gateway_s"] + one["scheduler_s"])
        for ones in zip(*rounds, strict=True)
    ]
    asked = "requests", "prompt_tokens", "tokens"
    ours, theirs = probe["gateway"], probe["scheduler"]
    found = {
        "gateway": fitted(loads, "gateway", ours, *asked, "messages"),
        "scheduler": fitted(loads, "scheduler", theirs, *asked, "steps", "messages"),
        "probe": probe,
        "choice_per_scheduler": choice_cost(),
    }
    print(json.dumps(found, indent=1))
    about = before | {"load_average_after": machine.describe()["load_average"]}
    machine.write(args.out, about, us=found, loads=loads)


class Replica:
    """A scheduler and its GPU: rows that share one clock of tokens, and requests without a row."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rows: list[tuple[float, int]] = []  # (clock when it ends, request), a heap
        self.waiting: list[tuple[int, float]] = []  # (request, seconds of its prompt), in turn
        self.clock = 0.0  # tokens that each row has had
        self.now = 0.0  # when that was
        self.prompt_s = 0.0  # of prompts that are still to be computed
        self.seen: set[int] = set()  # groups whose prefix is cached
        self.scheduler_s = 0.0
        self.version = 0  # of its next end

    @property
    def load(self) -> int:
        """Requests that run and wait."""
        return len(self.rows) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Let time pass: first for prompts, then for steps."""
        passed, self.now = now - self.now, now
        prompts = min(passed, self.prompt_s)
        self.prompt_s -= prompts
        if self.rows:
            step_s, busy_s = self.fleet.step(len(self.rows))
            steps = (passed - prompts) / step_s
            self.clock += steps
            self.scheduler_s += steps * busy_s

    def admit(self) -> None:
        """Give rows to requests that wait."""
        while self.waiting and len(self.rows) < self.fleet.args.rows:
            request, prompt_s = self.waiting.pop(0)
            self.prompt_s += prompt_s
            self.fleet.waits.append((self.now, self.now - self.fleet.arrived[request]))
            heapq.heappush(self.rows, (self.clock + self.fleet.args.tokens, request))

    def next_end(self) -> float:
        """When the next request ends, if nothing comes between."""
        if not self.rows:
            return math.inf
        step_s, _ = self.fleet.step(len(self.rows))
        return self.now + self.prompt_s + max(0.0, self.rows[0][0] - self.clock) * step_s


class Fleet:
    """Replicas and gateways, and the requests of one simulation."""

    def __init__(self, gpus: int, us: dict[str, Any], args: argparse.Namespace) -> None:
        self.args, self.us, self.gpus = args, us, gpus
        self._steps = STEP_MS[args.model]
        per_request_s = args.tokens * self._gpu_s(args.rows) / args.rows + self.prompt_s(
            cached=True
        )
        self.rate = args.share * gpus / per_request_s  # requests a second
        self.num_gateways = args.gateways or self.enough_gateways()
        self._memo: dict[int, tuple[float, float]] = {}
        self.replicas = [Replica(self) for _ in range(gpus)]
        self.believed = np.zeros((self.num_gateways, gpus))
        self.arrived: list[float] = []
        self.waits: list[tuple[float, float]] = []  # (when, seconds until it had a row)
        self.hits = 0

    def _gpu_s(self, rows: float) -> float:
        """Seconds of a step."""
        return float(np.interp(rows, list(self._steps), list(self._steps.values()))) / 1e3

    def prompt_s(self, *, cached: bool) -> float:
        """Seconds of the GPU for a prompt, whose first half others have as well."""
        share = 0.5 if cached else 1.0
        return float(self.args.prompt_tokens * share * PROMPT_US[self.args.model] * US)

    def enough_gateways(self) -> int:
        """As few as are busy for 0.7 of their time; where there are never enough, one per GPU."""
        counts = range(min(2, self.gpus), 10 * self.gpus + 2)
        return next((n for n in counts if self.gateway_busy(n) <= BUSY), self.gpus)

    def gateway_busy(self, gateways: int) -> float:
        """Share of its time that a gateway needs."""
        us, args = self.us["gateway"], self.args
        requests = us["requests"] + us["prompt_tokens"] * args.prompt_tokens + self.choice_us()
        rows = args.share * args.rows
        tokens = us["tokens"] + us["messages"] * met(gateways, rows) / rows
        work_s = (requests + tokens * args.tokens) * US
        return float(work_s * self.rate / gateways + self.probe_busy())

    def choice_us(self) -> float:
        """Microseconds of a gateway to choose a scheduler."""
        return float(self.us["choice_per_scheduler"] * self.gpus)

    def probe_busy(self) -> float:
        """Share of its time that a gateway needs to look at all schedulers."""
        return float(self.us["probe"]["gateway"] * self.gpus * US / PROBE_S)

    def step(self, rows: int) -> tuple[float, float]:
        """Seconds from step to step with so many rows, and of them the scheduler's."""
        if rows not in self._memo:
            us, args = self.us["scheduler"], self.args
            looked_at = self.num_gateways * self.us["probe"]["scheduler"] * US / PROBE_S
            of_request = (us["requests"] + us["prompt_tokens"] * args.prompt_tokens) / args.tokens
            busy_us = us["steps"] + us["messages"] * met(self.num_gateways, rows)
            busy_us += (us["tokens"] + of_request) * rows
            busy_s = busy_us * US / max(1e-3, 1 - looked_at)
            self._memo[rows] = max(self._gpu_s(rows), busy_s), busy_s
        return self._memo[rows]


def met(gateways: int, rows: float) -> float:
    """Gateways of which a step has a row, each of which gets a message."""
    return float(gateways * (1 - (1 - 1 / gateways) ** rows))


def simulated(gpus: int, us: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Let a fleet serve for a while; the first half only fills it."""
    fleet, rng = Fleet(gpus, us, args), np.random.default_rng(args.seed)
    weights = 1 / np.arange(1, args.groups + 1)
    shares = np.cumsum(weights / weights.sum())
    home = rng.integers(gpus, size=args.groups)
    ties = rng.random(2 * gpus)  # whom a prefix ranks first among equals
    gateway_of, group_of = list[int](), list[int]()
    ended = 0
    events: list[tuple[float, int, int, int]] = []  # (when, kind, replica or gateway, version)
    arrival, probe, end = range(3)
    heapq.heappush(events, (0.0, arrival, 0, 0))
    for gateway in range(fleet.num_gateways):
        heapq.heappush(events, (PROBE_S * gateway / fleet.num_gateways, probe, gateway, 0))
    while events[0][0] < args.seconds:
        now, kind, index, version = heapq.heappop(events)
        if kind == probe:
            fleet.believed[index] = [replica.load for replica in fleet.replicas]
            heapq.heappush(events, (now + PROBE_S, probe, index, 0))
            continue
        if kind == end:
            replica = fleet.replicas[index]
            if version != replica.version:
                continue
            replica.advance(now)
            _, request = heapq.heappop(replica.rows)
            fleet.believed[gateway_of[request], index] -= 1
            ended += now > args.seconds / 2
        else:
            heapq.heappush(events, (now + rng.exponential(1 / fleet.rate), arrival, 0, 0))
            request, gateway = len(fleet.arrived), int(rng.integers(fleet.num_gateways))
            group = int(np.searchsorted(shares, rng.random()))
            fleet.arrived.append(now)
            gateway_of.append(gateway)
            group_of.append(group)
            index = chosen(fleet.believed[gateway], int(home[group]), ties, group % gpus)
            fleet.believed[gateway, index] += 1
            replica = fleet.replicas[index]
            replica.advance(now)
            replica.waiting.append((request, fleet.prompt_s(cached=group in replica.seen)))
            fleet.hits += group in replica.seen
            replica.seen.add(group)
        replica.admit()
        replica.version += 1
        heapq.heappush(events, (replica.next_end(), end, index, replica.version))
    return told(fleet, gpus, ended)


def chosen(believed: Any, home: int, ties: Any, first: int) -> int:
    """The replica as a gateway chooses it, by the loads that it believes in."""
    least = int(np.argmin(believed + ties[first : first + len(believed)]))
    return home if believed[home] <= SLACK + FACTOR * believed[least] else least


def told(fleet: Fleet, gpus: int, ended: int) -> dict[str, float]:
    """A row of the table."""
    args, num = fleet.args, fleet.num_gateways
    for replica in fleet.replicas:
        replica.advance(args.seconds)
    scheduler = max(replica.scheduler_s for replica in fleet.replicas) / args.seconds
    scheduler += num * fleet.us["probe"]["scheduler"] * US / PROBE_S
    late = [wait for when, wait in fleet.waits if when > args.seconds / 2] or [math.inf]
    wait_s = float(np.quantile(late, 0.99))
    busy = fleet.gateway_busy(num)
    return {
        "GPUs": gpus,
        "requests/s": round(fleet.rate),
        "gateways": num,
        "busy": round(busy, 2),
        "of it looking": round(fleet.probe_busy(), 2),
        "choosing": round(fleet.choice_us() * US * fleet.rate / num, 2),
        "schedulers busy": round(scheduler, 2),
        "connections": gpus * num,
        "prefix hits": round(fleet.hits / len(fleet.arrived), 2),
        "answered": round(ended / (fleet.rate * args.seconds / 2), 2),
        "wait p99 s": round(wait_s, 3),
        "serves": float(busy < 1 and scheduler < 1 and wait_s < 1),
    }


def faster(us: Any, factor: float) -> Any:
    """Costs on processors that are so many times as fast."""
    if isinstance(us, dict):
        return {name: faster(value, factor) for name, value in us.items()}
    return us / factor


def simulate(args: argparse.Namespace) -> None:
    """Print the table."""
    us = faster(json.loads(args.costs.read_text())["us"], args.faster)
    for index, gpus in enumerate(args.gpus):
        row = simulated(gpus, us, args)
        if not index:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        row_of_words = [*(f"{value:g}" for value in row.values())][:-1]
        print(f"| {' | '.join(row_of_words)} | {'yes' if row['serves'] else 'no'} |", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("costs", help="measure").add_argument
    add("model", type=Path)
    add("--out", type=Path)
    add(
        "--loads",
        type=lambda x: [Load(*map(int, x.split(",")))],
        nargs="+",
        help="of Load's fields",
    )
    add("--num-requests", type=int, default=128)
    add("--rounds", type=int, default=2)
    add("--schedulers", type=int, default=32, help="of the gateway that does nothing but look")
    add("--idle-s", type=float, default=20)
    add = commands.add_parser("simulate", help="a fleet").add_argument
    add("--costs", type=Path, default=RESULTS)
    add("--gpus", type=int, nargs="+", default=[1, 10, 100, 1000])
    add("--faster", type=float, default=1, help="than what the costs were measured on")
    add("--gateways", type=int, help="default: as many as need 0.7 of their time")
    add("--model", choices=STEP_MS, default="8B")
    add("--rows", type=int, default=256, help="of a GPU")
    add("--share", type=float, default=0.8, help="of what the GPUs could do")
    add("--tokens", type=int, default=200, help="of an answer")
    add("--prompt-tokens", type=int, default=500, help="half of which others have as well")
    add("--groups", type=int, default=5000, help="of requests with one beginning, by Zipf's law")
    add("--seconds", type=float, default=30)
    add("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of both."""
    args = parse(argv)
    if args.command == "costs":
        args.loads = [load for [load] in args.loads] if args.loads else LOADS
        uvloop.run(costs(args))
    else:
        simulate(args)


if __name__ == "__main__":
    main()
