"""Harmony in any order: nothing raises, no text is lost, and how tokens arrive changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.harmony_cases import MARKS, Read, ids_of, read, split, tokenizer
from support.clients.parser_cases import partitions, said, words
from surestep_gateway.parsers import Reasoning, ToolArguments, ToolCallEnd, ToolCallStart

PARTS = [
    *MARKS,
    *("analysis", "commentary", "final", "assistant", "functions.weather", "python", " json"),
    *(" to=functions.weather", " to=", "to", "é🙂", '{"a": "', " ", "\n", "<", "<|", "|>", "word"),
]
HEADERS = [
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|end|><|start|>assistant to=functions.book<|channel|>commentary json<|message|>",
    "<|call|>",
]
OUTPUTS = st.lists(st.sampled_from([[part] for part in PARTS] + [split(h) for h in HEADERS])).map(
    lambda found: [part for parts in found for part in parts]
)
IDS = st.one_of(OUTPUTS.map(ids_of), st.lists(st.integers(0, tokenizer().size - 1), max_size=40))
CUTS = st.lists(st.integers(1, 200))
STOPS = st.sampled_from([[], ["word"], ["<|", "\n "], ["é"], ["assistant", "json"]])


@settings(deadline=None)
@given(ids=IDS, cuts=CUTS, stops=STOPS, min_tokens=st.sampled_from([0, 0, 12]))
def test_every_partition_of_any_tokens(
    ids: list[int], cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    def found(runs: Sequence[Sequence[int]]) -> Read:
        return read(ids, runs=runs, stops=stops, min_tokens=min_tokens)

    one = found([[id_] for id_ in ids])
    assert found(list(partitions(ids, cuts))) == one
    assert found([ids]) == one
    check(one)


def check(found: Read) -> None:
    """Calls are numbered, begin before their arguments and end once."""
    open_, calls = None, 0
    for event in found.events:
        match event:
            case ToolCallStart(index, name):
                assert (open_, index, bool(name)) == (None, calls, True)
                open_, calls = index, calls + 1
            case ToolArguments(index):
                assert index == open_
            case ToolCallEnd(index):
                assert index == open_
                open_ = None
    assert open_ is None or found.stop is not None
    assert found.reasoning_tokens is not None
    assert bool(found.reasoning_tokens) >= any(
        isinstance(one, Reasoning) for one in found.events
    ) or (
        found.reasoning_tokens == 0  # text of a header that was none
    )


@settings(deadline=None)
@given(found=OUTPUTS, tools=st.sampled_from([["weather"], []]))
def test_no_text_is_lost(found: list[str], tools: list[str]) -> None:
    """Words behind the parts all come out, once and in their order.

    But for the one that names a content type; and two words in a header may be names as well.
    """
    parts = [part for at, one in enumerate(found) for part in (one, f" w{at}. and so ")]
    expected = words(re.sub(r"<\|constrain\|>\s*w\d+\.", "", "".join(parts)))
    told = words("".join(map(said, read(ids_of(parts), tools=tools).events)))
    assert [word for word in told if word in expected] == expected
