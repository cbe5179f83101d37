"""`top`, `chat` and `bench` with a running server, as they are in pipes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support.processes.stack import Stack, environment


def command(stack: Stack, *words: str, piped: str = "") -> str:
    """Its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "surestep_cli", words[0], "--url", stack.url, *words[1:]],
        env=environment({}),
        input=piped,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_top(stack: Stack) -> None:
    told = command(stack, "top", "--updates", "2", "--interval-s", "0.1").splitlines()
    assert len(told) == 2
    for line in told:
        assert re.match(r"[\d:]{8} SERVING ranks 1/1 running \d+ waiting \d+ output [\d.]+", line)


def test_chat(stack: Stack) -> None:
    words = ("chat", "--max-tokens", "5", "--temperature", "0")
    first = command(stack, *words, piped="what is the name?")
    assert first.strip()
    assert first == command(stack, *words, piped="what is the name?")


def test_bench(stack: Stack, tmp_path: Path) -> None:
    words = ("bench", "--num-requests", "4", "--concurrency", "2", "--max-tokens", "8")
    told = command(stack, *words, "--picture", str(tmp_path / "bench.svg"))
    assert "time to first token, percentiles in ms:" in told
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    report = json.loads(command(stack, *words, "--json"))
    assert (report["output_tokens"], len(report["ttft_quantiles_ms"])) == (32, 21)
