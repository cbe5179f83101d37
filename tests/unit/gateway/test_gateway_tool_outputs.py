"""Outputs that broke parsers of other servers, each with the number of a report of its shape.

Rows without one are neighbours of others. A row of tests/data/tool_outputs.json is read whole, character by character and in random pieces.
"""

from __future__ import annotations

import json
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
