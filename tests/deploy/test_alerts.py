"""The alerts: their own tests by promtool, whether each has one and is explained, and a server whose
streams break.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.faults.server import serve_for_faults
from support.processes.prometheus import needs_prometheus, prometheus
from support.processes.stack import Stack

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "tiny-hybrid"
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
TESTS = yaml.safe_load((FOLDER / "rules_test.yml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]

TIMEOUT_S = 2.0  # of a request


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_not_before() -> None:
    command = ["promtool", "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_firing_in_a_test() -> None:
    fired = {
        case["alertname"]
        for test in TESTS["tests"]
        for case in test.get("alert_rule_test", ())
        if case.get("exp_alerts")
    }
    assert fired == set(ALERTS)


def test_every_alert_waits_and_says_how_bad_and_where_to_read_on() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert re.fullmatch(r"[1-9][0-9]*[sm]", rule["for"]), rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
            assert rule["annotations"]["summary"].endswith("."), rule["alert"]


def test_every_alert_leads_to_a_section_of_its_own() -> None:
    """And no section is left of an alert that is gone."""
    for group in RULES["groups"]:
        for rule in group["rules"]:
            url = f"docs/run/operate.md#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook_url"] == url
    page = (ROOT / "docs" / "run" / "operate.md").read_text()
    sections = re.findall(r"^### (Surestep\w+)\n\n(?!#)\S", page, re.MULTILINE)
    assert sorted(sections) == sorted(ALERTS)


def test_every_alert_is_explained() -> None:
    page = (ROOT / "docs" / "run" / "operate.md").read_text()
    rows = re.findall(r"^\| \[`(Surestep\w+)`\]\(#(\w+)\) \| (\w+) \|", page, re.MULTILINE)
    assert rows == [
        (rule["alert"], rule["alert"].lower(), rule["labels"]["severity"])
        for group in RULES["groups"]
        for rule in group["rules"]
    ]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server whose answers of more than a few tokens run into their timeout."""
    folder, flags = tmp_path_factory.mktemp("slow"), ("--request-timeout-s", f"{TIMEOUT_S}")
    with serve_for_faults(MODEL, folder, *flags, variables={"FAULT_PACE_S": "0.1"}) as running:
        yield running.stack


def stream(server: Stack, most: int) -> str:
    """The end of a streamed answer; its HTTP status is 200, however it ends."""
    body = {"prompt": "The statement is", "max_tokens": most, "ignore_eos": True, "stream": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200
    return reply.text.strip().rpartition("\n\n")[2]


@needs_prometheus
@pytest.mark.timeout(240)
def test_streams_that_break_inside_a_200_fire(slow: Stack, tmp_path: Path) -> None:
    """The rules are those that are shipped, except that an alert need not last before it fires."""
    rules = tmp_path / "rules.yml"
    text = (FOLDER / "rules.yml").read_text()
    rules.write_text(re.sub(r"^( +for:) .*$", r"\1 1s", text, flags=re.MULTILINE))
    with prometheus(tmp_path, [slow.url.removeprefix("http://")], rules) as watcher:

        def firing() -> set[str]:
            return {rule["name"] for rule in watcher.rules() if rule["state"] == "firing"}

        ended = 'sum(surestep:answers_total{streamed="true", end="%s"}) >= %d'
        for _ in range(4):
            assert stream(slow, 2) == "data: [DONE]"
        slow.wait_until(lambda: bool(watcher.series(ended % ("complete", 4))), "a scrape")
        assert "SurestepErrors" not in firing()
        for most in (200, 200, 200, 2):
            last = stream(slow, most)
            assert ('"code":"timeout"' in last) == (most > 2), last
        slow.wait_until(lambda: "SurestepErrors" in firing(), "the alert")
        (alert,) = watcher.series('ALERTS{alertname="SurestepErrors"}')
        assert alert["metric"]["severity"] == "critical"
        assert not watcher.series('surestep:http_responses_total{status=~"5.."}')
