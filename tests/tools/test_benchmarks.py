"""Each benchmark runs from end to end with its least arguments, against a toy or on a tiny model.

The figures mean nothing here, their making does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import carry_kernels
import fairness
import faults
import fleet
import fleet_costs
import latents
import launch
import memory
import mixes
import model_impl
import offline
import online
import peers
import pytest
from fault_stream import Stream
from gpu import decode, divergence, host, probe, trace, versions
from make_shaped_checkpoint import main as make_shaped
from support.checkpoints.deepseek import make_tiny_deepseek
from support.processes import ports
from support.processes.commands import children

from tools import toy_servers

ROOT = Path(__file__).parents[2]
HYBRID = ROOT / "tests" / "data" / "tiny-hybrid"
TOY = Path(toy_servers.__file__)
LOAD = ["--concurrency", "1", "2", "--max-tokens", "8", "--prompt-tokens", "4"]


@pytest.fixture(autouse=True)
def _children_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def toy(kind: str, port: int) -> str:
    return f"{sys.executable} {TOY} {kind} {port}"


async def test_online_prints_a_line_per_concurrency(
    free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    async with launch.launched(toy("openai", free_port), tmp_path / "log") as server:
        await server.first_token(lambda: launch.http_first_token(url), 30)
        num_errors = await online.measure(online.parse(["--url", url, *LOAD]))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert num_errors == 0
    assert [(line["concurrency"], line["output_tokens"]) for line in lines] == [(1, 32), (2, 32)]
    assert lines[0]["machine"]["cores"] >= 1


@pytest.mark.rotates(1)
async def test_fairness_prints_a_line_per_question(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    quick = ["--prompts", "2", "--seconds", "0.2", "--settle", "0.1", "--tokens", "8"]
    argv = ["--url", url, "--command", toy("openai", free_port), *quick]
    await fairness.measure(fairness.parse(argv))
    neighbour, words = map(json.loads, capsys.readouterr().out.splitlines())
    assert neighbour["alone_s"] >= 0
    assert neighbour["beside_longest_s"] >= neighbour["beside_s"] > 0
    assert (neighbour["asked"], neighbour["refused"]) == (1, 0)
    assert neighbour["load_tok_s_alone"] > 0
    assert (words["answer"], words["stream"], words["stream_tokens"]) == (200, "whole", 8)
    assert words["schedulers_replaced"] is None  # nobody says who they are


async def test_mixes_compares_servers_on_all_kinds_of_traffic(
    free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    few = ["--concurrency", "2", "--rounds", "2", "--each", "1", "--log-dir", str(tmp_path)]
    servers = [
        "--server",
        "a",
        f"{toy('openai', free_port)} --port {free_port}",
        "--server",
        "b",
        url,
    ]
    assert await mixes.main(mixes.parse([*servers, *few])) == 0
    *rows, mean = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["mix"] for row in rows] == list(mixes.MIXES)
    assert all(row["equal"] and row["a/b"] > 0 for row in rows)
    assert mean["clients"] == 2


async def test_peers_runs_every_server_in_every_round_and_one_at_a_time(
    free_port: int, tmp_path: Path
) -> None:
    log = tmp_path / "rounds.jsonl"
    url = f"http://127.0.0.1:{free_port}"  # one port for both: the second needs the first gone
    command = toy("openai", free_port)
    args = peers.parse(["--rounds", "2", "--json", str(log), "--log-dir", str(tmp_path), *LOAD])
    servers = [peers.Server("a", url, command), peers.Server("b", url, command)]
    rounds = await peers.compare(servers, args)
    args.json.close()
    order = [json.loads(line)["server"]["name"] for line in log.read_text().splitlines()]
    assert order == ["a", "b", "a", "b"]
    assert all(f["start to first token, s"] > 0 for f in rounds["a"] + rounds["b"])
    assert not children(str(TOY))


async def test_offline_compares_drafts_on_and_off_over_the_same_prompts() -> None:
    server, port = await toy_servers.start_scheduler(0)
    argv = ["--scheduler", f"127.0.0.1:{port}", "--num-prompts", "3", "--max-tokens", "8"]
    try:
        plain = await offline.throughput(offline.parse(["throughput", *argv]))
        compared = await offline.speculation(offline.parse(["speculation", *argv]))
    finally:
        await server.stop(0)
    assert plain["tok_s"] > 0
    (figures,) = compared["concurrency"].values()
    assert figures["off"]["tokens_per_step"] == 1
    assert figures["off"]["forward_ms"] == pytest.approx(1e3 * toy_servers.FORWARD_S)
    assert figures["on"]["tokens_per_step"] == toy_servers.TOKENS_PER_DRAFTED_STEP
    assert figures["on"]["acceptance"] == 0.5
    assert (figures["on"]["equal_outputs"], figures["on"]["outputs"]) == (9, 9)


def test_faults_counts_lost_streams_and_tokens() -> None:
    args = faults.parse(["--max-tokens", "4", "--name", "toy"])
    quiet = [Stream([1, 2, 3, 4], [0, 1, 2, 3]) for _ in range(2)]
    hurt = [Stream([1, 2, 3, 4], [0.0, 1.0, 7.0, 8.0]), Stream([1], [0.0], failure="broken off")]
    cost = faults.cost("SIGKILL rank", quiet, hurt, 1.0, 0.25, args)
    assert faults.row(cost).startswith("| toy | SIGKILL rank | 1 of 2 | 0.25 | 6.00 |")


@pytest.mark.rotates(4)
@pytest.mark.timeout(180)
def test_faults_happen_or_are_said_not_to(free_port: int, tmp_path: Path) -> None:
    serve = f"serve {HYBRID} --port {free_port} --speculative-config none"
    few = ["--streams", "2", "--max-tokens", "32", "--log-dir", str(tmp_path)]
    where = ["--url", f"http://127.0.0.1:{free_port}", "--json", str(tmp_path / "lines")]
    command = ["--command", f"{sys.executable} -m surestep_cli {serve}"]
    with pytest.raises(SystemExit, match="drafter raises did not happen"):
        faults.main([*where, *few, *command, "--faults", "logits not finite", "drafter raises"])
    (line,) = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (line["lost"], line["equal"]) == (0, 2)
    assert line["detect_s"] is not None


def test_a_fleet_is_served_until_something_fills(capsys: pytest.CaptureFixture[str]) -> None:
    """With the costs that were measured: enough of all, too few gateways, too many requests."""
    least = ["--seconds", "8", "--faster", "3"]
    for flags in (["--gpus", "1", "3"], ["--gpus", "3", "--gateways", "1"], ["--share", "1.5"]):
        fleet.simulate(fleet.parse(["--gpus", "2", *least, *flags]))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    heads, *rows = [row for row in rows if not row[0].startswith("-")]
    told = [dict(zip(heads, row, strict=True)) for row in rows if row != heads]
    assert [row["serves"] for row in told] == ["yes", "yes", "no", "no"]
    assert float(told[2]["busy"]) > 1 > float(told[1]["busy"])
    assert float(told[3]["wait p99 s"]) > 0 == float(told[1]["wait p99 s"])


def test_costs_are_found_behind_what_was_asked() -> None:
    asked = [(800, 900, 100), (800, 90000, 100), (6400, 900, 400), (300, 9000, 100)]
    costs = 500e-6, 20e-6, 100e-6
    loads = [
        {"requests": a, "tokens": b, "messages": c, "looks": 10.0}
        | {"x_s": sum(map(float.__mul__, costs, map(float, (a, b, c)))) + 10 * 2000e-6}
        for a, b, c in asked
    ]
    found = fleet_costs.fitted(loads, "x", 2000, "requests", "tokens", "messages")
    assert list(found.values()) == pytest.approx([500, 20, 100])


def test_memory_says_how_many_requests_have_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py", str(HYBRID), "--gib", "1"])
    memory.main()
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["requests"]["1024"] > line["requests"]["4096"] > 0


def test_latents_times_steps_over_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_deepseek(tmp_path, "glm_moe_dsa", num_hidden_layers=2)
    least = ["--contexts", "9", "40", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["latents.py", "steps", str(tmp_path), *least])
    latents.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["context"] for line in lines if "context" in line] == [9, 40]


def test_model_impl_compares_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    least = ["--rows", "1", "3", "--layers", "1", "--hidden", "256", "--times", "1"]
    monkeypatch.setattr(sys, "argv", ["model_impl.py", *least, "--threads", "1"])
    model_impl.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {count: set(each) for count, each in rows.items()} == {
        count: {"surestep", "transformers", "ratio"} for count in ("1", "3")
    }


SMALL = ("--device", "cpu", "--context", "24", "--kv-memory", "0.01")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_shaped(["tiny-llama", str(folder)])
    return folder


def written(tmp_path: Path, main: Any, *flags: str) -> Any:
    """What a benchmark of a GPU writes to a file."""
    out = tmp_path / "out.json"
    main([*flags, "--out", str(out)])
    return json.loads(out.read_text())


def test_gpu_versions(tmp_path: Path) -> None:
    found = written(tmp_path, versions.main, "--device", "cpu")["versions"]
    assert found["packages"]["torch"]


@pytest.mark.rotates(1)
def test_gpu_probe(tmp_path: Path) -> None:
    assert written(tmp_path, probe.main, "--smoke")["probe"]


def test_gpu_host(tmp_path: Path) -> None:
    lines = written(tmp_path, host.main, "--rows", "1", "5", "--prompt", "20")["host"]
    assert [line["rows"] for line in lines] == [1, 5]


def test_gpu_trace(tmp_path: Path, llama: Path) -> None:
    flags = ("--model", str(llama), *SMALL, "--batch", "2", "--steps", "4")
    figures = written(tmp_path, trace.main, *flags)["trace"]
    assert (figures["steps"], figures["host_syncs"]) == (3, 0)


def test_gpu_decode(tmp_path: Path, llama: Path) -> None:
    flags = ("--model", str(llama), *SMALL, "--batch", "1", "--depth", "0", "1", "--window", "2")
    lines = written(tmp_path, decode.main, *flags, "--prompts", "50", "--dtype", "float32")[
        "decode"
    ]
    assert all(line["steps_per_s"] > 0 for line in lines[:-1])
    assert lines[-1]["first_token_ms"] > 0


def test_gpu_divergence(tmp_path: Path, llama: Path) -> None:
    flags = ("--model", str(llama), "--device", "cpu", "--dtype", "float32", "--prompts", "2")
    tokens = ("--max-tokens", "12", "--prompt-tokens", "60")
    figures = written(tmp_path, divergence.main, *flags, *tokens)["divergence"]
    assert figures["with drafts and without"]["equal"] == 2
    assert figures["ours and transformers"]["equal"] == 2


@pytest.mark.timeout(400)
@pytest.mark.rotates(3)
def test_gpu_check_runs_its_parts_and_packs_what_they_found(tmp_path: Path) -> None:
    places = {"OUT": "out", "PACK": "pack.tgz", "MODELS": "models", "WHEELS": "none", "TMPDIR": ""}
    env = os.environ | {name: str(tmp_path / place) for name, place in places.items()}
    env |= {"DRY": "1", "PYTHON": sys.executable, "BUDGET_S": "300", "OMP_NUM_THREADS": "1"}
    parts = ["versions", "trace"]
    command = [str(ROOT / "scripts" / "gpu_check"), *parts]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    told = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert [row.split()[:2] for row in told] == [
        [name, "ok"] for name in ("versions", "make-tiny-llama", "trace")
    ]
    with tarfile.open(tmp_path / "pack.tgz") as archive:
        names = {Path(member.name).name for member in archive}
    assert names >= {"summary.txt", "versions.json", "trace.json"}


def test_kernels_are_carried_to_another_folder(tmp_path: Path) -> None:
    here, there, archive = (tmp_path / name for name in ("here", "there", "kernels"))
    (here / "a").mkdir(parents=True)
    (here / "a" / "one.cubin").write_bytes(b"machine code")
    carry_kernels.pack(here, archive)
    shutil.rmtree(here)
    carry_kernels.unpack(there, archive)
    assert (there / "a" / "one.cubin").read_bytes() == b"machine code"
