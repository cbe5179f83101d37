"""Commands of vLLM: one that is here by another name, and those that are told where to go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from surestep_cli.main import run


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["complete", "--url", "x"], "no command complete: any OpenAI client"),
        (["run-batch", "-i", "x"], "no command run-batch"),
        (["bench", "serve", "--model", "m"], "no bench serve: `surestep bench` measures"),
    ],
)
def test_what_is_not_here_is_told(
    command: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    assert capsys.readouterr().out.startswith("surestep ")


def test_the_module_that_start_scripts_name() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "surestep.entrypoints.openai.api_server"),
            *("--model", "m", "--middleware", "a.b"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("surestep serve: --middleware is not supported")
