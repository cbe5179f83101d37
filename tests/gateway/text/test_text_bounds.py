"""No text has fewer tokens than its length allows, whatever the tokenizer does to it first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints.tokenizer_kinds import KINDS, PLAIN, SPECIAL
from surestep_gateway.text.text_bounds import solid_length
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

LONG = "<|a token of forty characters, as some are|>"


def composing() -> RustTokenizer:
    rust = KINDS["byte_level"]()
    rust.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return rust


def swallowing() -> RustTokenizer:
    """Make a tokenizer like that of Phi 3: an added token takes the white space beside it."""
    rust = KINDS["byte_level"]()
    rust.add_special_tokens([AddedToken("<|end|>", special=True, lstrip=True, rstrip=True)])
    rust.add_tokens([AddedToken(LONG)])
    return rust


BOUNDED: dict[str, Callable[[], RustTokenizer]] = {
    **{name: make for name, make in KINDS.items() if name != "unigram"},
    "composing": composing,
    "swallowing": swallowing,
}
_COMPOSED = ("e\u0301", "\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345", "你好", "🙂")
_SPACES = (" ", "     ", "\n\n")
PIECES = [*SPECIAL, *PLAIN, *_SPACES, *_COMPOSED, LONG, "<|end|>", "the ", "x"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(BOUNDED[kind]())


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=40))
def test_tokens_stand_for_so_much_and_no_more(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    (ids,) = tokenizer.encode(Texts([text], add_special_tokens=False))
    most = tokenizer.most_chars(len(ids))
    assert most is not None
    assert tokenizer.length(text) <= most
    assert tokenizer.length(text) in (len(text), solid_length(text))


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert tokenizer_of("swallowing").most_chars(10) == 10 * len(LONG)
    assert tokenizer_of("composing").most_chars(1) == 4 * max(
        map(len, tokenizer_of("composing")._rust.get_vocab())
    )


UNBOUNDED: list[Callable[[RustTokenizer], None]] = [
    lambda rust: setattr(rust, "normalizer", normalizers.Strip()),
    lambda rust: setattr(rust, "normalizer", normalizers.Replace(Regex(" +"), " ")),
    lambda rust: setattr(rust, "normalizer", normalizers.Replace("x", "")),
    lambda rust: setattr(rust, "normalizer", normalizers.Sequence([normalizers.StripAccents()])),
    lambda rust: setattr(rust, "pre_tokenizer", pre_tokenizers.Whitespace()),
    lambda rust: setattr(rust, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    lambda rust: setattr(rust, "pre_tokenizer", pre_tokenizers.Metaspace()),  # é is no token, then
]


@pytest.mark.parametrize("change", UNBOUNDED)
def test_where_text_can_vanish_there_is_no_bound(change: Callable[[RustTokenizer], None]) -> None:
    rust = KINDS["byte_level"]()
    change(rust)
    assert Tokenizer(rust).most_chars(10) is None


def test_runs_of_unknown_characters_may_be_one_token() -> None:
    tokenizer = Tokenizer(KINDS["unigram"]())
    (ids,) = tokenizer.encode(Texts(["\u4e00" * 1000], add_special_tokens=False))
    assert len(ids) < 5
    assert tokenizer.most_chars(10) is None


def test_of_other_models_nothing_is_known() -> None:
    rust = RustTokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    rust.decoder = decoders.Metaspace()
    assert Tokenizer(rust).most_chars(10) is None
