"""Constraints of vllm.grpc.engine: the grammars they become allow what they say, and nothing else."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.checkpoints import ascii_tokenizer
from surestep_common.errors import InvalidRequest
from surestep_proto.vllm_engine_pb2 import ChoiceConstraint, SamplingParams
from surestep_scheduler.vllm.constraints import grammar_of
from tokenizers import Tokenizer

EOS = 2
ALLOWED: dict[str, tuple[Any, list[str], list[str]]] = {
    "json_schema": ('{"type": "integer"}', ["17", "-3"], ['"a"', "1.5"]),
    "json_object": (
        True,
        ["{}", '{"a": [1]}', "{%s}" % (" " * 32)],
        ["[]", "1", "{%s}" % (" " * 33)],
    ),
    "regex": ("a/b|\\\\/", ["a/b", "\\/"], ["a", "/"]),
    "grammar": ('start: "a" | "b"+', ["a", "bb"], ["ab"]),
    "choice": (ChoiceConstraint(choices=["a", 'b"\n']), ["a", 'b"\n'], ["b", "c"]),
}


class Oracle:
    """llguidance on a tokenizer of ASCII."""

    def __init__(self, folder: Path) -> None:
        path = str(ascii_tokenizer.save(folder) / "tokenizer.json")
        self._text, self._lark = Tokenizer.from_file(path), LLTokenizer(path, eos_token=EOS)

    def matcher(self, **constraint: Any) -> LLMatcher:
        grammar = grammar_of(SamplingParams(**constraint))
        assert grammar is not None
        return LLMatcher(self._lark, grammar.source)

    def is_whole(self, matcher: LLMatcher, text: str) -> bool:
        ids = self._text.encode(text).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", ALLOWED)
def test_a_constraint_allows_what_it_says(oracle: Oracle, name: str) -> None:
    value, inside, outside = ALLOWED[name]
    for text in inside + outside:
        matcher = oracle.matcher(**{name: value})
        assert oracle.is_whole(matcher, text) is (text in inside), text


WRONG: dict[str, Any] = {
    "deep": {"json_schema": '{"a":' * 900 + "1" + "}" * 900},
    "half a character": {"json_schema": '{"a": "\\ud800"}'},
    "no number": {"json_schema": '{"a": NaN}'},
    "a list": {"json_schema": "[]"},
    "long schema": {"json_schema": "{" + " " * (1 << 18) + "}"},
    "long grammar": {"grammar": "x" * ((1 << 18) + 1)},
    "long pattern": {"regex": "/" * ((1 << 16) + 1)},
    "many choices": {"choice": ChoiceConstraint(choices=["a"] * 4097)},
    "long choices": {"choice": ChoiceConstraint(choices=["a" * 1000] * 300)},
    "no choices": {"choice": ChoiceConstraint()},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constraint_is_refused_by_its_field(name: str) -> None:
    """At once: the scheduler's event loop has other things to do."""
    began = time.process_time()
    with pytest.raises(InvalidRequest) as error:
        grammar_of(SamplingParams(**WRONG[name]))
    assert time.process_time() - began < 0.05
    assert error.value.param in WRONG[name]
    assert len(error.value.message) <= 1000


@given(
    pattern=st.text("ab/\\\\\n.*|", min_size=1, max_size=6), text=st.text("ab/\\\\\n", max_size=4)
)
def test_a_regular_expression_means_the_same_in_lark(
    oracle: Oracle, pattern: str, text: str
) -> None:
    try:
        expected = re.fullmatch(pattern, text) is not None
    except re.error:
        return
    matcher = oracle.matcher(regex=pattern)
    assume(not matcher.is_error())  # such as \b, and an empty language
    assert oracle.is_whole(matcher, text) is expected
