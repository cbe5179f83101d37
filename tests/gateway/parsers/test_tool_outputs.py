"""Outputs that broke parsers of other servers, each with the number of a report of its shape.

Rows without one are neighbours of others. A row of tests/data/tool_outputs.json is read whole, character by character and in random pieces.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.clients.parser_cases import calls_of, output_parser, parse, partitions
from surestep_gateway.parsers import Event, Reasoning, content_of

DATA = json.loads((Path(__file__).parents[2] / "data" / "tool_outputs.json").read_text())
ROWS: list[dict[str, Any]] = DATA["rows"]


def read(row: dict[str, Any], pieces: list[str]) -> list[Event]:
    """The events of a row's output."""
    reasoning, prompt = row.get("reasoning_parser"), row.get("prompt", "")
    parser = output_parser(
        row["parser"], reasoning=reasoning, prompt=prompt, tools_of=DATA["tools"]
    )
    return parse(parser, pieces)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['parser']}-{row['source'] or 'own'}")
def test_an_output_is_read_as_it_was_meant(row: dict[str, Any]) -> None:
    text = row["text"]
    events = read(row, [text])
    found = [[name, json.loads(arguments)] for name, arguments in calls_of(events)]
    assert found == row["calls"]
    assert content_of(events) == row["content"]
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    assert thought == row.get("reasoning", "")
    assert read(row, list(text)) == events
    random = Random(text)
    for _ in range(20):
        cuts = random.sample(range(len(text)), random.randint(1, min(8, len(text))))
        pieces = ["".join(map(chr, part)) for part in partitions(list(map(ord, text)), cuts)]
        assert read(row, pieces) == events


PARTS = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\s+|\w+|.", re.DOTALL)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['parser']}-{row['source'] or 'own'}")
@pytest.mark.rotates(1)
def test_mistakes_of_any_kind_are_read_in_one_way(row: dict[str, Any]) -> None:
    """Parts of the text are left out, doubled, moved and cut off."""
    parts = PARTS.findall(row["text"])
    random = Random(row["text"])
    for _ in range(40):
        changed = list(parts)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(changed))
            one = random.choice(["", changed[at] * 2, "\n", " so ", random.choice(parts)])
            changed[at : at + 1] = [one] if one else []
            changed = changed[: random.choice([-1, None, None, None])] or ["x"]
        text = "".join(changed)
        events = read(row, [text])
        assert read(row, list(text)) == events
        open_ = [type(event).__name__ for event in events if hasattr(event, "index")]
        assert open_.count("ToolCallStart") == open_.count("ToolCallEnd")


UNITS = [
    "<",
    "[",
    "{",
    "`",
    "[weather(a=",
    '{"name": ',
    '{"a": [',
    "<tool_call>",
    "<function=weather>",
]
UNITS += ["<tool_call>\n<function=weather>\n<parameter=city>\n</function>\n", "\n<parameter=city"]
UNITS += [
    "<tool_call>weather<arg_key>city</arg_key>",
    "</tool_call> ",
    '[TOOL_CALLS]weather{"a": "',
]
UNITS += ['<minimax:tool_call><invoke name="weather"><parameter name="city">', "<invoke name='"]
UNITS += [
    "<｜DSML｜invoke ",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{",
    " ",
    "\\",
    "'",
]
SIZE = 10_000  # characters


@pytest.mark.timeout(120)
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
@pytest.mark.parametrize("tools", ["hermes", "pythonic", "qwen3_coder", "glm45", "deepseek_v32"])
@pytest.mark.rotates(1)
def test_time_grows_with_the_text_alone(tools: str, prompt: str) -> None:
    """A text five times as long takes about five times as long, whatever is in it."""
    for unit in UNITS:
        text = "<tool_call>" * (unit == "'") + unit * SIZE
        tries = (
            (_seconds(tools, prompt, text[:size]) for size in (SIZE // 5, SIZE)) for _ in "123"
        )
        assert any(long < short * 12 for short, long in tries), unit


def _seconds(tools: str, prompt: str, text: str) -> float:
    parser = output_parser(tools, reasoning="qwen3", prompt=prompt, tools_of=DATA["tools"])
    start = time.process_time()
    for char in text:
        parser.push(char)
    parser.finish()
    return time.process_time() - start
