"""Every query of every dashboard, put to a real Prometheus that scrapes a running server."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.prometheus import Prometheus, needs_prometheus, prometheus
from support.processes.stack import Stack, serve

pytestmark = [
    pytest.mark.timeout(400),
    needs_prometheus,
]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "tiny-hybrid"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
FLAGS = (
    *("--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory", "0.05"),
    *("--speculative-config", '{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}'),
    "--no-adaptive-draft-length",  # which drafts nothing while a slow machine is better off without
)
VARIABLES = {"$__rate_interval": "2m", "$model_name": ".*", "$scheduler": ".*"}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(MODEL, tmp_path_factory.mktemp("logs"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def watcher(server: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that scrapes the gateway as if there were two that see the same."""
    target = server.url.removeprefix("http://")
    targets = [target, target.replace("127.0.0.1", "localhost")]
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets, RULES) as running:
        yield running


@pytest.fixture(scope="module")
def busy(server: Stack, watcher: Prometheus) -> Prometheus:
    """Prometheus, once it has seen accepted drafts before and after the loss of a worker."""

    def scraped(query: str) -> bool:
        return any(float(one["value"][1]) > 0 for one in watcher.series(query))

    body = {"model": "tiny-hybrid", "prompt": "The statement is" * 8, "max_tokens": 100}
    body |= {"ignore_eos": True, "temperature": 0}

    def complete() -> None:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

    complete()
    accepted = "surestep:accepted_per_position_total"
    server.wait_until(lambda: scraped(accepted), "a scrape with accepted drafts")
    pid = server.scheduler()["ranks"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    complete()
    server.wait_until(lambda: scraped(f"rate({accepted}[2m])"), "more accepted drafts")
    server.wait_until(lambda: scraped("surestep:fault_recovery_seconds_count"), "a recovery")
    return watcher


def queries(path: Path) -> Iterator[tuple[str, str]]:
    """Panel and PromQL, of a dashboard's panels and variables."""
    dashboard = json.loads(path.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric = variable["definition"].removeprefix("label_values(").partition(",")[0]
            yield variable["name"], f"{metric}{{{variable['name']}!=''}}"


def filled(query: str) -> str:
    """With a value for each variable."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
@pytest.mark.rotates(2)
def test_every_query_is_answered_with_series(busy: Prometheus, path: Path) -> None:
    empty = list(queries(path))
    assert empty
    deadline = time.monotonic() + PATIENCE_S
    while empty and time.monotonic() < deadline:
        empty = [(title, query) for title, query in empty if not busy.series(filled(query))]
    assert not empty


def test_every_alert_can_be_evaluated(busy: Prometheus) -> None:
    """And but one alarm is left, once scrapes have seen that the worker is back."""
    rules: list[Any] = []
    alarmed: set[str] = set()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rules = busy.rules()
        alarmed = {rule["name"] for rule in rules if rule["state"] != "inactive"}
        evaluated = rules and all(rule["health"] != "unknown" for rule in rules)
        if evaluated and alarmed == {"SurestepWorkerLost"}:
            break
        time.sleep(0.2)
    assert {rule["name"] for rule in rules if rule["health"] != "ok"} == set()
    assert alarmed == {"SurestepWorkerLost"}
