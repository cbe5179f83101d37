"""The benchmarks end to end against toy servers in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import fairness
import launch
import offline
import online
import peers
import peers_picture
import pytest
from integration import toy_servers
from support.processes import ports
from support.processes.commands import children

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


async def test_peers_leaves_out_what_a_server_refuses_and_says_how_short_answers_were(
    free_port: int, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    entry = {"name": "strict", "url": url, "command": toy("strict", free_port)}
    extra = {"stream_options": None, "ignore_eos": None}
    argv = ["--rounds", "1", "--json", str(tmp_path / "rounds.jsonl"), "--log-dir", str(tmp_path)]
    args = peers.parse([*argv, *LOAD])
    servers = [peers.listed_server({**entry, "extra": extra})]
    with args.json:
        rounds = await peers.compare(servers, args)
    (figures,) = rounds["strict"]
    assert figures["tokens per answer, c=2"] == toy_servers.STRICT_TOKENS
    assert figures["output tok/s, c=2"] > 0


def test_peers_table_has_medians_and_the_median_of_paired_ratios() -> None:
    rounds = {
        "a": [{"tok/s": 10.0}, {"tok/s": 30.0}, {"tok/s": 20.0}],
        "b": [{"tok/s": 5.0}, {"tok/s": 10.0}, {"tok/s": 20.0}],
    }
    assert peers.table(rounds).splitlines() == [
        "| median | a | b | a / b |",
        "| --- | --- | --- | --- |",
        "| tok/s | 20 | 10 | 2 |",
    ]


def test_peers_picture_has_a_bar_for_every_server_and_concurrency() -> None:
    rounds = {
        "a": [{"output tok/s, c=1": 10.0, "output tok/s, c=8": 40.0, "TTFT p50, ms, c=1": 7.0}],
        "b <&>": [{"output tok/s, c=1": 5.0, "output tok/s, c=8": 0.0}],
    }
    drawn = ElementTree.fromstring(peers_picture.to_svg(rounds, "3 rounds & more"))
    space = "{http://www.w3.org/2000/svg}"
    panels = drawn.findall(f"{space}g")
    titles = [panel.findtext(f"{space}text") for panel in panels]
    assert titles == ["output tok/s, c=1", "output tok/s, c=8"]
    heights = [[float(bar.get("height", "")) for bar in p.findall(f"{space}rect")] for p in panels]
    assert heights == [[200.0, 100.0], [200.0, 0.0]]
    assert "b <&>" in [text.text for text in drawn.findall(f"{space}text")]


async def test_a_command_that_dies_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(3)'"
    async with launch.launched(command, tmp_path / "log") as server:
        with pytest.raises(RuntimeError, match=f"exit status 3.*{tmp_path}"):
            await server.first_token(lambda: launch.http_first_token("http://127.0.0.1:9"), 30)


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
    assert figures["on"]["tokens_per_step"] == toy_servers.TOKENS_PER_DRAFTED_STEP
    assert figures["on"]["acceptance"] == 0.5
    assert (figures["on"]["equal_outputs"], figures["on"]["outputs"]) == (9, 9)


async def test_offline_startup_times_every_launch(free_port: int) -> None:
    argv = ["startup", "--scheduler", f"127.0.0.1:{free_port}", "--rounds", "2"]
    args = offline.parse([*argv, "--launch", toy("scheduler", free_port)])
    figures = await offline.startup(args)
    assert len(figures["start_s"]) == 2
    assert min(figures["start_s"]) > 0
    assert all(min(cpu_s.values()) > 0 for cpu_s in figures["cpu_s"])
