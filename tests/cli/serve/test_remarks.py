"""What `surestep serve` says about its settings before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from surestep_cli.main import Serve
from surestep_cli.serve.launcher import _remarks
from surestep_cli.serve.wiring import public_url


def test_one_line_for_all_that_does_nothing() -> None:
    settings = Serve.load(["m", "--swap-space", "4", "--trust-remote-code", "--code-revision", "x"])
    (line,) = _remarks(settings)
    assert line == (
        "without effect here: --swap-space (preempted requests are computed again, nothing is "
        "swapped); --trust-remote-code, --code-revision (no code of a checkpoint is ever run)"
    )
    assert list(_remarks(Serve.load(["m"]))) == []


def test_variables_that_nothing_reads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SURESTEP_MAX_NUM_SEQ", "SURESTEP_XYZZY", "SURESTEP_URL", "surestep_seed"):
        monkeypatch.setenv(name, "3")
    (line,) = _remarks(Serve.load(["m"]))
    assert line == (
        "variables that nothing reads: SURESTEP_MAX_NUM_SEQ (did you mean SURESTEP_MAX_NUM_SEQS?), "
        "SURESTEP_XYZZY"
    )


def test_a_key_that_is_empty_leaves_the_server_open() -> None:
    (line,) = _remarks(Serve.load(["m", "--api-key", ""]))
    assert line.startswith("--api-key is empty")
    assert list(_remarks(Serve.load(["m", "--api-key", "k"]))) == []


@pytest.mark.parametrize(
    ("flags", "torch", "lines"),
    [
        ([], "2.13.0+cpu", 1),
        ([], "2.13.0", 0),
        (["--device", "cpu"], "2.13.0+cpu", 0),
        (["--device", "cuda"], "2.13.0+cpu", 0),
    ],
)
def test_an_idle_gpu(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], torch: str, lines: int
) -> None:
    monkeypatch.setattr("surestep_worker.config.version", lambda _: torch)
    monkeypatch.setattr("surestep_worker.config.GPU", Path("/dev/null"))
    assert len(list(_remarks(Serve.load(["m", *flags])))) == lines


@pytest.mark.parametrize(
    ("there", "torch", "visible", "device"),
    [
        (True, "2.13.0", None, "cuda"),
        (True, "2.13.0+cu130", "0,1", "cuda"),
        (True, "2.13.0+cpu", None, "cpu"),
        (True, "2.13.0", "", "cpu"),
        (True, "2.13.0", "-1", "cpu"),
        (False, "2.13.0", None, "cpu"),
    ],
)
def test_the_device_that_is_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch, there: bool, torch: str, visible: str | None, device: str
) -> None:
    monkeypatch.setattr("surestep_worker.config.GPU", Path("/dev/null" if there else "/none"))
    monkeypatch.setattr("surestep_worker.config.version", lambda _: torch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Serve.load(["m"]).device == device
    assert Serve.load(["m", "--device", "auto"]).device == device
    assert Serve.load(["m", "--device", "cpu"]).device == "cpu"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_that_is_told_works(host: str, url: str) -> None:
    assert public_url(Serve.load(["m", "--host", host]), "80") == url


def test_help_loads_nothing_that_takes_long() -> None:
    script = (
        "import sys; from surestep_cli.main import run; assert run(['serve', '--help']) == 0; "
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage: surestep serve [MODEL]")
    slow = {"numpy", "torch", "transformers", "tokenizers", "starlette", "yaml", "aiohttp"}
    assert slow & set(done.stderr.split()) == set()
