from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpoints import tiny_tokenizer
from support.clients.parser_cases import partitions
from surestep_gateway.generation.detokenize import (
    Detokenizer,
    StopMatch,
    StopScanner,
    TextAssembler,
)
from surestep_gateway.parsers import OutputParser, content_of
from surestep_gateway.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.build())
SMILE = TOKENIZER.encode_now("a🙂b", add_special_tokens=False)


def assembler(
    stops: Sequence[str] = (), *, min_tokens: int = 0, include_stop: bool = False
) -> TextAssembler:
    return TextAssembler(
        Detokenizer(TOKENIZER, skip_special_tokens=True),
        StopScanner(stops, include_stop=include_stop),
        OutputParser(),
        min_tokens=min_tokens,
        include_stop=include_stop,
    )


def assemble(target: TextAssembler, runs: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    """Text, tokens used and stop string of a sequence that arrives in `runs`."""
    text, used = "", 0
    for number, run in enumerate(runs, start=1):
        piece = target.push(run, ended=number == len(runs), stop_token=False)
        text += content_of(piece.events)
        used += len(piece.token_ids)
        if piece.stop is not None:
            return text, used, piece.stop
    return text, used, None


def expected(
    ids: Sequence[int], stops: Sequence[str], min_tokens: int, include_stop: bool
) -> tuple[str, int, str | None]:
    """The rule, applied to whole texts: the first token after which a stop string is complete."""

    def text_of(count: int, final: bool = False) -> str:
        detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
        text = "".join(map(detokenizer.push, ids[:count]))
        return text + detokenizer.flush() if final else text

    skipped = len(text_of(min(min_tokens, len(ids))))
    for count in range(min_tokens + 1, len(ids) + 2):
        text = text_of(min(count, len(ids)), final=count > len(ids))
        found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop, skipped)) >= 0]
        if found:
            at, length, stop = min(found)
            return text[: at + length * include_stop], min(count, len(ids)), stop
    return text_of(len(ids), final=True), len(ids), None


@given(
    ids=st.lists(st.integers(0, tiny_tokenizer.VOCAB_SIZE - 1), min_size=1, max_size=24)
    | st.text("abc🙂é the", min_size=1, max_size=16).map(
        lambda text: TOKENIZER.encode_now(text, add_special_tokens=False)
    ),
    cuts=st.lists(st.integers(1, 24)),
    stops=st.lists(st.text("abc🙂é the", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
)
@example(ids=SMILE, cuts=[1, 2, 3], stops=["🙂b"], min_tokens=0, include_stop=False)
def test_text_does_not_depend_on_the_chunks(
    ids: list[int], cuts: list[int], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    target = assembler(stops, min_tokens=min_tokens, include_stop=include_stop)
    assert assemble(target, list(partitions(ids, cuts))) == expected(
        ids, stops, min_tokens, include_stop
    )


def test_never_half_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    pieces = [detokenizer.push(token) for token in SMILE]
    assert "".join(pieces) == "a🙂b"
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(SMILE) > 3, "the emoji must take several tokens for this test to mean anything"


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    text, used, _ = assemble(assembler(), [SMILE[:2]])
    assert text == "a\ufffd"
    assert used == 2


def test_a_stop_token_is_not_part_of_the_text() -> None:
    ids = [*TOKENIZER.encode_now("stop", add_special_tokens=False), 5]
    hidden = assembler().push(ids, ended=True, stop_token=True)
    shown = assembler(include_stop=True).push(ids, ended=True, stop_token=True)
    assert content_of(hidden.events) == "stop"
    assert content_of(shown.events) == "stop" + TOKENIZER.piece(5).decode()
    assert hidden.token_ids == shown.token_ids == ids


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["<end>", "<eof"], include_stop=False)
    assert scanner.push("hello <") == "hello "
    assert scanner.push("e") == ""
    assert scanner.push("x") == "<ex"
    assert scanner.push(" <eo") == " "
    assert scanner.push("f!") == StopMatch("", "<eof")


@pytest.mark.parametrize(("include", "text"), [(True, "ab--"), (False, "ab")])
def test_a_stop_string_across_pushes(include: bool, text: str) -> None:
    scanner = StopScanner(["--"], include_stop=include)
    got = ""
    for char in "ab-":
        safe = scanner.push(char)
        assert isinstance(safe, str)
        got += safe
    last = scanner.push("-c")
    assert isinstance(last, StopMatch)
    assert got + last.text == text


def test_the_leftmost_stop_string_wins() -> None:
    found = StopScanner(["cd", "bc"], include_stop=False).push("abcd")
    assert found == StopMatch("a", "bc")


def test_held_text_is_delivered_at_the_end() -> None:
    ids = TOKENIZER.encode_now("ab-", add_special_tokens=False)
    assert assemble(assembler(["--"]), [[token] for token in ids])[0] == "ab-"
