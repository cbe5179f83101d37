"""Simulation of a fleet with the costs that fleet_costs.py measured: which process fills first.

    python benchmarks/fleet.py --gpus 1 10 100 1000

A fleet of gateways and schedulers serves requests that arrive at random. Prints a row of a table
per number of GPUs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fleet_costs import PROBE_S, US
from surestep_gateway.schedulers.pool import FACTOR, OTHERS, SLACK

RESULTS = Path(__file__).with_name("results") / "fleet_costs.json"
# Milliseconds of a decode step by rows, bfloat16, context 1024, and microseconds per prompt token:
# 1B as it was measured on an H200 (docs/run/gpu.md), 8B as results/gpu_model.json models it, with
# prompts as many times slower as it has parameters.
STEP_MS = {
    "1B": {1: 1.29, 8: 1.42, 64: 2.58, 256: 6.69},
    "8B": {1: 4.718, 8: 5.148, 64: 8.594, 256: 20.408},
}
PROMPT_US = {"1B": 5.4, "8B": 35.0}
BUSY = 0.7  # of its time that a gateway may be


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
        """Return when the next request ends, if nothing comes between."""
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
        self.rng = np.random.default_rng(args.seed)
        self._orders: dict[int, Any] = {}

    def _gpu_s(self, rows: float) -> float:
        """Return seconds of a step."""
        return float(np.interp(rows, list(self._steps), list(self._steps.values()))) / 1e3

    def prompt_s(self, *, cached: bool) -> float:
        """Return seconds of the GPU for a prompt, whose first half others have as well."""
        share = 0.5 if cached else 1.0
        return float(self.args.prompt_tokens * share * PROMPT_US[self.args.model] * US)

    def enough_gateways(self) -> int:
        """Return as few as are busy for 0.7 of their time; if never enough, one per GPU."""
        counts = range(min(2, self.gpus), 10 * self.gpus + 2)
        return next((n for n in counts if self.gateway_busy(n) <= BUSY), self.gpus)

    def gateway_busy(self, gateways: int) -> float:
        """Return the share of its time that a gateway needs."""
        us, args = self.us["gateway"], self.args
        requests = us["requests"] + us["prompt_tokens"] * args.prompt_tokens + self.choice_us()
        rows = args.share * args.rows
        tokens = us["tokens"] + us["messages"] * met(gateways, rows) / rows
        work_s = (requests + tokens * args.tokens) * US
        return float(work_s * self.rate / gateways + self.probe_busy())

    def choice_us(self) -> float:
        """Return microseconds of a gateway to choose a scheduler."""
        return float(self.us["choice_per_scheduler"] * self.gpus)

    def probe_busy(self) -> float:
        """Return the share of its time that a gateway needs to look at all schedulers."""
        return float(self.us["probe"]["gateway"] * self.gpus * US / PROBE_S)

    def chosen(self, gateway: int, group: int) -> int:
        """Return the replica that a gateway chooses, by the loads that it believes in."""
        if group not in self._orders:
            self._orders[group] = self.rng.permutation(self.gpus)
        order, rows = self._orders[group], self.args.rows
        believed = self.believed[gateway][order]
        home, least = believed[0], believed.min()
        if home <= SLACK + FACTOR * least and not home >= rows > least:
            return int(order[0])
        fit = (believed < home) & ((believed < rows) | (least >= rows))
        drawn = self.rng.permutation(np.flatnonzero(fit)[:OTHERS])[:2]
        return int(order[drawn[np.argmin(believed[drawn])]])

    def step(self, rows: int) -> tuple[float, float]:
        """Return seconds from step to step with so many rows, and of them the scheduler's."""
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
    """Return the gateways of which a step has a row, each of which gets a message."""
    return float(gateways * (1 - (1 - 1 / gateways) ** rows))


def simulated(gpus: int, us: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Let a fleet serve for a while; the first half only fills it."""
    fleet = Fleet(gpus, us, args)
    rng = fleet.rng
    weights = 1 / np.arange(1, args.groups + 1)
    shares = np.cumsum(weights / weights.sum())
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
            index = fleet.chosen(gateway, group)
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


def told(fleet: Fleet, gpus: int, ended: int) -> dict[str, float]:
    """Return a row of the table."""
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
    """Return costs on processors that are so many times as fast."""
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
    add = parser.add_argument
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


if __name__ == "__main__":
    simulate(parse())
