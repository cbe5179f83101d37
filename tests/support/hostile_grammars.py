"""Grammars of some hundred bytes that take for ever: intersections of many regular expressions."""

from __future__ import annotations

from llguidance import LLMatcher


def _intersection(count: int) -> str:
    return " & ".join(f"/(?s:.*)a{{{i + 1}}}(?s:.*)/" for i in range(count))


def costly_to_compile(seed: int, number: int = 0) -> str:
    """Return a grammar that is not compiled in hours. Each seed and number has another."""
    lark = f"start: T | /{number}/\nT: {_intersection(40 - seed)}"
    source: str = LLMatcher.grammar_from_lark(lark)
    return source


def costly_to_follow(seed: int = 0) -> tuple[str, str]:
    """Return a grammar that is compiled in a millisecond, and a text behind which no mask is ever
    computed."""
    lark = f"start: T\nT: /[yz]{{20}}[^a]*/ | (/[yz]{{20}}/ BB)\nBB: {_intersection(40 - seed)}"
    source: str = LLMatcher.grammar_from_lark(lark)
    return source, "yz" * 10
