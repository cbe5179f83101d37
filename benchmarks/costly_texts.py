"""Short texts whose cost is not told by their size: grammars and templates, found by a search.

`search` keeps the text that took longest and changes it, as a patient attacker would. What a text
costs is measured by the caller.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

MAX_CHARS = 2048
_FRESH = 0.3  # of the texts are not made of the slowest one

Json = dict[str, Any]
Measure = Callable[[str], Awaitable[float]]

_REGEX = (
    *("a", ".", "[a-z]", r"\w", r"\d", r"\s", r"\p{L}", "[^a]", "(a|b)", "(?i:abc)", "(?s:.*)"),
    *("*", "+", "?", "{1}", "{9}", "{1,30}", "{1000}", "{0,100000}", "|", "(", ")", ".*", "^", "$"),
    *(".*a.{1}", ".*a.{12}", "(.*a){9}", "([ab]*){50}", "(a?){60}", r"\x00", "é", "\\"),
)
_LARK = (
    *(
        "start: a\n",
        "a: b | b a\n",
        'a: a a | "x"\n',
        'b: "x"\n',
        "A: /x/ | A2\n",
        "A2: /.*a.{9}/\n",
    ),
    *("A: /(.*a.{3})/ & /(.*b.{9})/\n", "A: ~/(.*a.{9})/\n", "start: A A A\n", "a[lazy]: /.*x/\n"),
    *("a{500}: b\n", "start: b{0,9000}\n", "start: (b | c)*\n", 'c: b? b? b? b? b? b? b? "y"\n'),
    *('%json {"allOf": [{"pattern": "^.*a.{9}$"}]}\n', "start: %json {}\n", "%ignore /\\s/\n"),
    *("A: B B\n", "B: C C\n", "C: D{99}\n", "D: /[a-z]{99}/\n", "start: A & ~A\n", "(", ")", "|"),
)
_GBNF = (
    *("root ::= a\n", "a ::= b | b a\n", 'b ::= "x"\n', "a ::= a a\n", "# comment\n", "#\n"),
    *("root ::= b{0,9000}\n", "b ::= [a-z]{99}\n", "root ::= (((((b)*)*)*)*)\n", "[^", "]", '"'),
    *("a ::= a? a? a? a? b\n", "b ::= (", ")", "|", "c ::= [^\\n]*\n", "root ::= c c c c c c\n"),
)
_TEMPLATE = (
    *("{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content * 999 }}"),
    *("{% for i in range(9999) %}", "{% set x = 9 ** 9999 %}", "{{ x * x }}", "{{ x | string }}"),
    *("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}", "{{ f(0) }}", "{{ 'a' * 999999 }}", "{{"),
    *("{% if x %}", "{% endif %}", "{{ messages | tojson }}", "{{ '%99999d' | format(1) }}", "}}"),
    *("{{ range(99999) | list | length }}", "{{ 'ab'.replace('a', 'b' * 999) }}", "((((", "))))"),
)
_TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")


def _schema(rng: random.Random, depth: int = 3) -> Json:
    """Draw a schema of JSON."""
    part: Callable[[], Json] = lambda: _schema(rng, depth - 1)  # noqa: E731  # read as a name
    patterned = {"type": "string", "pattern": f"^.*{rng.choice('ab')}.{{{rng.randint(1, 30)}}}$"}
    leaves: list[Json] = [
        {"type": rng.choice(_TYPES)},
        patterned,
        {"type": "string", "pattern": "".join(rng.choices(_REGEX, k=rng.randint(1, 6)))},
        {"type": "string", "maxLength": rng.choice((9, 9999, 1 << 20)), "minLength": 3},
        {
            "type": "integer",
            "minimum": -rng.randint(0, 1 << 60),
            "maximum": rng.randint(0, 1 << 60),
        },
        {"type": "number", "multipleOf": rng.choice((0.1, 7, 1e-9, 999983)), "maximum": 1e9},
        {"enum": [rng.randint(0, 99), "x" * rng.randint(0, 30), None]},
        {"format": rng.choice(("date-time", "uri", "email", "uuid", "ipv6", "x"))},
        {"$ref": rng.choice(("#", "#/$defs/a", "#/allOf/0", "#/nowhere"))},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)
    several = [part() for _ in range(rng.randint(1, 4))] * rng.choice((1, 1, 5))
    few = {rng.choice(("a", "b", "\\", "")): part() for _ in range(3)}
    return rng.choice(
        (
            {rng.choice(("allOf", "anyOf", "oneOf")): several},
            {"allOf": [patterned, *several]},
            {"type": "object", "properties": few, "additionalProperties": part()},
            {"type": "object", "patternProperties": {patterned["pattern"]: part()}, **few},
            {"type": "array", "items": part(), "minItems": 2, "maxItems": rng.choice((9, 9999))},
            {"not": part()},
            {"$defs": few, "$ref": "#/$defs/a"},
            {"if": part(), "then": part(), "else": part()},
        )
    )


def _schemas(rng: random.Random) -> str:
    """Draw a schema; one in four has many parts that hold together."""
    if rng.random() < 0.25:
        count, kind = rng.randint(5, 30), rng.choice(("allOf", "oneOf", "anyOf"))
        step = rng.choice((0, 1, 3))
        parts = [{"type": "string", "pattern": f"^.*a.{{{n * step + 1}}}$"} for n in range(count)]
        return json.dumps({kind: parts})
    return json.dumps(_schema(rng))


def _joined(fragments: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: "".join(rng.choices(fragments, k=rng.randint(2, 40)))


def _tag(rng: random.Random) -> str:
    begins = ["<a>", "<", "<|im_end|>", "a" * rng.randint(1, 200)]
    trigger = rng.choice(begins)
    tags = [
        {"begin": trigger + "b" * n, "schema": _schema(rng, 1), "end": rng.choice(begins)}
        for n in range(rng.randint(1, 5))
    ]
    return json.dumps({"type": "structural_tag", "structures": tags, "triggers": [trigger]})


# How a text of a kind is drawn, and the fields of a request that it goes into.
KINDS: dict[str, tuple[Callable[[random.Random], str], Callable[[str], Json]]] = {
    "schema": (_schemas, lambda text: {"structured_outputs": {"json": text}}),
    "regex": (_joined(_REGEX), lambda text: {"structured_outputs": {"regex": text}}),
    "lark": (_joined(_LARK), lambda text: {"structured_outputs": {"grammar": text}}),
    "gbnf": (_joined(_GBNF), lambda text: {"guided_grammar": text}),
    "tag": (_tag, lambda text: {"structural_tag": text}),
    "whitespace": (
        _joined(_REGEX),
        lambda text: {"guided_json": "{}", "guided_whitespace_pattern": text},
    ),
    "choice": (
        _joined(_REGEX),
        lambda text: {"structured_outputs": {"choice": [text[:n] or "x" for n in range(900)]}},
    ),
    "template": (_joined(_TEMPLATE), lambda text: {"chat_template": text}),
    "content": (
        _joined((*_REGEX, " ", "\n", "\t", "<|im_end|>", "<|im_", "9" * 50, "a" * 200, " " * 300)),
        lambda text: {"messages": [{"role": "user", "content": text}]},
    ),
}


def changed(rng: random.Random, kind: str, text: str) -> str:
    """Return a neighbour of a text: a part repeated, moved or lost, or something new in it."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randint(1, 60))
    new = KINDS[kind][0](rng)
    put_in = rng.choice((text[start:end] * rng.randint(2, 9), "", new[: rng.randint(1, 80)]))
    return (text[:start] + put_in + text[end:])[:MAX_CHARS]


async def search(
    kind: str, rng: random.Random, measure: Measure, seconds: float
) -> AsyncIterator[tuple[float, str]]:
    """Yield what each text costs, and the text: new ones, and neighbours of the dearest so far."""
    draw = KINDS[kind][0]
    dearest, worst = "", -1.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fresh = worst < 0 or rng.random() < _FRESH
        text = (draw(rng) if fresh else changed(rng, kind, dearest))[:MAX_CHARS]
        cost = await measure(text)
        yield cost, text
        if cost > worst:
            dearest, worst = text, cost
