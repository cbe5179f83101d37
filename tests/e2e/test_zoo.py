"""`surestep zoo` finds nothing wrong with our server, and each fault in one that lies about it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import aiohttp
import psutil
import pytest
from rich.console import Console
from support.checkpoints.tiny import make_tiny_checkpoint
from support.fakes.liar import Exchange, Liar, Lie, served_by
from support.processes.stack import Stack, serve
from surestep_cli.api.sessions import open_session
from surestep_cli.zoo.case import Case, Finding, Verdict, passed, run
from surestep_cli.zoo.command import Zoo
from surestep_cli.zoo.run import CASES
from surestep_cli.zoo.target import Subject, Target

pytestmark = pytest.mark.timeout(300)

FLAGS = (
    *("--max-num-seqs", "64", "--kv-cache-memory", "0.1"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
NEEDLESS = (  # of what the tiny model has, or was given: hardly a draft is accepted
    *("json-behind-reasoning", "hang-seen"),
    *("acceptance-in-company", "acceptance-at-borders"),
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server with drafts whose context holds the prompts of all cases."""
    folder = tmp_path_factory.mktemp("zoo")
    model = make_tiny_checkpoint(folder / "tiny", seed=7, tokenizer=True, max_position=4096)
    with serve(model, folder, *FLAGS, "--speculative-config", DRAFTS) as running:
        yield running


def zoo(*words: str) -> int:
    return Zoo.load(list(words)).run(Console(stderr=True))


def findings(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> dict[str, Any]:
    status = zoo(url, "--json", *words)
    told = {one["case"]: one for one in json.loads(capsys.readouterr().out)["cases"]}
    assert status == any(one["verdict"] == "fail" for one in told.values())
    return told


def lied(capsys: pytest.CaptureFixture[str], url: str, name: str, lie: Lie, *words: str) -> Any:
    """Return the finding of a case at a server that lies like this."""
    ready, done = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        async with served_by(Liar(url, lie)) as own:
            address.append(own)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        return findings(capsys, address[0], "--case", name, *words)[name]
    finally:
        done.set()
        thread.join()


@pytest.mark.rotates(1)
def test_nothing_is_wrong_with_ours(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    told = findings(capsys, stack.url)
    assert [one["case"] for one in told.values()] == [case.name for case in CASES]
    verdicts = {name: (one["verdict"], one["why"]) for name, one in told.items()}
    assert {name: why for name, (verdict, why) in verdicts.items() if verdict == "fail"} == {}
    shown = [name for name, (verdict, _) in verdicts.items() if verdict != "pass"]
    assert set(NEEDLESS) >= set(shown), verdicts


def _unequal_drafts(exchange: Exchange) -> None:
    if exchange.body.get("speculative") is None and exchange.body.get("max_tokens") != 24:
        exchange.garble()


def _company(exchange: Exchange) -> None:
    if exchange.liar.num_open > 4:
        exchange.garble()


def _later(posts: int) -> Lie:
    return lambda exchange: exchange.garble() if exchange.liar.num_posts > posts else None


def _one_sample(exchange: Exchange) -> None:
    first = next(exchange.choices, {})
    for choice in exchange.choices:
        choice |= {name: first[name] for name in ("text", "token_ids") if name in first}


def _no_acceptance(exchange: Exchange) -> None:
    posts = exchange.liar.num_posts
    exchange.liar.memory["text"] = _counted({"draft": posts * 10, "accepted": min(posts, 7) * 8})


def _counted(counts: Mapping[str, int]) -> str:
    return "".join(
        f'vllm:spec_decode_num_{kind}_tokens_total{{x="y"}} {count}\n'
        for kind, count in counts.items()
    )


def _short_of_the_end(exchange: Exchange) -> None:
    for choice in exchange.choices:
        choice["finish_reason"] = "stop"


def _status(status: int) -> Lie:
    def lie(exchange: Exchange) -> None:
        if exchange.status == 400:
            exchange.status = status

    return lie


def _error_inside(exchange: Exchange) -> None:
    if exchange.status == 400:
        exchange.status, exchange.in_events = 200, True


def _miscounted(exchange: Exchange) -> None:
    for document in exchange.documents:
        if document.get("usage"):
            document["usage"]["completion_tokens"] += 1


def _endless_choice(exchange: Exchange) -> None:
    for choice in exchange.choices:
        if choice.get("index") == 3:
            choice["finish_reason"] = None


def _blanks(exchange: Exchange) -> None:
    exchange.garble("{", "{" + " \n" * 50)


def _unbanned(exchange: Exchange) -> None:
    for choice in exchange.choices:
        if ids := choice.get("token_ids"):
            choice["token_ids"] = exchange.liar.memory.setdefault("ids", ids)


def _flat(exchange: Exchange) -> None:
    for choice in exchange.choices:
        if told := choice.get("logprobs"):
            told["token_logprobs"] = [0.0] * len(told["token_logprobs"])


def _drifting(exchange: Exchange) -> None:
    for choice in exchange.choices:
        for row in choice.get("prompt_logprobs") or ():
            for one in (row or {}).values():
                one["logprob"] -= exchange.liar.num_posts


def _undrafted_together(exchange: Exchange) -> None:
    """Count fewer accepted drafts while others are open."""
    counts = exchange.liar.memory.setdefault("counts", Counter(draft=0, accepted=0))
    if exchange.body.get("max_tokens") == 64:
        counts.update(draft=50, accepted=1 if exchange.liar.most_open > 1 else 40)
    exchange.liar.memory["text"] = _counted(counts)


def _undrafted_behind_long_prompts(exchange: Exchange) -> None:
    counts = exchange.liar.memory.setdefault("counts", Counter(draft=0, accepted=0))
    if exchange.body.get("max_tokens") == 64:
        asked = exchange.documents[0]["usage"]["prompt_tokens"]
        counts.update(draft=50, accepted=1 if asked > 1900 else 40)
    exchange.liar.memory["text"] = _counted(counts)


def _arguments_dropped(exchange: Exchange) -> None:
    """Lie like a server where one delta ends a call and begins the next."""
    for choice in exchange.choices:
        for call in choice.get("delta", {}).get("tool_calls") or ():
            if call["index"] == 1 and "name" not in call["function"]:
                call["function"]["arguments"] = ""


def _uncalled(exchange: Exchange) -> None:
    if exchange.body.get("stream"):
        for choice in exchange.choices:
            choice["delta"] = {"content": "I would call"}


def _fenced_behind_reasoning(exchange: Exchange) -> None:
    """Reason, and wrap JSON as a grammar that begins late does."""
    for choice in exchange.choices:
        said = choice.get("message") or choice.get("delta") or {}
        said["reasoning_content"] = "so"
        if "response_format" in exchange.body:
            said["content"] = f"```json\n{said.get('content')}"


def _uncached(exchange: Exchange) -> None:
    for document in exchange.documents:
        if details := (document.get("usage") or {}).get("prompt_tokens_details"):
            details["cached_tokens"] = 0


LIES: dict[str, Lie] = {
    "on-off": _unequal_drafts,
    "on-off-parameters": _unequal_drafts,
    "on-off-long": _unequal_drafts,
    "company": _company,
    "poisoned-prefix": _later(6),
    "seeds": _one_sample,
    "acceptance-collapse": _no_acceptance,
    "acceptance-in-company": _undrafted_together,
    "acceptance-at-borders": _undrafted_behind_long_prompts,
    "context-edge": _short_of_the_end,
    "over-the-context": _status(500),
    "error-inside-200": _error_inside,
    "stop-over-borders": _later(6),
    "usage": _miscounted,
    "n-choices": _endless_choice,
    "split-characters": lambda exchange: exchange.garble("🚀", "\ufffd"),
    "json-at-once": lambda exchange: exchange.garble("}", ""),
    "runaway-blanks": _blanks,
    "json-behind-reasoning": _fenced_behind_reasoning,
    "banned-token": _unbanned,
    "tools-streamed": _uncalled,
    "calls-in-a-row": _arguments_dropped,
    "text-like-tools": lambda exchange: exchange.garble("<", ""),
    "hostile-grammar": _status(500),
    "logprobs": _flat,
    "prompt-logprobs": _drifting,
    "cancel-storm": _later(20),
    "growing-chat": _uncached,
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.rotates(1)
def test_a_lie_is_found(stack: Stack, capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = lied(capsys, stack.url, name, LIES[name])
    assert found["verdict"] == "fail", found
    assert found["request"] is not None


def test_each_case_can_fail() -> None:
    assert {*LIES, "hang-seen"} == {case.name for case in CASES}


def test_a_server_that_stands_still_is_found(
    stack: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its probes say that all is well."""
    monkeypatch.setattr("surestep_cli.zoo.lifecycle._HANG_S", 2.0)
    with subprocess.Popen(["sleep", "100"]) as victim:
        words = "--stop-pid", str(victim.pid)
        ours = findings(capsys, stack.url, "--case", "hang-seen", *words)["hang-seen"]

        def lie(exchange: Exchange) -> None:
            if psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED:
                exchange.status = 200 if exchange.path.startswith("/health") else 500

        theirs = lied(capsys, stack.url, "hang-seen", lie, *words)
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
        victim.kill()
    assert (ours["verdict"], theirs["verdict"]) == ("pass", "fail")


def test_refusals_are_no_failures(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    def lie(exchange: Exchange) -> None:
        if exchange.body.get("logprobs"):
            exchange.status = 400

    assert lied(capsys, stack.url, "logprobs", lie)["verdict"] == "not applicable"


def test_what_only_tells_more_is_left_out(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Lie as transformers does: it refuses all fields that it does not know, and says no [DONE]."""

    def lie(exchange: Exchange) -> None:
        exchange.unended = True
        if exchange.body.keys() & {"return_token_ids", "stream_options"}:
            exchange.status, exchange.in_events = 422, False

    for name in ("company", "n-choices"):
        assert lied(capsys, stack.url, name, lie)["verdict"] == "pass"


def test_a_text_of_broken_characters_is_undecided(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(exchange: Exchange) -> None:
        for choice in exchange.choices:
            choice.get("message", {})["content"] = "\ufffd" * 60

    assert lied(capsys, stack.url, "stop-over-borders", lie)["verdict"] == "cannot tell"


def _no_choices(exchange: Exchange) -> None:
    if exchange.body.get("stream") or exchange.body.get("logprobs"):
        for document in exchange.documents:
            document["choices"] = [None]


@pytest.mark.parametrize("name", ["usage", "logprobs", "json-at-once"])
def test_another_form_is_a_failure(
    stack: Stack, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = lied(capsys, stack.url, name, _no_choices)
    assert (found["verdict"], found["why"][:26]) == ("fail", "an answer of another form:")


async def test_what_breaks_among_several_requests_is_a_failure(stack: Stack) -> None:
    async def look(subject: Subject) -> Finding:
        async with asyncio.TaskGroup() as group:
            group.create_task(subject.target.get("health"))
            group.create_task(subject.target.post("v1/completions", {"prompt": 1}))
        return passed("")

    one = Case("one", "V#1", "", "", (), 1, look)
    async with open_session(stack.url, timeout=aiohttp.ClientTimeout(total=30)) as session:
        subject = Subject(Target(session, "tiny", is_ours=True), None, True, 100, None)
        assert (await run(one, subject, 30)).finding.verdict is Verdict.NOT_APPLICABLE
    async with open_session(
        "http://127.0.0.1:9", timeout=aiohttp.ClientTimeout(total=30)
    ) as session:
        subject = subject._replace(target=Target(session, "tiny", is_ours=True))
        assert (await run(one, subject, 30)).finding.verdict is Verdict.FAIL


@pytest.mark.parametrize(("pace", "verdict"), [(1e6, Verdict.FAIL), (100, Verdict.CANNOT_TELL)])
async def test_a_slow_server_does_not_hang(pace: float, verdict: Verdict) -> None:
    async def look(_: Subject) -> Finding:
        return await asyncio.Future()

    endless = Case("endless", "V#1", "", "", (), 1, look)
    async with aiohttp.ClientSession() as session:
        subject = Subject(Target(session, "tiny", is_ours=True), None, True, pace, None)
        assert (await run(endless, subject, 0.1)).finding.verdict is verdict


def _emptied(exchange: Exchange) -> None:
    for choice in exchange.choices:
        choice |= {"text": "", "token_ids": [], "message": {}}


def test_empty_answers_show_nothing(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    found = lied(capsys, stack.url, "company", _emptied)
    assert (found["verdict"], found["why"]) == ("cannot tell", "every answer is empty")


def test_a_process_that_is_not_there(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--case", "hang-seen", "--stop-pid", str((1 << 22) + 1)
    assert findings(capsys, stack.url, *words)["hang-seen"]["verdict"] == "not applicable"


def test_files_to_share(stack: Stack, tmp_path: Path) -> None:
    for suffix in (".html", ".xml", ".json"):
        file = tmp_path / f"zoo{suffix}"
        assert zoo(stack.url, "--case", "usage", "--report", str(file)) == 0
        assert "usage" in (text := file.read_text())
        assert suffix == ".xml" or ("tiny" in text and "surestep" in text)
    (test,) = ElementTree.fromstring((tmp_path / "zoo.xml").read_text())
    assert (test.get("name"), len(test)) == ("usage", 0)


@pytest.mark.parametrize(
    ("words", "told"), [(("--case", "x"), "no case 'x'"), (("--report", "x.pdf"), "must end in")]
)
def test_mistakes_are_named(words: tuple[str, ...], told: str) -> None:
    command = sys.executable, "-m", "surestep_cli", "zoo", "http://127.0.0.1:9", *words
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr
