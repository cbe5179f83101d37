"""Commands of vLLM and ollama: here by another name, or told where to go; and mistyped ones."""

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
        (["run", "llama3.2:3b"], "no command run: `surestep serve MODEL` starts a server"),
        (["pull", "m"], "no command pull: `surestep fetch MODEL` fetches a model"),
        (["list"], "`surestep status` what runs"),
        (["pul", "m"], "no command pul: `surestep fetch MODEL` fetches a model"),
        (["serv", "m"], "no command serv: did you mean serve?"),
        (["frobnicate"], "no command frobnicate: `surestep --help` lists the commands"),
    ],
)
def test_what_is_not_here_is_told(
    command: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chat", "--temperatur", "1"], "unknown flag '--temperatur': did you mean --temperature?"),
        (["bench", "--num-request", "3"], "did you mean --num-requests?"),
        (["new-secret", "f", "--frobnicate"], "unknown flag '--frobnicate'"),
        (["--verison"], "did you mean --version?"),
    ],
)
def test_a_mistyped_flag_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


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
