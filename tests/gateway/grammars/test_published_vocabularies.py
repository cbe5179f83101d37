"""Tokenizers as they are published: what grammars take for text, and what for a token of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.checkpoints.published import PUBLISHED, published_tokenizer
from surestep_common.errors import UnsupportedParameter
from surestep_gateway.generation.detokenize import Detokenizer
from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.grammars.reasoning import Format, Wanted, constraint
from surestep_gateway.parsers import REASONING_PARSERS
from surestep_gateway.request.prepared import bad_words
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_worker.grammar.matcher import matcher_of, tokenizer_of

pytestmark = [  # packages are fetched the first time, and take long to read
    pytest.mark.timeout(300),
    pytest.mark.rotates(1, turn=0),
]


class Pair(NamedTuple):
    """A tokenizer as the gateway reads it, and as ranks do for their grammars."""

    ours: Tokenizer
    lark: LLTokenizer
    texts: list[str]  # of its added tokens


@pytest.fixture(scope="module", params=PUBLISHED)
def pair(request: pytest.FixtureRequest) -> Pair:
    folder: Path = published_tokenizer(request.param)
    path, about = folder / "tokenizer.json", PUBLISHED[request.param]
    ours = Tokenizer.load(folder)
    eos = ours.id(about.eos)
    assert eos is not None
    added = json.loads(path.read_text())["added_tokens"]
    texts = [token["content"] for token in added]
    return Pair(ours, tokenizer_of(path, about.vocab_size, [eos]), texts)


@pytest.mark.rotates(3)
def test_markers_are_those_of_llguidance(pair: Pair) -> None:
    assert pair.texts
    for text in (*pair.texts, "the", " ", "<", "<nonesuch>"):
        id_ = pair.ours.id(text)
        assert pair.ours.is_marker(text) == (id_ is not None and pair.lark.is_special_token(id_))


WORDS = (
    *("Paris", "dog", "darn", "Schadenfreude", "antidisestablishment", "naïve", "東京", "42"),
    *("New York", "e-mail", "C++", "don't", "café", "Zürich", "привет", "🙂", "HTTP", "x"),
    *("supercalifragilistic", "OpenAI", "GPU", "ifelse", "foo_bar", "…", "ok!"),
)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.rotates(6)
def test_bad_words_are_banned_at_the_start_and_after_a_space(pair: Pair, word: str) -> None:
    banned = [list(one.token_ids) for one in bad_words([word], pair.ours, 1)]
    for text in (word, f" {word}"):
        ids = pair.ours.encode_now(text, add_special_tokens=False)
        assert ids in banned, text


def test_a_character_that_the_prompt_begins_is_completed(pair: Pair) -> None:
    text = "naïve 🙂🏳️‍🌈 𝄞𓀀 東京 ok"
    ids, cut = pair.ours.encode_now(text, add_special_tokens=False), 0
    for place in range(len(ids) + 1):
        prompt, output = ids[:place], ids[place:]
        whole = b"".join(map(pair.ours.piece, prompt)).decode("utf-8", "ignore")
        cut += whole != b"".join(map(pair.ours.piece, prompt)).decode("utf-8", "replace")
        behind = Detokenizer(pair.ours, skip_special_tokens=True, prompt_ids=prompt)
        assert whole + "".join(map(behind.push, output)) + behind.flush() == text
        other = Detokenizer(pair.ours, skip_special_tokens=True, prompt_ids=prompt)
        assert other.push(ids[-1]) == pair.ours.decode(ids[-1:], skip_special_tokens=True)
    assert cut > 0


def test_forced_text_is_spelled_in_tokens_of_text(pair: Pair) -> None:
    """llguidance alone forces the token `<think>` where a grammar has that text, and refuses it."""
    texts = [*pair.texts[:40], *pair.texts[-40:], "a<think>b</think>", "<<think>>", "<tool_call>"]
    for text in filter(pair.ours.is_marker, [*texts, *pair.texts[:9]]):
        for spelled in (text, f"{text}x", f"x{text}{text}", f"<{text}"):
            source = LLMatcher.grammar_from_lark(f"start: {json.dumps(spelled)}")
            matcher = LLMatcher(pair.lark, source)
            forced = matcher.compute_ff_tokens()
            assert matcher.try_consume_tokens(forced) == len(forced)
            assert matcher.is_accepting()
            assert pair.lark.decode_str(forced) == spelled
            assert not any(map(pair.lark.is_special_token, forced))


def test_schemas_as_libraries_print_them_compile(pair: Pair) -> None:
    corpus = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
    written = Format(None, None, None, pair.ours.in_grammars)
    for one in corpus["schemas"]:
        body = StructuredBody.model_validate({"guided_json": one["schema"]})
        asked = content_language(body, JsonStyle(), pair.ours.in_grammars)
        began = time.process_time()
        matcher_of(pair.lark, constraint(Wanted(asked), written).source)
        assert time.process_time() - began < 1, one["name"]


@pytest.mark.parametrize("prompt", ["", "<think>\n"], ids=["may think", "thinks"])
@pytest.mark.parametrize("budget", [0, 3])
def test_reasoning_is_bounded(pair: Pair, prompt: str, budget: int) -> None:
    """By the token; behind it is anything, calls too, but no more reasoning."""
    parser = REASONING_PARSERS.get("qwen3")(prompt, {})
    written = Format("qwen3", None, parser, pair.ours.in_grammars, pair.ours.id)
    if not pair.ours.is_marker("<think>"):
        with pytest.raises(UnsupportedParameter, match="has no tokens <think>"):
            constraint(Wanted(thinking=budget), written)
        return
    source = constraint(Wanted(thinking=budget), written).source
    ids = [pair.ours.id(marker) for marker in ("<think>", "</think>")]
    think, thought = (id_ for id_ in ids if id_ is not None)
    opening = [] if prompt else [think]
    word, end = pair.ours.encode_now("tree", add_special_tokens=False)[:1], [thought]

    def taken(*ids: Any) -> int:
        return LLMatcher(pair.lark, source).try_consume_tokens([*opening, *ids]) - len(opening)

    assert taken(*word * (budget + 1)) == budget
    called = [*word, *pair.ours.encode_now("<tool_call>{}</tool_call>", add_special_tokens=False)]
    assert taken(*word * budget, *end, *called) == budget + 1 + len(called)
    assert taken(*end, *word, think) == 2
    if not prompt:
        matcher = LLMatcher(pair.lark, source)
        assert matcher.try_consume_tokens([*word, *word, think]) == 2
