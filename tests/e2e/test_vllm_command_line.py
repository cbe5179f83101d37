"""A command line written for vLLM, with one word changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from e2e.conftest import FLAGS
from support.faults.private_mounts import needs_mounts, within
from support.processes.stack import environment, own_cache, serve

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


@needs_mounts
@pytest.mark.timeout(180)
def test_the_start_line_of_kserve(tiny_model: Path, tmp_path: Path) -> None:
    """Start as its template does: as nobody, on a read-only root without a home, with a read-only
    model and little shared memory."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }
    line = (
        *("--served-model-name", "a", "publishers/ns/models/a", "--enable-ssl-refresh"),
        *("--disable-access-log-for-endpoints", "/health,/metrics,/ping"),
        *("--shutdown-timeout", "5", "--kv-transfer-config", json.dumps(offloading)),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
    )
    command = within({Path("/dev/shm"): "64m", Path("/mnt"): "1m"}, filled=())
    bind = f"mkdir /mnt/models && mount --bind {tiny_model} /mnt/models && "
    bind += "mount -o remount,ro,bind /mnt/models && "
    bind += 'mount --bind /tmp /tmp && mount -o remount,ro,bind / && exec "$@"'
    command[-2] = command[-2].replace('exec "$@"', bind)
    command += ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    # Nobody may read what is ours alone, such as the interpreter, and write nothing.
    command += [f"--{kind}=-all,+dac_read_search" for kind in ("bounding-set", "inh-caps")]
    command += ["--ambient-caps=+dac_read_search"]
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o777)
    cache = own_cache(tmp_path / "cache")
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": "/home"}
    variables["XDG_CACHE_HOME"] = str(cache)
    with serve(
        *(Path("/mnt/models"), logs, *FLAGS, *line),
        variables=variables,
        within=command,
    ) as stack:
        assert "listening on https://0.0.0.0:" in stack.tail()
        with httpx.Client(base_url=stack.url, verify=False, timeout=60) as client:
            assert client.get("/health").status_code == 200
            body = {"model": "publishers/ns/models/a", "prompt": "hi", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 2
        launcher = Path(f"/proc/{stack.process.pid}")
        assert launcher.stat().st_uid == 65534
