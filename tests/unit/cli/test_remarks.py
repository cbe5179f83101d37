"""What `surestep serve` says about its settings before it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from surestep_cli.launcher import _remarks
from surestep_cli.main import Serve


def test_one_line_for_all_that_does_nothing() -> None:
    settings = Serve.load(["m", "--swap-space", "4", "--trust-remote-code", "--code-revision", "x"])
    (line,) = _remarks(settings)
    assert line == (
        "without effect here: --swap-space (preempted requests are computed again, nothing is "
        "swapped); --trust-remote-code, --code-revision (no code of a checkpoint is ever run)"
    )
    assert list(_remarks(Serve.load(["m"]))) == []


@pytest.mark.parametrize(
    ("flags", "lines"), [([], 1), (["--device", "cpu"], 0), (["--device", "cuda"], 0)]
)
def test_an_idle_gpu(monkeypatch: pytest.MonkeyPatch, flags: list[str], lines: int) -> None:
    monkeypatch.setattr("surestep_cli.launcher.gpu_is_here", lambda: True)
    assert len(list(_remarks(Serve.load(["m", *flags])))) == lines


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
