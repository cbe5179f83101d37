"""`surestep collect-env`: facts for a report, and nothing that should not be in one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from surestep_cli.environment.facts import _SHOWN, show
from surestep_cli.environment.machine import cpu_facts, gpus, memory_facts
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_common.config import secret_fields

SECRET = "hunter2-and-more-of-it"
SETTINGS = {
    "SURESTEP_API_KEY": SECRET,
    "SURESTEP_GRPC_SECRET": SECRET,
    "SURESTEP_RESPONSES_STORE": f"redis://user:{SECRET}@cache:6379/0",
    "SURESTEP_MODEL": f"/models/{SECRET}",
    "SURESTEP_MAX_NUM_SEQS": "4",
}


def collected(*flags: str, path: str = os.defpath) -> str:
    command = (sys.executable, "-m", "surestep_cli", "collect-env", *flags)
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": path, "HF_TOKEN": SECRET}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environ | SETTINGS
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.rotates(1)
def test_facts_as_json_without_secrets() -> None:
    said = collected("--json")
    assert SECRET not in said
    facts: dict[str, Any] = json.loads(said)
    assert facts["packages"]["torch"] == version("torch")
    assert re.match(r"[0-9a-f]{40}", facts["surestep"]["commit"])
    assert re.match("prebuilt for|compiled here|to be compiled", facts["kernels"]["kernels"])
    assert facts["settings"]["SURESTEP_MAX_NUM_SEQS"] == "4"
    assert set(facts["settings"]) == set(SETTINGS)


@pytest.mark.rotates(1)
def test_lines_for_people_where_no_tool_is_there(tmp_path: Path) -> None:
    said = collected(path=str(tmp_path))
    assert SECRET not in said
    assert "\ngpus\n  none\n" in said
    assert "\n  SURESTEP_API_KEY: (set, not shown)\n" in said
    assert re.search(r"\n  cores: \d+ of \d+\n", said)


def test_no_value_of_a_secret_setting_is_shown() -> None:
    assert not _SHOWN - set(ServeSettings.model_fields)
    assert not _SHOWN & {*secret_fields(ServeSettings), "hf_overrides", "api_key_file"}


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cores"),
    [
        ("0::/a", {"a/memory.max": "2147483648", "a/cpu.max": "150000 100000"}, "2.0 GiB", "1.5 c"),
        ("0::/a/b", {"a/memory.max": "1073741824", "a/b/memory.max": "max"}, "1.0 GiB", "no limit"),
        ("0::/a", {"a/memory.max": "max", "a/cpu.max": "max 100000"}, "no limit", "no limit"),
        (
            "3:memory:/a\n4:cpu,cpuacct:/a",
            {
                "memory/a/memory.limit_in_bytes": "1073741824",
                "cpu/a/cpu.cfs_quota_us": "50000",
                "cpu/a/cpu.cfs_period_us": "100000",
            },
            "1.0 GiB",
            "0.5 c",
        ),
        (
            "3:memory:/a\n4:cpu:/a",
            {
                "memory/a/memory.limit_in_bytes": str((1 << 63) - 4096),
                "cpu/a/cpu.cfs_quota_us": "-1",
                "cpu/a/cpu.cfs_period_us": "100000",
            },
            "no limit",
            "no limit",
        ),
        ("", {}, "no limit", "no limit"),
    ],
)
def test_limits_of_both_versions_of_cgroups(
    tmp_path: Path, groups: str, files: Mapping[str, str], memory: str, cores: str
) -> None:
    texts = {"proc/self/cgroup": groups, "proc/cpuinfo": "model name\t: Some CPU\n"}
    for name, text in {**texts, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_facts(tmp_path)["cgroup"] == memory
    assert cpu_facts(tmp_path)["cgroup"].startswith(cores)
    assert cpu_facts(tmp_path)["model"] == "Some CPU"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 9.0, 580.65.06'", "NVIDIA H100, 81559 MiB, 9.0, 580.65.06"),
        ("exit 9", "nvidia-smi fails: .* status 9"),
    ],
)
def test_gpus_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    (line,) = gpus()
    assert re.match(told, line)


def test_sections_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    show({"one": {"a": "1"}, "two": []}, as_json=False)
    assert capsys.readouterr().out == "one\n  a: 1\ntwo\n  none\n"
