"""Costs of a request to gateway and scheduler, of which `fleet.py` makes a fleet; writes JSON.

    python benchmarks/fleet_costs.py MODEL --out benchmarks/results/fleet_costs.json

Loads of several kinds are put on gateways before one scheduler, and the processor time of each
process is fitted to what was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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

US = 1e-6
START_S = 300
PROBE_S = 1.0  # between two looks of a gateway at a scheduler


class Load(NamedTuple):
    """Load of one measurement, of how many gateways."""

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
        """Return the processor time of each by now, in seconds."""
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
    """Return the steps of the scheduler so far."""
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
    """Return what a load asked for, and the seconds of processor time that it took."""
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
    """Return microseconds per term that explain the process's time best, looks of gateways aside;
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
    """Return microseconds of a look, at either side, by a gateway that only looks."""
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
    """Return microseconds per scheduler that a choice takes, at the best of times."""
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
    """Measure, fit and write the file that `fleet.py` reads."""
    before = machine.describe()
    with services(args.model) as running:
        urls = [running.gateway(f"gateway-{n}") for n in range(max(x.gateways for x in LOADS))]
        for url in urls:
            await until_ready(url)
        rounds = [
            [await measured(running, load, urls, args) for load in LOADS]
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


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--out", type=Path)
    add("--num-requests", type=int, default=128)
    add("--rounds", type=int, default=2)
    add("--schedulers", type=int, default=32, help="of the gateway that does nothing but look")
    add("--idle-s", type=float, default=20)
    uvloop.run(costs(parser.parse_args()))


if __name__ == "__main__":
    main()
