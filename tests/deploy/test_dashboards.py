"""Every query of every dashboard, put to a real Prometheus that scrapes a running server."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.ports import free_port
from support.processes.stack import Stack, serve

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
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


class Prometheus:
    """A real one, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer; None while it does not answer."""
        try:
            reply = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=10).json()
        except httpx.TransportError:
            return None
        assert reply["status"] == "success", reply
        return reply["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """What a query answers now, but for what is no number."""
        found = (self.ask("query", query=query) or {"result": []})["result"]
        return [one for one in found if not math.isnan(float(one["value"][1]))]


def config(target: str) -> str:
    """Scrapes one gateway as if there were two that see the same, and evaluates the alerts."""
    targets = [target, target.replace("127.0.0.1", "localhost")]
    return json.dumps(  # which is YAML too
        {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "surestep", "static_configs": [{"targets": targets}]}],
        }
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(MODEL, tmp_path_factory.mktemp("logs"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (folder / "prometheus.yml").write_text(config(server.url.removeprefix("http://")))
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def busy(server: Stack, prometheus: Prometheus) -> Prometheus:
    """Prometheus, once it has seen accepted drafts before and after the loss of a worker."""

    def scraped(query: str) -> bool:
        return any(float(one["value"][1]) > 0 for one in prometheus.series(query))

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
    return prometheus


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
        rules = [rule for group in busy.ask("rules")["groups"] for rule in group["rules"]]
        alarmed = {rule["name"] for rule in rules if rule["state"] != "inactive"}
        evaluated = rules and all(rule["health"] != "unknown" for rule in rules)
        if evaluated and alarmed == {"SurestepWorkerLost"}:
            break
        time.sleep(0.2)
    assert {rule["name"] for rule in rules if rule["health"] != "ok"} == set()
    assert alarmed == {"SurestepWorkerLost"}
