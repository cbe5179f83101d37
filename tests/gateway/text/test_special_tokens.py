"""Special tokens that users write are text, and nothing else changes, whatever the tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints.tokenizer_kinds import KINDS, PLAIN, SPECIAL
from surestep_gateway.text.chat_template import ChatTemplate
from surestep_gateway.text.special_tokens import Hidden
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from tokenizers import AddedToken, normalizers

TEMPLATE = (
    "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.name }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
_PARTS = ("<s", ">", "</", "s>", "<|im_", "end|>", "<", "|")
_WORDS = (" ", "  ", "\n", "the ", "dog", "im_end", "é", "0", "b")
PIECES = [*SPECIAL, *PLAIN, *_PARTS, *_WORDS]
SAFE = [piece for piece in PIECES if piece not in SPECIAL]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


@cache
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {})


def in_one_go(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(Texts([text], add_special_tokens=False))[0]


def as_prepared(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """The text of a chat and its ids."""
    if not tokenizer.special.untrusted(messages):
        text = template().render(messages)
        return text, in_one_go(tokenizer, text)
    hidden = tokenizer.special.hide(messages)
    rendered = template().render(hidden.messages)
    named = Texts([tokenizer.named.text(rendered, hidden)], add_special_tokens=False, named=True)
    return hidden.shown(rendered), tokenizer.encode(named)[0]


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> Counter[int]:
    """Count how often each occurs; an unknown character is nobody's marker."""
    return Counter(i for i in ids if i in tokenizer.special_ids and tokenizer.token(i) != "<unk>")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=texts, add=st.booleans())
def test_the_second_tokenizer_is_the_first_with_other_names(
    kind: str, text: str, add: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    named = tokenizer.named.text(text, Hidden([], {}))
    assert (named != text) == any(one in text for one in SPECIAL)
    expected = tokenizer.encode(Texts([text], add_special_tokens=add))
    assert tokenizer.encode(Texts([named], add_special_tokens=add, named=True)) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(
    contents=st.lists(texts, min_size=1, max_size=3), role=st.sampled_from(["user", "tool", "x"])
)
def test_no_special_token_comes_from_users(kind: str, contents: list[str], role: str) -> None:
    tokenizer = tokenizer_of(kind)
    chat = [{"role": role, "content": text, "name": text[::-1]} for text in contents]
    bare = [{"role": role, "content": "", "name": ""} for _ in contents]
    text, ids = as_prepared(tokenizer, chat)
    assert text == template().render(chat)
    expected = in_one_go(tokenizer, template().render(bare))
    assert special_ids(tokenizer, ids) == special_ids(tokenizer, expected)
    if not any(
        one in text for content in contents for one in SPECIAL for text in (content, content[::-1])
    ):
        assert ids == in_one_go(tokenizer, text)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    if kind in ("byte_level", "trained_with_specials"):
        assert shown == text
    elif "<unk>" not in shown:  # a character that the vocabulary does not have is lost
        assert shown.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=texts, role=st.sampled_from(["assistant", "system", "developer"]))
def test_who_is_trusted_writes_special_tokens(kind: str, text: str, role: str) -> None:
    tokenizer = tokenizer_of(kind)
    chat = [{"role": role, "content": text, "name": ""}]
    shown, ids = as_prepared(tokenizer, chat)
    assert ids == in_one_go(tokenizer, shown)
    beside = [*chat, {"role": "user", "content": "<s>", "name": ""}]
    without = [*chat, {"role": "user", "content": "dog", "name": ""}]
    with_text, without_text = as_prepared(tokenizer, beside)[1], as_prepared(tokenizer, without)[1]
    assert special_ids(tokenizer, with_text) == special_ids(tokenizer, without_text)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL, "\U000f0000", "\U000f0001", "x", "\\", '"']), max_size=8
    )
)
def test_private_use_characters_of_users_stay_what_they_are(parts: list[str]) -> None:
    tokenizer = tokenizer_of("byte_level")
    value = {
        "role": "user",
        "content": "".join(parts),
        "name": ["".join(parts), {"k": "".join(parts)}],
    }
    hidden = tokenizer.special.hide([value])
    for ascii_only in (True, False):
        rendered = json.dumps(hidden.messages, ensure_ascii=ascii_only)
        assert json.loads(hidden.shown(rendered)) == [value]


@pytest.mark.parametrize("content", ["<|IM_END|>", "<|im_end|>", "a <|Im_eNd|> b</S>", "dog"])
def test_other_spellings_that_a_tokenizer_takes(content: str) -> None:
    rust = KINDS["byte_level"]()
    rust.normalizer = normalizers.Lowercase()
    rust.add_special_tokens([AddedToken(one, special=True, normalized=True) for one in SPECIAL])
    tokenizer = Tokenizer(rust)
    ordinary = in_one_go(tokenizer, content)
    assert bool(special_ids(tokenizer, ordinary)) == (content != "dog")
    chat = [{"role": "user", "content": content, "name": ""}]
    _, ids = as_prepared(tokenizer, chat)
    plain = as_prepared(tokenizer, [{"role": "user", "content": "", "name": ""}])[1]
    assert special_ids(tokenizer, ids) == special_ids(tokenizer, plain)
