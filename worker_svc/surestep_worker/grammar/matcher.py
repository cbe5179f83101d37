"""Matchers of llguidance: what they are made of, and what bounds them by counts.

The counts bound most grammars. They are looked at between two steps of a computation, and a single
one may take for ever: an intersection of many regular expressions has as many next states as their
product. So matchers live in processes with limits of time and memory (process.py).
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from surestep_common.errors import InvalidRequest, UnsupportedParameter

_TAG = re.compile(rb"<[^<>]+>")
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class _Spelling:
    """A tokenizer that spells text in tokens of text, as TokenizerWrapper wants it.

    llguidance takes added tokens that are special, or whose text is `<...>`, for tokens that are no
    text, and yet finds them where it tokenises a text that is forced. It then allows nothing but a
    token that the grammar refuses. Here their texts are cut behind the first character.
    """

    def __init__(self, read: LLTokenizer) -> None:
        self._read = read
        self.tokens = [read.decode_bytes([id_]) for id_ in range(read.vocab_size)]
        self.special_token_ids = list(filter(read.is_special_token, range(read.vocab_size)))
        self.eos_token_id, self.bos_token_id = read.eos_token, None
        names = {self.tokens[id_] for id_ in self.special_token_ids if not self._is_padding(id_)}
        self._tags = {name for name in names if _TAG.fullmatch(name)}  # thousands, in Gemma
        others = b"|".join(map(re.escape, sorted(names - self._tags - {b""}))) or b"(?!)"
        self._begins = re.compile(b"(?=%s|(%s))." % (others, _TAG.pattern), re.DOTALL)

    def _is_padding(self, id_: int) -> bool:
        """Return whether an id of the model's vocabulary has no token."""
        return self.tokens[id_] == b"<[%d]>" % id_

    def __call__(self, text: bytes) -> list[int]:
        """Return ids of tokens whose texts together are this one."""
        found = self._begins.finditer(text)
        cuts = [match.end() for match in found if match[1] is None or match[1] in self._tags]
        cuts = [0, *cuts, len(text)]
        pieces = (text[begin:end] for begin, end in pairwise(cuts))
        return [id_ for piece in pieces for id_ in self._read.tokenize_bytes(piece)]


def tokenizer_of(path: Path, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    """Read a tokenizer.json for a model with so many token ids, at some of which outputs end.

    Raises UnsupportedParameter when llguidance cannot use it.
    """
    try:
        read = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=eos_ids or None)
        return LLTokenizer(TokenizerWrapper(_Spelling(read)), eos_token=eos_ids or None)
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
