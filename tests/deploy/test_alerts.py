"""The alerts: their own tests by promtool, and whether each has one and is explained."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
TESTS = yaml.safe_load((FOLDER / "rules_test.yml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]


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
            page, _, heading = rule["annotations"]["runbook_url"].partition("#")
            headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert heading in [title.lower() for title in headings], rule["alert"]


def test_every_alert_is_explained() -> None:
    page = (ROOT / "docs" / "operate.md").read_text()
    assert re.findall(r"^\| `(Surestep\w+)` \|", page, re.MULTILINE) == ALERTS
