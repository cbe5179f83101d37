"""Harmony read by OpenAI's library: outputs, and the messages that it finds in them.

The library needs a vocabulary that it downloads, or finds in `TIKTOKEN_ENCODINGS_BASE`. What it says
of `outputs()` is kept in `harmony.json`; with the library and the vocabulary,

    PYTHONPATH=tests python -m support.references.harmony > tests/support/references/harmony.json

writes that anew. Recorded with openai-harmony 0.0.8.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
    coalesce,
)
from surestep_gateway.parsers.harmony import HarmonyParser

_RECORDED = Path(__file__).with_name("harmony.json")
_TEXTS = [
    "Hello there",
    "é🙂 naïve 你好",
    '{"city": "Zürich \\"x\\""}',
    "<b> a < b",
    "to=functions.x",
    "spelled <|start|> and <|end|>",
    "\n\n",
    "to be or not",
    "analysis of final",
    "",
]
_HEADERS: list[list[str]] = [
    ["<|channel|>", "analysis"],
    ["<|channel|>", "final"],
    ["<|channel|>", "commentary"],
    ["<|channel|>", "final ", "<|constrain|>", "json"],
    ["<|channel|>", "analysis to=python code"],
    ["<|channel|>", "analysis to=functions.a.b-c_d code"],
    ["<|channel|>", "commentary to=functions.weather"],
    ["<|channel|>", "commentary to=functions.weather json"],
    ["<|channel|>", "commentary to=functions.weather ", "<|constrain|>", "json"],
    ["<|channel|>", "commentary to=functions.weather", "<|constrain|>", "json"],
    [" to=functions.weather", "<|channel|>", "commentary ", "<|constrain|>", "json"],
    [" to=functions.weather", "<|channel|>", "commentary json"],
]
_STRAY = [["<|constrain|>", "json"], ["<|message|>"], ["<|channel|>", " hm"]]


class Output(NamedTuple):
    """Special tokens and texts between them, and the library's messages."""

    parts: list[str]
    messages: list[list[str | None]]  # channel, recipient, text


def outputs(seed: int, count: int) -> list[list[str]]:
    """The parts of outputs, right ones and some that a model got wrong."""
    draw = random.Random(seed)
    return [_output(draw) for _ in range(count)]


def _output(draw: random.Random) -> list[str]:
    parts: list[str] = []
    for number in range(draw.randint(1, 4)):
        parts += ["<|end|>", "<|start|>", "assistant"] if number else []
        parts += [*draw.choice(_HEADERS), "<|message|>"]
        parts += [draw.choice(_TEXTS), draw.choice(_TEXTS)]
        parts += draw.choice(_STRAY) if draw.random() < 0.2 else []
    return [*parts, draw.choice(["<|return|>", "<|call|>", "<|end|>"])]


def recorded() -> list[Output]:
    """What the library said when it was asked."""
    return [Output(**one) for one in json.loads(_RECORDED.read_text())]


class Library:
    """The library; its vocabulary has to be at hand."""

    def __init__(self) -> None:
        """Raise ImportError without the library, and an error of its own without vocabulary."""
        self._module: Any = importlib.import_module("openai_harmony")
        self._encoding = self._module.load_harmony_encoding("HarmonyGptOss")

    def messages(self, parts: Sequence[str]) -> list[list[str | None]]:
        """Channel, recipient and text of each message that it finds."""
        ids: list[int] = []
        for part in parts:
            special = {part} if part in HarmonyParser.structure else set()
            ids += self._encoding.encode(part, allowed_special=special, disallowed_special=())
        found = self._encoding.parse_messages_from_completion_tokens(
            ids, self._module.Role.ASSISTANT, strict=False
        )
        return [[one.channel, one.recipient, one.content[0].text] for one in found]


def events_of(messages: Sequence[Sequence[str | None]]) -> list[Event]:
    """The events that stand for finished messages."""
    events: list[Event] = []
    calls = 0
    seen: set[type[Event]] = set()
    for channel, recipient, text in messages:
        assert text is not None
        if recipient is not None and recipient.startswith("functions."):
            name = recipient.removeprefix("functions.")
            arguments = ToolArguments(calls, text or "{}")
            events += [ToolCallStart(calls, name), arguments, ToolCallEnd(calls)]
            calls += 1
        elif text:
            kind = Reasoning if channel == "analysis" else Content
            events.append(kind("\n" * (kind in seen) + text))
            seen.add(kind)
    return coalesce(events)


def _record() -> None:
    library = Library()
    shown = [
        Output(parts, library.messages(parts))._asdict() for parts in outputs(seed=1, count=60)
    ]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in shown)
    print(f"[\n{lines}\n]")  # noqa: T201


if __name__ == "__main__":
    _record()
