"""Languages that outputs must belong to, and their sources for llguidance.

A source is JSON: `{"grammars": [{"name": "all", "lark_grammar": "start: ... @body"}, {"name":
"body", "json_schema": {...}}]}`. The first grammar refers to others by `@name`. Lark with
llguidance's extensions: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher
from surestep_common.errors import InvalidRequest
from surestep_common.request_params import MAX_GRAMMAR_BYTES

Json = dict[str, Any]

TokenName = Callable[[str], str]  # its name in Lark; empty where it is text

TAG = re.compile(r"(<[^<>\s]+>)")
ANYTHING = "/(?s:.*)/"  # a Lark expression
_CHECKED = 256  # sources whose faults are remembered
_SHOWN_CHARS = 500  # of a fault


class Language(NamedTuple):
    """A language that an output must belong to. `field` is the request's that asks for it."""

    field: str
    lark: str = ""  # a grammar with a rule `start`
    schema: Json | None = None  # a JSON schema, in place of that
    promised: Json | None = None  # the client's schema, where that one is wider

    def grammar(self) -> Json:
        """Return the language as one of the grammars of a source."""
        if self.schema is not None:
            return {"json_schema": self.schema}
        return {"lark_grammar": self.lark}


class Rules(NamedTuple):
    """A Lark expression, and the rules that it needs."""

    expression: str
    rules: str = ""


def source_of(first: Rules, bodies: dict[str, Language]) -> str:
    """Return the source of a language that begins with `first`, which refers to `bodies`."""
    top = f"start: {first.expression}\n{first.rules}"
    named = [{"name": name} | body.grammar() for name, body in bodies.items()]
    grammars = [{"name": "all", "lark_grammar": top}, *named]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def checked(source: str, field: str) -> str:
    """Return a source that can be compiled. Raise InvalidRequest naming the field."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{field}: the grammar must have at most {MAX_GRAMMAR_BYTES} bytes", param=field
        )
    fault = fault_in(source)
    if fault:
        raise InvalidRequest(f"{field}: {fault}", param=field)
    return source


@lru_cache(maxsize=_CHECKED)
def fault_in(source: str) -> str:
    """Return what is wrong with a source in one line; nothing if it can be compiled."""
    return " ".join(LLMatcher.validate_grammar(source).split())[:_SHOWN_CHARS]


def marker(text: str, token: TokenName) -> str:
    """Return a marker as a Lark expression: one that is a token is no text."""
    return token(text) or quoted(text)


def marked(text: str, token: TokenName) -> str:
    """Return a text as a Lark expression in which tags that are tokens are no text."""
    return markers(TAG.split(text), token)


def markers(parts: Iterable[str], token: TokenName) -> str:
    """Return parts of a text, of which some may be markers, as one Lark expression."""
    return " ".join(marker(part, token) for part in parts if part) or '""'


def quoted(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def up_to(end: str) -> str:
    """Return any text up to `end` as a Lark expression, for a rule that is lazy."""
    return f"/(?s:.*){pattern(end)}/"


def pattern(text: str) -> str:
    """Return a regular expression within one of Lark."""
    return text.replace("/", "\\/").replace("\n", "\\n")


def inline(schema: Json) -> str:
    """Return a JSON schema as a Lark expression."""
    return "%json " + json.dumps(schema, ensure_ascii=False)
