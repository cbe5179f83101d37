"""A command line written for vLLM, with one word changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2e.conftest import FLAGS
from support.processes.stack import environment, serve

SCRIPT = (
    *("--served-model-name", "first", "second", "--dtype", "half", "--max_model_len", "0.5k"),
    *("-tp", "1", "--pipeline-parallel-size", "1", "--gpu-memory-utilization", "0.9"),
    *("--trust-remote-code", "--swap-space=4", "--disable-log-requests", "-O3"),
    *("-sc.method", "ngram", "-sc.num_speculative_tokens", "2", "--load-format", "safetensors"),
    *("--seed", "1", "--root-path", "/llm", "--response-role", "model"),
)


@pytest.mark.timeout(180)
@pytest.mark.rotates(2, turn=0)
def test_a_start_script_of_vllm(tiny_model: Path, tmp_path: Path) -> None:
    console = tmp_path / "console"
    variables = {"VLLM_API_KEY": "secret", "VLLM_USE_V1": "1"}
    script = (*SCRIPT, "--tokenizer", str(tiny_model))
    with serve(
        *(tiny_model, tmp_path / "logs", *FLAGS, *script), variables=variables, console=console
    ) as stack:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        url = f"{stack.url}/llm/v1/chat/completions"
        assert httpx.post(url, json=chat).status_code == 401
        key = {"authorization": "Bearer secret"}
        answer = httpx.post(url, json={**chat, "model": "second"}, headers=key, timeout=30)
        assert answer.json()["choices"][0]["message"]["role"] == "model"
        card = httpx.get(f"{stack.url}/v1/models", headers=key).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("first", 500)
    told = console.read_text()
    (warning,) = [line for line in told.splitlines() if "without effect here" in line]
    for name in ("--trust-remote-code", "--swap-space", "--optimization-level", "VLLM_USE_V1"):
        assert name in warning
    assert "--disable-log-requests" not in told  # which is so anyway
    assert "computing in bfloat16" in told
    assert "--gpu-memory-utilization does nothing on CPUs" in told
    assert "secret" not in told


@pytest.mark.timeout(180)
@pytest.mark.rotates(2, turn=1)
def test_a_server_on_a_unix_socket(tiny_model: Path, tmp_path: Path) -> None:
    console, path = tmp_path / "console", tmp_path / "s.sock"
    with serve(tiny_model, tmp_path / "logs", *FLAGS, console=console, uds=path) as stack:
        for command in (["status"], ["bench", "--num-requests", "2", "--max-tokens", "2"]):
            done = subprocess.run(
                [sys.executable, "-m", "surestep_cli", *command, "--url", stack.url],
                env=environment({}),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
    assert f"curl http://localhost/v1/chat/completions --unix-socket {path}" in console.read_text()
