"""Matchers of llguidance: what they are made of, and what bounds them by counts.

The counts bound most grammars. They are looked at between two steps of a computation, and a single
one may take for ever: an intersection of many regular expressions has as many next states as their
product. So matchers live in processes with limits of time and memory (process.py).
"""

from __future__ import annotations

from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from surestep_common.errors import InvalidRequest, UnsupportedParameter

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def tokenizer_of(path: Path, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    """Read a tokenizer.json for a model with so many token ids, at some of which outputs end.

    Raises UnsupportedParameter when llguidance cannot use it.
    """
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=eos_ids or None)
    except Exception as error:
        raise UnsupportedParameter(
            f"grammar: the model's tokenizer cannot be used for grammars: {one_line(str(error))}",
            param="grammar",
        ) from error


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Return a matcher that has computed its first mask, for most the slowest one.

    Raises InvalidRequest for a grammar that is wrong or exceeds a limit.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest(f"grammar: {one_line(matcher.get_error())}", param="grammar")
    return matcher


def one_line(message: str) -> str:
    """Return the first words of a message of llguidance, which may have many lines."""
    return " ".join(message.split("<state>")[0].split())[:500]
