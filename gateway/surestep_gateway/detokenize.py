"""From token ids to text, one token at a time: whole characters only, cut at stop strings.

Tokens are processed one by one whatever the chunks they arrive in, so the text and the place where
it ends do not depend on how many tokens a step happened to yield.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer


class Detokenizer:
    """Bytes of tokens to characters; an unfinished character waits for its remaining bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """Characters that this token completes."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        text = self._utf8.decode(self._tokenizer.piece(token_id))
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class StopMatch(NamedTuple):
    """Text up to the end of the output, and the stop string that ended it."""

    text: str
    stop: str


class StopScanner:
    """Finds the first stop string in a growing text.

    Text that may be the start of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Text that is safe to deliver, or the match that ends the output."""
        if not self._stops:
            return text
        if not text:
            return ""
        window = self._held + text
        match = self._find(window)
        if match is not None:
            self._held = ""
            return match
        keep = max(_overlap(window, stop) for stop in self._stops)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def _find(self, window: str) -> StopMatch | None:
        found = [(at, len(stop), stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if not found:
            return None
        at, length, stop = min(found)
        return StopMatch(window[: at + length] if self._include_stop else window[:at], stop)

    def flush(self) -> str:
        """Text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class Piece(NamedTuple):
    """What a run of tokens added to the output of one sequence."""

    text: str
    token_ids: Sequence[int]  # shorter than the run when a stop string ended the output
    stop: str | None  # the stop string that ended the output


class TextAssembler:
    """Output text of one sequence.

    Stop strings count only in text that came after the first `min_tokens` tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, scanner: StopScanner, *, min_tokens: int, include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, ended: bool, stop_token: bool) -> Piece:
        """Add committed tokens; with `ended` the last ones, with `stop_token` a stop id last."""
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            hidden = stop_token and count == len(token_ids) and not self._include_stop
            safe = self._push_one(token_id, hidden=hidden)
            if isinstance(safe, StopMatch):
                return Piece(text + safe.text, token_ids[:count], safe.stop)
            text += safe
        if ended:
            last = self._scanner.push(self._detokenizer.flush())
            if isinstance(last, StopMatch):
                return Piece(text + last.text, token_ids, last.stop)
            text += last + self._scanner.flush()
        return Piece(text, token_ids, None)

    def _push_one(self, token_id: int, *, hidden: bool) -> str | StopMatch:
        self._num_tokens += 1
        text = "" if hidden else self._detokenizer.push(token_id)
        if self._num_tokens <= self._min_tokens:
            return text
        return self._scanner.push(text)
