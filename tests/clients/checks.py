"""What the scripts of all clients share. They run in environments of their own: nothing but Python.

A script says what it checks by decorators, in words that become columns of docs/use/clients.md. Of each
check one line of JSON is written, and the exit status is 1 if one of them failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
import traceback
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "scripted"
WORKS, REFUSED, FAILED = "works", "refused", "failed"
PATIENCE_S = 10.0
_OPEN = re.compile(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", re.MULTILINE)
# What clients/scripted_model.py answers.
SENTENCE = re.compile(r"^(The|Our|One|Each|Some|This)( \w+){5} [\w ]+\.$")
TALK = "Good morning!"
WEATHER = "How is the weather in Oslo?"
STORY = "Tell me a story that never ends."
REPORT = "It is 3 degrees in Oslo."
TOO_LONG = "too long " * 2_000  # a token for each character
# Prompts that are scored, and how they might go on; LOGLIKELIHOODS in the model's folder has what
# transformers says of each.
SCORED = {
    "The capital of Norway is": (" Oslo", " Rome", " a bridge."),
    "Once upon a time": (" there was a fox.", ", two rivers", "!"),
    "é ü 你好 🙂": (" ok", "\nnew line", " 再见"),
}
LOGLIKELIHOODS = "loglikelihoods.json"
JSON_ASKED = "Answer in JSON: who wrote the first program, at what age?"
JSON_SAID = '```json\n{"name": "Ada", "age": 36}\n```'


@dataclass(frozen=True)
class Server:
    """The server as a script is told of it: its root, its key, and the folder of its model."""

    root: str
    key: str
    folder: Path

    @property
    def url(self) -> str:
        """The URL that clients take for OpenAI's."""
        return f"{self.root}/v1"

    def open_requests(self) -> int:
        """Count the open requests of all clients, as the scheduler does."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=10) as reply:
            counts = _OPEN.findall(reply.read().decode())
        assert counts, "no such metrics"
        return int(sum(map(float, counts)))

    def becomes_idle(self) -> None:
        """Long before a story has come to the model's limit."""
        deadline = time.monotonic() + PATIENCE_S
        while self.open_requests():
            assert time.monotonic() < deadline, "the server goes on for a client that has left"
            time.sleep(0.05)


Check = Callable[[Server], Any]  # a coroutine function too
_checks: list[tuple[str, str, Check]] = []


def works(feature: str) -> Callable[[Check], Check]:
    """A check that the client's users get what they ask for."""
    return _noted(feature, WORKS)


def refused(feature: str) -> Callable[[Check], Check]:
    """A check that they are told by name, in the client's own exception, that it is not there."""
    return _noted(feature, REFUSED)


def _noted(feature: str, outcome: str) -> Callable[[Check], Check]:
    def note(check: Check) -> Check:
        _checks.append((feature, outcome, check))
        return check

    return note


@contextmanager
def raises(kind: type[BaseException], text: str = "", **attributes: Any) -> Iterator[None]:
    """Insist that the block raises such an error, with this text in it and these attributes."""
    caught = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__}"
    assert text in str(caught), f"{text!r} is not in {caught}"
    found = {name: getattr(caught, name, None) for name in attributes}
    assert found == attributes, f"{found} in {caught}"


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}


def varied(texts: Sequence[str | None]) -> None:
    """Answers for the seeds 1, 1, 2 and 3."""
    assert texts[0] == texts[1], "one seed, two answers"
    assert len(set(texts)) > 1, "seeds change nothing"


def weather_of(arguments: str) -> str:
    """The tool, called as the model asks for it."""
    return weather(**json.loads(arguments))


def fits(arguments: str | dict[str, Any]) -> bool:
    """Whether arguments of a forced call are as PARAMETERS say.

    Which ones is chance: a grammar lets the model spell what is certain in one way only, and that
    is not the way of its scripts.
    """
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    types = {"city": str, "days": int}
    return given.keys() == types.keys() and all(isinstance(given[n], t) for n, t in types.items())


def weather(city: str, days: int) -> str:
    """Answer as the tool of all scripts."""
    assert (city, days) == ("Oslo", 2), "arguments that the model did not write"
    return f"{days + 1} degrees"


async def cancel(server: Server, stream: Awaitable[AsyncIterator[Any]]) -> None:
    """Cancel a task that listens to a story, and see that the server stops telling it."""
    started = asyncio.Event()

    async def listen() -> None:
        async for _ in await stream:
            started.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    assert server.open_requests()
    task.cancel()
    await asyncio.wait([task])
    await asyncio.to_thread(server.becomes_idle)


def main(server: Server) -> int:
    """Run every check of the script; returns the exit status."""
    failures = 0
    for feature, outcome, check in _checks:
        start = time.monotonic()
        trouble = _trouble(check, server)
        failures += trouble is not None
        line = {
            "feature": feature,
            "outcome": FAILED if trouble is not None else outcome,
            "seconds": round(time.monotonic() - start, 2),
            "trouble": trouble,
        }
        # The runner reads it; on a line of its own, whatever the client has printed.
        print("\n" + json.dumps(line), flush=True)
    return int(failures > 0)


def _trouble(check: Check, server: Server) -> str | None:
    """Traceback of a check that failed."""
    try:
        result = check(server)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception:  # noqa: BLE001  whatever a client raises is told
        return f"{check.__name__}\n{traceback.format_exc()}"
    return None
