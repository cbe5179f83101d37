"""Coding agents at work, started by the commands of docs/use/clients.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clients.checks import MODEL, PATIENCE_S, SENTENCE, TALK, Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = {"name": "Ada", "age": 36}
STORY = "Tell me a story that never ends."
JSON_ASKED = "Answer in JSON: who wrote the first program, at what age?"
KEY_REFUSED = "missing or wrong API key"  # the server's own words reach the user
_PAGE = Path(__file__).parents[3] / "docs" / "use" / "clients.md"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_PROMPT = '"Say hello."'
_PROVIDER = "openai-compatible"
_RUN_S = 120


class Done(NamedTuple):
    """The end of a run."""

    output: str
    errors: str
    folder: Path

    @property
    def events(self) -> list[Any]:
        """The lines of JSON on standard output, lists of events taken apart."""
        found: list[Any] = []
        for line in self.output.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                found += event if isinstance(event, list) else [event]
        return [event for event in found if isinstance(event, dict)]

    @property
    def told(self) -> str:
        """All that it wrote, for messages."""
        return f"{self.output[-3000:]}\n{self.errors[-3000:]}"


class Agent:
    """An agent; its page has a command and, where it needs one, the text of `config`.

    Lines before the command prepare it.
    """

    def __init__(self, heading: str, config: str | None = None, *flags: str) -> None:
        section = _PAGE.read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n### ")[0]
        blocks = dict(_BLOCK.findall(section))
        self._command = blocks.pop("bash").strip()
        self._config, self._text = config, next(iter(blocks.values()), "")
        self._flags = flags

    def run(self, server: Server, prompt: str, *flags: str, **about: str) -> Done:
        """Ask in a new folder with a file in it. `about` may name another model, key or provider."""
        with self._started(server, prompt, flags, **about) as (process, folder):
            output, errors = process.communicate(timeout=_RUN_S)
        return Done(output, errors, folder)

    def chat(self, server: Server) -> None:
        """Have it answer, and nothing else on standard output."""
        done = self.run(server, TALK)
        assert SENTENCE.match(done.output), done.told

    def stream(self, server: Server, *events: str) -> None:
        """Have it show its answer in pieces, by flags for Anthropic's events, and as a whole."""
        done = self.run(server, TALK, *events)
        assert streamed(done) == result(done)["result"]

    def cancel(self, server: Server) -> None:
        """Interrupt it in the middle of a story, and see that the server stops telling it."""
        with self._started(server, STORY, ()) as (process, _):
            deadline = time.monotonic() + _RUN_S
            while not server.open_requests():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "nothing was asked"
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE_S)
        server.becomes_idle()

    @contextlib.contextmanager
    def _started(
        self, server: Server, prompt: str, flags: tuple[str, ...], **about: str
    ) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        folder = Path(tempfile.mkdtemp(prefix="project-"))
        (folder / "weather.txt").write_text("3 degrees\n")
        key, model = about.get("key", server.key), about.get("model", MODEL)
        known = {"http://127.0.0.1:8000": server.root, "SmolLM2-135M-Instruct": model, "none": key}
        known[_PROVIDER] = about.get("provider", _PROVIDER)
        if self._config is not None:
            config = Path(self._config.replace("~", str(Path.home())))
            path = config if config.is_absolute() else folder / config
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_with(self._text, known))
        words = shlex.join((*self._flags, *flags, prompt))
        *before, command = _with(self._command, known).splitlines()
        assert _PROMPT in command, command
        script = [
            *(f"{line} >&2" for line in before),
            f"exec env {command.replace(_PROMPT, words)}",
        ]
        process = subprocess.Popen(
            ["bash", "-ec", "\n".join(script)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process, folder
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _with(text: str, known: dict[str, str]) -> str:
    """A text of the page with what this server has in place of its examples."""
    return re.sub(
        "|".join(rf"(?<!\w){re.escape(old)}(?!\w)" for old in known),
        lambda found: known[found[0]],
        text,
    )


def streamed(done: Done) -> str:
    """The text that came in pieces, of agents that show Anthropic's events."""
    deltas = [e["event"]["delta"] for e in done.events if "delta" in e.get("event", {})]
    pieces = [one["text"] for one in deltas if one.get("type") == "text_delta"]
    assert len(pieces) > 3, done.told
    return "".join(pieces)


def result(done: Done) -> dict[str, Any]:
    """The last event, of agents that close with a result."""
    found = [event for event in done.events if event.get("type") == "result"]
    assert len(found) == 1, done.told
    return dict(found[0])
