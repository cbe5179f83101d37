"""Special tokens as plain text, where users write them.

A tokenizer takes a special token's text for the token wherever it stands, so that a user who writes
an end-of-turn marker would end the turn. To distinguish the user's markers from the template's,
those in the messages of users and tools become private-use characters before the template sees
them. After it, the template's own markers get secret random names, the user's get their text back,
and a second tokenizer encodes the whole: identical, but its special tokens have these names.

Text without the user's markers never comes here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import orjson
from surestep_common.errors import InvalidRequest
from tokenizers import Tokenizer as RustTokenizer

# Roles that users do not speak in, and whose text may contain the markers of earlier answers.
TRUSTED_ROLES = frozenset({"assistant", "developer", "system", "tools"})
_PRIVATE = range(0xF0000, 0x10FFFD)  # code points of the supplementary private-use planes
_FENCE = "\U0010fffd"  # one more, around names; no normalizer touches it, or digits


class SpecialTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, rust: RustTokenizer) -> None:
        added = rust.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        # As the tokenizer does it: of several that begin in one place the longest, special or not.
        self._pattern = re.compile(_longest_of({token.content for token in added} - {""}))
        lax = any(token.special and token.normalized for token in added)
        self._normalize: Callable[[str], str] | None = None
        if lax and rust.normalizer is not None:  # other spellings count as well
            self._normalize = rust.normalizer.normalize_str

    def untrusted(
        self, messages: Sequence[Mapping[str, Any]], trusted: Container[str] = TRUSTED_ROLES
    ) -> bool:
        """Return whether anyone but the `trusted` roles has written special tokens."""
        texts = (t for m in messages if m["role"] not in trusted for t in _strings(m))
        return any(map(self._in, texts))

    def hide(
        self,
        messages: Sequence[Mapping[str, Any]],
        *others: Any,
        trusted: Container[str] = TRUSTED_ROLES,
    ) -> Hidden:
        """Replace what all but the `trusted` roles have written; `others` is what else the
        template sees.

        Raise InvalidRequest when the request uses every private-use character.
        """
        everything = "".join(_strings([messages, others]))
        used = {char for char in everything if ord(char) >= _PRIVATE.start}
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        stand_ins: dict[str, str] = {}

        def stand_in(literal: str) -> str:
            if literal not in stand_ins:
                stand_ins[literal] = next(free, "")
            return stand_ins[literal]

        hidden = [
            message if message["role"] in trusted else self._replaced(message, stand_in)
            for message in messages
        ]
        if "" in stand_ins.values():
            raise InvalidRequest("the messages use every private-use character", param="messages")
        return Hidden(hidden, {ord(char): literal for literal, char in stand_ins.items()})

    def replace(self, text: str, new: Callable[[str], str]) -> str:
        """Return `text` with `new` of each special token in its place."""
        return self._pattern.sub(lambda m: new(m[0]) if m[0] in self._special else m[0], text)

    def _replaced(self, value: Any, new: Callable[[str], str]) -> Any:
        match value:
            case str():
                return self.replace(value, new)
            case dict():
                return {self._replaced(k, new): self._replaced(v, new) for k, v in value.items()}
            case list():
                return [self._replaced(one, new) for one in value]
            case _:
                return value

    def _in(self, text: str) -> bool:
        if any(match[0] in self._special for match in self._pattern.finditer(text)):
            return True
        if self._normalize is None:
            return False
        found = self._pattern.finditer(self._normalize(text))
        return any(match[0] in self._special for match in found)


class Hidden:
    """A chat whose users' special tokens are private-use characters."""

    def __init__(self, messages: list[Any], literals: Mapping[int, str]) -> None:
        self.messages = messages
        self._literals = literals  # by the code point that stands for it

    def shown(self, rendered: str) -> str:
        """Return rendered text with the users' special tokens as they were written."""
        for code, literal in self._literals.items():  # templates may have written JSON in ASCII
            escaped = json.dumps(chr(code))[1:-1]
            rendered = rendered.replace(escaped, json.dumps(literal)[1:-1])
        return rendered.translate(self._literals)


class NamedTokenizer:
    """The second tokenizer, whose special tokens have secret names."""

    def __init__(self, definition: str, special: SpecialTokens) -> None:
        """`definition` is the content of the first one's tokenizer.json."""
        secret = secrets.randbits(64)
        spec = orjson.loads(definition)
        marked = [token for token in spec["added_tokens"] if token["special"]]
        self._names = {
            token["content"]: f"{_FENCE}{secret}{number:06}{_FENCE}"
            for number, token in enumerate(marked)
        }
        self._special = special
        self.rust = RustTokenizer.from_str(orjson.dumps(_renamed(spec, self._names)).decode())

    def text(self, rendered: str, hidden: Hidden) -> str:
        """Return what to encode: the template's special tokens by name, those of users as text."""
        return hidden.shown(self._special.replace(rendered, self._names.__getitem__))


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with other texts for its special tokens."""
    model = spec["model"]
    for token in spec["added_tokens"]:
        if token["special"]:
            token |= {"content": names[token["content"]], "normalized": False}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram's has no ids but its order
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # no others may lead to a special token, or go on from it
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if not names.keys() & {left, right, left + right}
        ]
    return spec


def _longest_of(literals: set[str]) -> str:
    """Return a pattern that matches the longest of them and tries shared beginnings once."""
    by_first: dict[str, set[str]] = {}
    for literal in literals - {""}:
        by_first.setdefault(literal[0], set()).add(literal[1:])
    if not by_first:
        return "(?!)"
    branches = (
        re.escape(first + next(iter(rest)))
        if len(rest) == 1
        else re.escape(first) + _longest_of(rest)
        for first, rest in by_first.items()
    )
    pattern = f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if "" in literals else pattern


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    match value:
        case str():
            yield value
        case dict():
            yield from _strings([*value.keys(), *value.values()])
        case list() | tuple():
            for one in value:
                yield from _strings(one)
