"""A group of two ranks on two hosts: a rank, the wire between them, and a host fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.cases import SEED
from support.faults.run import run
from support.faults.server import PACED, SECRET
from support.faults.streams import differences, mix
from support.processes.hosts import Host, TwoHosts, two_hosts
from support.processes.stack import environment, tail

pytestmark = [pytest.mark.timeout(400), pytest.mark.rotates(3, turn=2)]
AT = 300  # tokens that all streams together have delivered before the fault
START_S, CUT_S = 120.0, 5.0
GATEWAY, SCHEDULER, WORKER, SUPERVISOR, MASTER = 8000, 50051, 50061, 50071, 50081
SIZES = ("--kv-cache-memory", "0.05", "--max-num-seqs", "24", "--dtype", "float32")
STEP = ("--max-num-batched-tokens", "128")


class Group:
    """Gateway, scheduler and rank 0 on the first host, rank 1 on the second, with mutual TLS."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts, self.logs, self._folder = hosts, folder / "logs", folder
        self.url = f"http://{hosts.front}:{GATEWAY}"
        self._model = make_tiny_checkpoint(
            folder / "tiny", "llama", seed=7, tokenizer=True, max_position=1024
        )
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca"))
        for host in (hosts.first, hosts.second):
            issued = authority.issue_cert(host.address)
            issued.private_key_pem.write_to_path(str(folder / f"{host.name}.key"))
            issued.cert_chain_pems[0].write_to_path(str(folder / f"{host.name}.cert"))

    def start(self) -> None:
        first, second = self.hosts.first, self.hosts.second
        for rank in (0, 1):
            self.start_rank(rank)
        address = f"{first.address}:{SCHEDULER}"
        ports = {"--worker-addresses": WORKER, "--supervisor-addresses": SUPERVISOR}
        addresses = (
            f'{flag}=["{first.address}:{port}", "{second.address}:{port}"]'
            for flag, port in ports.items()
        )
        own = ("--scheduler-listen", address, *STEP)
        self._python(first, "scheduler", "surestep_scheduler", *addresses, *own)
        listen = ("--host", self.hosts.front, "--port", str(GATEWAY))
        own = ("--scheduler-url", address, "--served-model-name", "tiny")
        self._python(first, "gateway", "surestep_gateway", *listen, *own)

    def start_rank(self, rank: int) -> None:
        host = self.hosts.second if rank else self.hosts.first
        supervisor = f"{host.address}:{SUPERVISOR}"
        settings = {
            "rank": rank,
            "tensor-parallel-size": 2,
            "tp-master": f"{self.hosts.first.address}:{MASTER}",
            "worker-listen": f"{host.address}:{WORKER - rank}",
            "supervisor-listen": f"{host.address}:{SUPERVISOR - rank}",
        }
        own = (f"--{name}={value}" for name, value in settings.items())
        watched = ("--", sys.executable, "-m", "surestep_worker", *own, *SIZES, *STEP)
        self._python(host, f"worker{rank}", "surestep_common.watchdog", supervisor, *watched)

    def _python(self, host: Host, log: str, module: str, *arguments: str) -> None:
        variables = {
            **PACED,
            "SURESTEP_GRPC_SECRET": SECRET,
            "SURESTEP_MODEL": str(self._model),
            "SURESTEP_GRPC_TLS_CERT": str(self._folder / f"{host.name}.cert"),
            "SURESTEP_GRPC_TLS_KEY": str(self._folder / f"{host.name}.key"),
            "SURESTEP_GRPC_TLS_CA": str(self._folder / "ca"),
        }
        host.start(log, sys.executable, "-m", module, *arguments, environ=environment(variables))

    def scheduler(self) -> Any:
        """The scheduler's part of /status, once it serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=10).status_code == 200:
                    status = httpx.get(f"{self.url}/status", timeout=10).json()
                    return status["schedulers"][0]["status"]
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"no readiness: {tail(self.logs)}")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts(folder / "logs") as hosts:
        made = Group(hosts, folder)
        made.start()
        made.scheduler()
        yield made


def kill_a_rank(group: Group) -> None:
    os.kill(group.scheduler()["ranks"][1]["pid"], signal.SIGKILL)


def cut_the_wire(group: Group) -> None:
    group.hosts.drop(100)
    time.sleep(CUT_S)
    group.hosts.drop(0)


def lose_packets(group: Group) -> None:
    group.hosts.drop(5)


def end_a_host(group: Group) -> None:
    """Its peers are not told. Another host takes its place and address after a while."""
    group.hosts.drop(100)
    group.hosts.second.end()
    time.sleep(CUT_S)
    group.hosts.drop(0)
    group.start_rank(1)


@pytest.mark.parametrize(
    ("inject", "pause_s"),
    [(kill_a_rank, 10), (cut_the_wire, CUT_S + 15), (lose_packets, 30), (end_a_host, CUT_S + 30)],
)
def test_streams_survive(
    group: Group,
    inject: Callable[[Group], None],
    pause_s: float,
    record_property: Callable[[str, object], None],
) -> None:
    before = {incident["epoch"] for incident in group.scheduler()["incidents"]}
    asks = mix(random.Random(SEED))
    expected = asyncio.run(run(group.url, asks))
    try:
        answers = asyncio.run(run(group.url, asks, AT, lambda: inject(group)))
    finally:
        group.hosts.drop(0)
    incidents = [one for one in group.scheduler()["incidents"] if one["epoch"] not in before]
    pause = max(answer.pause_s for answer in answers)
    costs = (f"{i['cause']} {i['detect_s']:.1f} + {i['recover_s']:.1f} s" for i in incidents)
    record_property("summary", f"{inject.__name__}: longest pause {pause:.1f} s; {[*costs]}")
    assert differences(expected, answers) == [], tail(group.logs)
    assert incidents or inject is lose_packets, "nobody noticed"
    assert pause < pause_s
