"""Twelve kinds of traffic against several servers in turns: who is how much faster, on equal texts.

    python benchmarks/mixes.py --concurrency 1 8 32 \
        --server auto "surestep serve --port 8001" \
        --server none "surestep serve --port 8002 --speculative-config none"

COMMAND may be the URL of one that runs. All servers are up; one at a time is asked, so that what
else the machine does meets them alike. A ratio is that of a server to the last one, by the tokens
per second of each round: the median, and that of all rounds together. Texts are this repository's
own. Two servers of one command differ by 3 to 8 %: where each has its memory is luck. `--undrafted
auto` asks the server `auto` without drafts as well, in one more turn, which that luck meets alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop
from launch import http_first_token, launched
from surestep_cli.api.sessions import open_session, stream

Body = dict[str, Any]
Mix = Callable[[int], list[Body]]  # of a conversation: each turn brings a message and parameters

_ROOT = Path(__file__).parents[1]
_CHATS = Path(__file__).with_name("chats.txt").read_text().splitlines()
_PASSAGES = [
    part.strip()
    for name in ("recovery", "protocol", "structures")
    for part in (_ROOT / f"docs/change/{name}.md").read_text().split("\n\n")
    if 200 < len(part) < 1200
]
_MODULES = sorted((_ROOT / "scheduler_svc/surestep_scheduler").rglob("*.py"))
_CODE = [text for path in _MODULES if len(text := path.read_text()) > 1500]

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "known_for": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4},
    },
    "required": ["name", "born", "known_for"],
    "additionalProperties": False,
}
_PEOPLE = ("Marie Curie", "Alan Turing", "Ada Lovelace", "Isaac Newton", "Frida Kahlo")


def _ask(content: str, max_tokens: int, **fields: Any) -> Body:
    return {"content": content, "max_tokens": max_tokens, **fields}


def _of(texts: Sequence[str], index: int) -> str:
    return texts[index % len(texts)]


def chat(index: int) -> list[Body]:
    return [_ask(_of(_CHATS, index), 96)]


def code(index: int) -> list[Body]:
    text = _of(_CODE, index)[:1200]
    return [
        _ask(f"Write this Python file again, with a comment in front of each line:\n\n{text}", 128)
    ]


def structured(index: int) -> list[Body]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
    return [
        _ask(f"Who was {_of(_PEOPLE, index)}? Answer {index} in JSON.", 96, response_format=schema)
    ]


def translation(index: int) -> list[Body]:
    return [_ask(f"Translate into French:\n\n{_of(_PASSAGES, index)[:300]}", 96)]


def summary(index: int) -> list[Body]:
    return [_ask(f"Summarize in three sentences:\n\n{_of(_PASSAGES, 3 * index)}", 96)]


def quotes(index: int) -> list[Body]:
    passages = "\n\n".join(_of(_PASSAGES, 5 * index + place) for place in range(3))
    return [_ask(f"{passages}\n\nQuote the sentences above that say what a worker does.", 96)]


def agent(index: int) -> list[Body]:
    """Four turns over one file, as tools show it, each of which repeats most of the one before."""
    lines = _of(_CODE, index).splitlines()[:24]
    turns = []
    for turn in range(4):
        lines[turn] = f"# {turn}: {_of(_CHATS, index + turn)[:30]}"
        listed = json.dumps({"path": f"file_{index}.py", "content": "\n".join(lines)})
        turns.append(_ask(f"Result of read_file: {listed}\nWrite the file again, unchanged.", 96))
    return turns


def repeated(index: int) -> list[Body]:
    return [_ask(_of(_CHATS[:2], index), 96)]


def sampled(index: int) -> list[Body]:
    return [_ask(_of(_CHATS, index), 96, temperature=1.0, seed=index)]


def long_context(index: int) -> list[Body]:
    text = "\n\n".join(_of(_PASSAGES, index + place) for place in range(12))
    return [_ask(f"{text[:6000]}\n\nWhat is this text about?", 96)]


def short(index: int) -> list[Body]:
    return [_ask(f"Answer in one word: {_of(_CHATS, index)}", 8) for _ in range(2)]


def mixed(index: int) -> list[Body]:
    return _ONE_TURN[index % len(_ONE_TURN)](index)


_ONE_TURN: tuple[Mix, ...] = (chat, code, structured, translation, summary, quotes, sampled)
MIXES: Mapping[str, Mix] = {
    mix.__name__: mix for mix in (*_ONE_TURN, agent, repeated, long_context, short, mixed)
}


@dataclass(slots=True)
class Round:
    """Tokens, texts and time of the conversations of a round."""

    tokens: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # by conversation
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Answer:
    def __init__(self) -> None:
        self.text, self.tokens = "", 0

    def take(self, chunk: Mapping[str, Any]) -> None:
        for choice in chunk.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)


class Way(NamedTuple):
    """A server, and what each request to it says besides."""

    url: str
    fields: Body

    def salted(self, mix: str) -> Way:
        """Return the same with a cache of its own for this mix."""
        salt = f"{self.fields['cache_salt']} {mix}"
        return self._replace(fields=self.fields | {"cache_salt": salt})


async def converse(session: aiohttp.ClientSession, common: Body, turns: list[Body]) -> _Answer:
    """Send a conversation's turns, each with the answers before it; return all answers in one."""
    messages: list[dict[str, str]] = []
    whole = _Answer()
    for turn in turns:
        messages.append({"role": "user", "content": turn["content"]})
        fields = {name: value for name, value in turn.items() if name != "content"}
        body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        answer = _Answer()
        asked = common | {"messages": messages} | body | fields
        await stream(session, "v1/chat/completions", asked, answer.take, lambda: None)
        messages.append({"role": "assistant", "content": answer.text})
        whole.text += answer.text + "\0"
        whole.tokens += answer.tokens
    return whole


async def run_round(way: Way, mix: Mix, indices: range, concurrency: int) -> Round:
    """Hold conversations `indices` with so many clients."""
    queue: Iterator[int] = iter(indices)
    result = Round()
    async with open_session(way.url, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def client() -> None:
            for index in queue:
                answer = await converse(session, way.fields, mix(index))
                result.texts[index] = answer.text
                result.tokens += answer.tokens

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(client())
        result.seconds = time.perf_counter() - started
    return result


async def compare(ways: Mapping[str, Way], name: str, concurrency: int, args: Any) -> Body:
    """All rounds of a mix; the figures of a row of the table."""
    rounds: dict[str, list[Round]] = {way: [] for way in ways}
    ways = {
        way: it.salted(name) for way, it in ways.items()
    }  # no mix drafts from another's answers
    for number in range(args.rounds):
        count = concurrency * args.each
        indices = range(number * count, (number + 1) * count)
        first = number % len(ways)
        for way in (*list(ways)[first:], *list(ways)[:first]):
            rounds[way].append(await run_round(ways[way], MIXES[name], indices, concurrency))
    base = list(ways)[-1]
    row: Body = {"mix": name, "clients": concurrency, "equal": True}
    for server, mine in rounds.items():
        theirs = rounds[base]
        row["equal"] &= [r.texts for r in mine] == [r.texts for r in theirs]
        rate = sum(r.tokens for r in mine) / sum(r.seconds for r in mine)
        of_base = sum(r.tokens for r in theirs) / sum(r.seconds for r in theirs)
        row[server] = round(rate, 1)
        if server != base:
            ratios = [a.rate / b.rate for a, b in zip(mine, theirs, strict=True)]
            row[f"{server}/{base}"] = round(statistics.median(ratios), 3)
            row[f"{server}/{base} in all"] = round(rate / of_base, 3)
    return row


async def main(args: argparse.Namespace) -> int:
    """Print a line of JSON per mix and number of clients, then the geometric means."""
    ways: dict[str, Way] = {}
    means: dict[tuple[str, int], list[float]] = {}
    equal = True
    async with contextlib.AsyncExitStack() as servers:
        for name, command in args.server:
            ways[name] = Way(command, {"model": args.model, "cache_salt": name})
            if command.startswith("http"):
                continue
            port = command.split("--port", 1)[1].split()[0].lstrip("=")
            ways[name] = ways[name]._replace(url=f"http://127.0.0.1:{port}")
            log = args.log_dir / f"mixes_{name}.log"
            server = await servers.enter_async_context(launched(command, log))
            await server.first_token(partial(http_first_token, ways[name].url), 300)
        if (name := args.undrafted) is not None:
            plain = {"speculative": {"num_tokens": 0}, "cache_salt": f"{name} undrafted"}
            ways[f"{name} undrafted"] = Way(ways[name].url, ways[name].fields | plain)
        for concurrency in args.concurrency:
            for way in (*ways.values(),) * args.warmup:
                await run_round(way, mixed, range(-4 * concurrency, 0), concurrency)
            for name in args.mixes:
                row = await compare(ways, name, concurrency, args)
                equal &= row["equal"]
                print(json.dumps(row), flush=True)
                for key, value in row.items():
                    if "/" in key and key.endswith("in all"):
                        means.setdefault((key, concurrency), []).append(value)
    for (key, concurrency), values in means.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(json.dumps({"geometric mean": key, "clients": concurrency, "ratio": round(mean, 3)}))
    return 0 if equal else 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--server", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    add("--undrafted", metavar="NAME", help="of a server that is asked without drafts as well")
    add("--model", default="SmolLM2-135M-Instruct")
    add("--mixes", nargs="+", choices=sorted(MIXES), default=list(MIXES))
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    add("--rounds", type=int, default=4)
    add("--each", type=int, default=2, help="conversations of each client in a round")
    add("--warmup", type=int, default=2, help="rounds before all others that are not counted")
    add("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="of the servers' output")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(uvloop.run(main(parse())))
