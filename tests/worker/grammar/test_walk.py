"""Matchers: what they allow, when they begin, what they force, and what they are refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from support.checkpoints import ascii_tokenizer
from support.parity.grammars import OBJECT
from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_worker.grammar.matcher import matcher_of, tokenizer_of
from surestep_worker.grammar.walk import Walk, allows
from surestep_worker.grammar.window import make_window, mask_window
from tokenizers import Tokenizer

VOCAB, EOS = 160, 2
NUM_WORDS = VOCAB // 32
Matcher = Callable[[str], LLMatcher]
WORD = LLMatcher.grammar_from_regex("[a-z]{1,3}")
REGEX = LLMatcher.grammar_from_regex


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ascii_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def matcher(folder: Path) -> Matcher:
    return partial(matcher_of, tokenizer_of(folder / "tokenizer.json", VOCAB, [EOS]))


@pytest.fixture(scope="module")
def spell(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(spell: Tokenizer, text: str) -> list[int]:
    ids: list[int] = spell.encode(text).ids
    return ids


def allowed(words: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if allows(words, token)}


def next_of(walk: Walk) -> set[int]:
    words = np.zeros(NUM_WORDS, dtype=np.int32)
    walk.fill(words)
    return allowed(words)


def test_only_what_belongs_to_the_grammar_comes_next(matcher: Matcher, spell: Tokenizer) -> None:
    walk = Walk(matcher(WORD), [], [EOS])
    letters = {
        t
        for t in range(3, VOCAB)
        if (text := spell.decode([t])).isalpha()
        and text.islower()
        and text.isascii()
        and len(text) <= 3
    }
    assert next_of(walk) == letters
    walk.advance(ids_of(spell, "b")[0])
    assert next_of(walk) == {EOS, *(t for t in letters if len(spell.decode([t])) <= 2)}
    for token in ids_of(spell, "zk"):
        walk.advance(token)
    assert next_of(walk) == {EOS}


def test_every_stop_id_of_the_request_may_end_what_belongs_to_the_grammar(
    matcher: Matcher, spell: Tokenizer
) -> None:
    walk = Walk(matcher(WORD), [], [EOS, 0, 31])
    assert not {0, 31, EOS} & next_of(walk)
    walk.advance(ids_of(spell, "b")[0])
    assert {0, 31, EOS} <= next_of(walk)
    walk.advance(31)  # ends the request; the matcher is not asked
    assert {0, 31, EOS} <= next_of(walk)


@pytest.mark.parametrize("end", [[77], [77, 77, 5], [9, 77]])
def test_a_grammar_begins_behind_the_first_end_of_reasoning(
    matcher: Matcher, end: list[int]
) -> None:
    walk = Walk(matcher(WORD), end, [EOS])
    for token in [8, *end[:-1], 4, *end[:-1]]:
        walk.advance(token)
        assert not walk.begun
    walk.advance(77 if end == [77, 77, 5] else end[-1])
    if not walk.begun:  # 77 77 77 5 ends with 77 77 5
        walk.advance(5)
    assert walk.begun
    assert EOS not in next_of(walk)


def test_a_finished_document_ends_before_min_tokens(matcher: Matcher, spell: Tokenizer) -> None:
    a = ids_of(spell, "a")[0]
    walk = Walk(matcher(REGEX("a{1,3}")), [], [EOS], 5)
    for count in range(4):
        assert (EOS in next_of(walk)) == (count == 3)  # where the document can go on, it does
        if count < 3:
            walk.advance(a)
    walk = Walk(matcher(REGEX("a*")), [], [EOS], 2)
    for count in range(4):
        assert (EOS in next_of(walk)) == (count >= 2)
        walk.advance(a)


def test_min_tokens_hold_in_front_of_a_grammar(matcher: Matcher, spell: Tokenizer) -> None:
    a = ids_of(spell, "a")[0]
    walk = Walk(matcher(REGEX("a*")), [77], [EOS], 2)
    window = make_window(walk, [5, 6, 7, 77, a], 5, NUM_WORDS)
    assert (window.first, window.drafts, len(window.masks)) == (0, [5, 6, 7, 77, a], 6)
    assert [allows(mask, EOS) for mask in window.masks] == [False, False, *[True] * 4]
    assert [allows(mask, 9) for mask in window.masks] == [*[True] * 4, False, False]


def test_a_stop_id_of_text_does_not_cut_a_document(matcher: Matcher, spell: Tokenizer) -> None:
    a, b = (ids_of(spell, letter)[0] for letter in "ab")
    walk = Walk(matcher(REGEX("(a|b)(a|b)")), [], [EOS, b])
    assert a in next_of(walk)
    assert b not in next_of(walk)
    only = Walk(matcher(REGEX("bb*")), [], [EOS, *(i for i in range(NUM_WORDS * 32) if i != a)])
    assert b in next_of(only)  # there is nothing else


def test_a_window_ends_in_front_of_what_is_barred(matcher: Matcher, spell: Tokenizer) -> None:
    walk = Walk(matcher(REGEX("[a-f]+")), [], [EOS])
    a, b, z = (ids_of(spell, letter)[0] for letter in "abz")
    window = make_window(walk, [a, b, z, a], 5, NUM_WORDS)
    assert (window.drafts, window.num_forced, len(window.masks)) == ([a, b], 0, 3)
    assert make_window(walk, [a, b, a], 2, NUM_WORDS).drafts == [a, b]
    assert make_window(walk, [z, a], 5, NUM_WORDS).drafts == []
    window = make_window(walk, [a, EOS, a], 5, NUM_WORDS)
    assert (window.drafts, len(window.masks)) == ([a, EOS], 2)  # nothing comes behind a stop id
    assert EOS not in next_of(walk)  # it stays where it was


def test_what_is_forced_is_drafted_instead_of_what_is_proposed_and_behind_it(
    matcher: Matcher, spell: Tokenizer
) -> None:
    walk = Walk(matcher(OBJECT), [], [EOS])
    wrong = ids_of(spell, "beta")
    first = make_window(walk, wrong, 8, NUM_WORDS)
    assert spell.decode(first.drafts) == '{"name":"'
    assert first.num_forced == len(first.drafts)
    assert all(allows(mask, t) for mask, t in zip(first.masks, first.drafts, strict=False))
    name = ids_of(spell, '{"name":"Bob')
    for token in first.drafts:
        walk.advance(token)
    proposed = ids_of(spell, "Bob")
    assert [*first.drafts, *proposed] == name
    second = make_window(walk, proposed, 8, NUM_WORDS)
    assert spell.decode(second.drafts).startswith('Bob","age"')
    assert 0 < second.num_forced < len(second.drafts)
    assert len(make_window(walk, proposed, 2, NUM_WORDS).drafts) == 2
    assert make_window(walk, [], 0, NUM_WORDS).drafts == []


def test_masks_of_settled_windows_are_those_of_their_making(
    matcher: Matcher, spell: Tokenizer
) -> None:
    walk = Walk(matcher(OBJECT), [77], [EOS])
    made = make_window(walk, [5, 77, *ids_of(spell, '{"name":"Bob"')], 12, NUM_WORDS)
    assert made.first == 2
    assert 0 < made.num_forced < len(made.drafts) > 4
    given = mask_window(walk, made.drafts, NUM_WORDS)
    assert given.first == 2
    assert np.array_equal(given.masks, made.masks)
    barred = mask_window(walk, [77, 5, 5], NUM_WORDS)
    assert (barred.first, len(barred.masks)) == (1, 1)  # what follows a barred draft is never met


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "grammar"),
        ("start: missing", "missing"),
        ('{"grammars":[]}', "grammar"),
        (REGEX("(?=a)b"), "look-around"),
        (json.dumps({"grammars": [{"json_schema": {"type": "nothing"}}]}), "type"),
    ],
)
def test_wrong_grammars_are_refused_in_one_line(matcher: Matcher, source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        matcher(source)
    assert refused.value.param == "grammar"
    assert "\n" not in refused.value.message


def test_a_tokenizer_that_does_not_fit_is_named(folder: Path) -> None:
    with pytest.raises(UnsupportedParameter, match="tokenizer cannot be used"):
        tokenizer_of(folder / "tokenizer.json", VOCAB - 40, [EOS])
