"""A real Prometheus that scrapes a running server once a second, where one is installed."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from .ports import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


class Prometheus:
    """One that runs, asked over HTTP."""

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

    def rules(self) -> list[Any]:
        """Every alert, with its state and health."""
        groups = (self.ask("rules") or {"groups": []})["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """One that evaluates the rules over what targets (host:port) tell."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "surestep", "static_configs": [{"targets": list(targets)}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML too
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
