"""`surestep chat` between pipes, and in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from support.processes.stack import environment
from surestep_cli.chat.chat import obey
from surestep_cli.chat.conversation import Conversation
from surestep_cli.main import run
from surestep_common.errors import InvalidRequest

pytestmark = pytest.mark.timeout(60)
SLOW = "take your time"  # a question whose answer does not end
BELL = "\x07\x1b]0;title\x07"


class Talker:
    """Thinks, then says what it was asked, and how much it was told before."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []

    async def models(self, _: web.Request) -> web.Response:
        """List one model."""
        return web.json_response({"data": [{"id": "talker"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """A stream."""
        body = await request.json()
        self.bodies.append(body)
        said = body["messages"][-1]["content"]
        if said == "refuse":
            return web.json_response({"error": {"message": "I will not"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(payload: Any) -> None:
            await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

        async def delta(**delta: str) -> None:
            await send({"choices": [{"delta": delta, "finish_reason": None}]})

        await delta(role="assistant", content="")
        await delta(reasoning="let me think", reasoning_content="let me think")
        await delta(content=f"[{len(body['messages'])}] ")
        if said == SLOW:
            with contextlib.suppress(ConnectionError):
                await asyncio.Event().wait()
        await delta(content=f"{said}{BELL}")
        if said == "break":
            return response
        await send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await send({"choices": [], "usage": {"completion_tokens": 7}})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def talker() -> AsyncIterator[Talker]:
    """Listens."""
    made = Talker()
    app = web.Application()
    app.add_routes(
        [web.get("/v1/models", made.models), web.post("/v1/chat/completions", made.chat)]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def chat(talker: Talker, *words: str) -> int:
    """In a thread, for the server is on this loop."""
    return await asyncio.to_thread(run, ["chat", "--url", talker.url, *words])


async def test_one_prompt_in_and_the_answer_out(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("what stands in a file"))
    words = ("--system", "be brief", "--max-tokens", "9", "--extra", '{"top_p": 0.5}')
    assert await chat(talker, "Sum up:", *words) == 0
    told = capsys.readouterr()
    assert told.out == f"[2] Sum up:\n\nwhat stands in a file{BELL}\n"  # as it came
    assert told.err == ""
    (body,) = talker.bodies
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (body["model"], body["max_tokens"], body["top_p"]) == ("talker", 9, 0.5)
    assert "temperature" not in body


@pytest.mark.parametrize(
    ("piped", "status", "said"),
    [
        ("", 2, "no prompt"),
        ("refuse", 1, "HTTP 400: I will not"),
        ("break", 1, "the stream ended without [DONE]"),
    ],
)
async def test_what_goes_wrong_is_told(
    talker: Talker,
    piped: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    assert await chat(talker) == status
    assert said in capsys.readouterr().err


async def test_settings_of_servers_are_not_those_of_clients(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands also run in a container of the server, beside its variables."""
    monkeypatch.setenv("SURESTEP_MODEL", "/models/folder")
    monkeypatch.setenv("SURESTEP_SEED", "3")
    monkeypatch.setenv("SURESTEP_URL", talker.url)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert await asyncio.to_thread(run, ["chat"]) == 0
    assert talker.bodies[0]["model"] == "talker"
    assert "seed" not in talker.bodies[0]


class Terminal:
    """The command at a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 500))  # no line that is typed breaks
        command = [sys.executable, "-m", "surestep_cli", "chat", "--url", url]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment({"TERM": "xterm"}),
            start_new_session=True,
            # Tests that run in the background have Ctrl-C ignored, and so would the command.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        self.told = ""

    def until(self, done: Callable[[str], bool]) -> str:
        """Read until what came since the last call is enough."""
        begin = len(self.told)
        while not done(self.told[begin:]):
            ready, _, _ = select.select([self.fd], [], [], 30)
            assert ready, f"nothing more came after {self.told[begin:]!r}"
            self.told += os.read(self.fd, 65536).decode()
        return self.told[begin:]

    def say(self, line: str, until: str | None = None) -> str:
        """Type a line and read until something is there, and the next prompt behind it."""
        os.write(self.fd, line.encode() + b"\n")
        wanted = until or line
        return self.until(lambda told: "\n> " in told.partition(wanted)[2].replace("\r", ""))

    def interrupt(self) -> None:
        """With Ctrl-C, again where it came just before the process began to wait for the server."""
        for _ in range(10):
            os.kill(self.process.pid, signal.SIGINT)
            if select.select([self.fd], [], [], 2)[0]:
                return
        raise AssertionError("it does not hear Ctrl-C")

    def close(self) -> int:
        """With Ctrl-D."""
        os.write(self.fd, b"\x04")
        with contextlib.suppress(OSError):  # it is closed
            while os.read(self.fd, 65536):
                pass
        os.close(self.fd)
        return self.process.wait(20)


def converse(url: str, saved: Path) -> int:
    """A whole conversation, in a thread."""
    terminal = Terminal(url)
    terminal.until(lambda told: "> " in told)
    answer = terminal.say("hello", "7 tokens")
    assert "let me think" in answer
    assert "[1] hello\ufffd\ufffd]0;title\ufffd" in answer  # nothing that a terminal obeys
    assert "\x07" not in answer
    assert "[3] again" in terminal.say("again", "7 tokens")
    assert "[3] again" in terminal.say("/retry", "7 tokens")
    terminal.say("/undo")
    terminal.say("/system short")
    assert "[4] more" in terminal.say("more", "7 tokens")  # system, hello, its answer
    assert "no command /bogus" in terminal.say("/bogus", "no command")
    assert "I will not" in terminal.say("refuse", "I will not")
    os.write(terminal.fd, SLOW.encode() + b"\n")
    terminal.until(lambda told: "[6]" in told)
    terminal.interrupt()
    terminal.until(lambda told: "\n> " in told.replace("\r", ""))
    assert "[8] after" in terminal.say("after", "7 tokens")  # what was cut off is part of it
    terminal.say(f"/save {saved}")
    terminal.say("/reset")
    assert "[2] fresh" in terminal.say("fresh", "7 tokens")
    return terminal.close()


async def test_a_conversation(talker: Talker, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    assert await asyncio.to_thread(converse, talker.url, saved) == 0
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"]
    assert messages[-1]["content"].startswith("[8] after")
    assert not any("refuse" in m["content"] for m in messages)


@pytest.mark.parametrize(
    ("line", "told", "fields"),
    [
        ("/set temprature 0.2", "no field temprature: did you mean temperature?", {}),
        ("/set temperature 0.2", None, {"temperature": 0.2}),
        ("/set xyzzy 1", None, {"xyzzy": 1}),  # another server may have it
    ],
)
def test_a_mistyped_field_is_told(line: str, told: str | None, fields: dict[str, Any]) -> None:
    chat = Conversation("u", None, {}, 1.0)
    raised = contextlib.nullcontext() if told is None else pytest.raises(InvalidRequest, match=told)
    with raised:
        obey(chat, line, Console(quiet=True))
    assert chat.fields == fields
