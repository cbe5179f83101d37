"""`surestep verify --url` against servers that are right, and wrong in many ways."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.fakes.openai_server import (
    MODEL,
    WRONG_AT,
    AnyServer,
    MadeUpServer,
    Pretender,
    Wrong,
    next_token,
    serving,
)
from surestep_cli.main import run

pytestmark = pytest.mark.timeout(60)
EVERYWHERE = {"alone", "together", "at max_model_len", "64 x 8 samples", "newcomers"}


class Ran(NamedTuple):
    """Outcome of the command."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """With --json."""
        return json.loads(self.out)


async def verify(server: AnyServer, *words: str, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs beside the server, which is on this loop."""
    async with serving(server):
        status = await asyncio.to_thread(run, ["verify", "--url", server.url + "/v1", *words])
    told = capsys.readouterr()
    return Ran(status, told.out, told.err)


@pytest.fixture(autouse=True)
def signals_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers can be set in the main thread alone."""
    monkeypatch.setattr("surestep_cli.verify.command._SIGNALS", ())


async def test_a_server_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    server = MadeUpServer()
    ran = await verify(server, "--json", capsys=capsys)
    report = ran.report
    assert (ran.status, report["verdict"], report["model"]) == (0, "equal", MODEL)
    # Greedy, sampled x alone, together x without, with; the limit, the crowd and newcomers.
    assert len(report["cases"]) == 8 + 2 + 2
    assert all(case["num_equal"] == case["num_answers"] > 5 for case in report["cases"])
    verdicts = {claim["name"]: claim["verdict"] for claim in report["claims"]}
    assert verdicts.pop("a lost process costs no request") is None
    assert set(verdicts.values()) == {"equal"}
    assert (report["reference_windows"], report["ledger"]["mismatches"]) == (0, 0)
    assert report["ledger"]["rows"] > 100
    assert report["preemptions"] > 0
    assert {"a tool", "grammar", "min_p"} < report["skipped"].keys()  # it does without
    speed = report["speedup"]["greedy, alone"]
    assert speed["least"] <= speed["median"] <= speed["most"]
    assert report["speedup"]["sampled, alone"] is None
    assert report["faults"] == []
    drafts = report["drafts"]
    assert drafts["windows"] > 0
    assert (drafts["drafted"], drafts["accepted"]) == (3 * drafts["windows"], 2 * drafts["windows"])
    assert drafts["acceptance_per_position"] == [1, 1]
    assert report["temperature"] == 0.7
    found = {each["case"]: each["verdict"] for each in report["published"]}
    assert found["on-off"] == found["company"] == found["cancel-storm"] == "pass"
    assert any("no process was killed" in note for note in report["notes"])


async def test_what_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    own = {"prompt": "x", "temperature": 0.3, "seed": 5, "speculative": {"num_tokens": 2}}
    prompts.write_text(f"{json.dumps(chat)}\n{json.dumps(own)}\n")
    server = MadeUpServer()
    ran = await verify(server, "--prompts", str(prompts), "--temperature", "2", capsys=capsys)
    assert ran.status == 0
    own_seeds = [body for body in server.bodies if body.get("seed") == 5]
    asked = [*own_seeds, *(body for body in server.bodies if "messages" in body)]
    asked = [body for body in asked if "cache_salt" not in body and "stream_options" not in body]
    rounds = 2 * (3 + 1) * 2  # of greedy and sampled answers, alone and together, in both modes
    assert len(asked) == 2 * (2 + rounds + 1) + 1  # references, a newcomer, and log-probabilities
    for body in asked:
        assert body["return_token_ids"] is body["stream"] is True
        if "messages" in body:
            assert body["temperature"] in (0, 2)
            assert "max_tokens" not in body
        else:
            assert (body["temperature"], body["max_tokens"]) in ((0, 64), (0.3, 64))
            assert body["seed"] == 5
            assert body["speculative"]["num_tokens"] in (0, 2)
    seeds = {body.get("seed") for body in asked if "messages" in body and body["temperature"]}
    assert len(seeds) == 1


@pytest.mark.parametrize(
    ("wrong", "gap", "hurt", "meaning"),
    [
        ("speculation", 1.5, EVERYWHERE, "no rounding explains"),
        ("speculation", 0.01, EVERYWHERE, "near tie"),
        ("length", 1.5, EVERYWHERE, "no rounding explains"),
        ("everything", 1.5, EVERYWHERE, "does not repeat its own"),
    ],
)
@pytest.mark.rotates(1)
async def test_a_server_whose_tokens_differ(
    wrong: Wrong, gap: float, hurt: set[str], meaning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = await verify(MadeUpServer(wrong, gap), "--json", "--max-tokens", "12", capsys=capsys)
    report = ran.report
    assert (ran.status, report["verdict"]) == (1, "different")
    found = {each["case"]: each["verdict"] for each in report["published"]}
    assert (found["on-off"] == "fail") == (wrong in ("speculation", "length"))
    bad = [case for case in report["cases"] if case["num_equal"] < case["num_answers"]]
    assert {case["company"] for case in bad} == hurt
    first = next(case for case in bad if case["sampling"] == "greedy")["differences"][0]
    places = {"length": 11, "speculation": WRONG_AT, "everything": WRONG_AT - 1}
    assert first["place"]["position"] == places[wrong]
    assert meaning in first["meaning"]
    if wrong != "everything":
        assert first["gap"] == pytest.approx(gap)
        assert "the end" in first["what"] if wrong == "length" else "became" in first["what"]


async def test_a_chat_that_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    server = MadeUpServer("speculation")
    ran = await verify(server, "--prompts", str(prompts), capsys=capsys)
    assert ran.status == 1
    flat = " ".join(ran.out.split())
    assert "greedy, alone, with speculation: p.jsonl:1 hi, token 6:" in flat
    assert "Gap of the two best logits there: 1.500 ('a' -0.201 and 'b' -1.701)" in flat
    assert "DIFFERENT speculation changes no token: of 16 answers 8 differ, 0 were lost" in flat


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("broken", "the stream ended without [DONE]"),
        ("error", "error in the stream: the engine is dead"),
    ],
)
async def test_answers_that_are_lost(
    wrong: Wrong, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = await verify(MadeUpServer(wrong), capsys=capsys)
    assert ran.status == 1
    assert said in ran.out
    assert "speculation changes no token: of 112 answers 0 differ, 56 were lost" in ran.out


async def test_another_reason_to_end_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    ran = await verify(MadeUpServer("ending"), capsys=capsys)
    assert ran.status == 1
    assert "finish reason length became stop" in ran.out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("text", "sends no token ids"),
        ("refusal", "prompt 'a fact': HTTP 400: no room for this (max_tokens)"),
    ],
)
async def test_servers_that_cannot_be_compared(
    wrong: Wrong, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = await verify(MadeUpServer(wrong), capsys=capsys)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


async def test_a_server_that_does_not_say_whether_it_speculates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = await verify(MadeUpServer(own=False), "--quick", capsys=capsys)
    assert ran.status == 2
    assert "This server is not Surestep" in ran.out
    assert "NOT SHOWN speculation changes no token: 0 draft windows were verified" in ran.out


@pytest.mark.parametrize(
    ("salt", "said"),
    [
        (False, "all 6 prompts have the same answer"),
        (True, "is likeliest behind another prompt, too"),
    ],
)
async def test_a_server_without_a_model(
    salt: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right every time, and it always says the same: nothing that it can be compared with."""
    ran = await verify(Pretender(salt=salt), "--quick", "--json", capsys=capsys)
    report = ran.report
    assert (ran.status, report["verdict"]) == (1, "different")
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["parameters"]["verdict"] == "different"
    assert "3 samples (n)" in checks["parameters"]["detail"]
    assert any(said in check["detail"] for check in checks.values())


async def test_a_server_that_is_wrong_with_and_without_drafts_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nobody but the reference knows."""
    ids = list(b"one two")
    right: list[int] = []
    for _ in range(12):
        right.append(next_token([*ids, *right]))
    path = tmp_path / "right.jsonl"
    path.write_text(json.dumps({"prompt": ids, "token_ids": right}) + "\n")
    words = ("--reference", str(path), "--quick", "--json")
    ran = await verify(MadeUpServer(), *words, capsys=capsys)
    assert ran.status == 0
    assert "reference right.jsonl: 1 answers are equal" in ran.out
    ran = await verify(Pretender(), *words, capsys=capsys)
    assert ran.status == 1
    assert "right.jsonl:1: token 1 differs" in ran.out


async def test_another_server_as_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(MadeUpServer()) as reference:
        words = ("--reference", reference.url, "--quick", "--json")
        right = await verify(MadeUpServer(), *words, capsys=capsys)
        wrong = await verify(Pretender(salt=True), *words, capsys=capsys)
    assert right.status == 0
    name = f"reference {reference.url}"
    (check,) = (each for each in right.report["checks"] if each["name"] == name)
    assert check["verdict"] == "equal"
    (check,) = (each for each in wrong.report["checks"] if each["name"] == name)
    assert check["verdict"] == "different"
    assert "greedy tokens are not what the model ranks first" in check["detail"]


async def test_names_and_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    ran = await verify(MadeUpServer(), "another", capsys=capsys)
    assert (ran.status, ran.out) == (2, "")
    assert f"no model 'another' is served: {MODEL}" in ran.err


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server at 127.0.0.1:9: start one with" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["r.html", "r.json"])
@pytest.mark.rotates(1)
async def test_reports(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("<script>alert(1)</script>\n")
    words = ("--prompts", str(prompts), "--report", str(tmp_path / name))
    ran = await verify(MadeUpServer("speculation"), *words, capsys=capsys)
    assert ran.status == 1
    text = (tmp_path / name).read_text()
    if name.endswith("json"):
        assert json.loads(text)["verdict"] == "different"
    else:
        assert text.startswith("<!doctype html>")
        assert "DIFFERENT: of " in text
        assert "<script" not in text
        assert "http-equiv" not in text
        assert "&lt;script&gt;" in text
