"""From token ids to events, one token at a time: whole characters only, cut at stop strings and
where they repeat themselves.

Tokens are processed one by one whatever the chunks they arrive in, so the text and the place where
it ends do not depend on how many tokens a step happened to yield.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import IntArray

from surestep_gateway.parsers import Event, OutputParser, coalesce
from surestep_gateway.parsers.base import MarkerScanner
from surestep_gateway.text.tokenizer import Tokenizer

REPEATED = "repetition_detected"  # why an output has ended
_MAX_BEGUN = 3  # bytes, and so tokens, of a character that is not whole


class Detokenizer:
    """Turns bytes of tokens into characters; a partial character waits for its remaining bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown: Iterable[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`shown` are special tokens that are never skipped. A character that the prompt begins and
        the output completes is text of the output.
        """
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]()
        if skip_special_tokens:
            self._skipped = tokenizer.special_ids.difference(map(tokenizer.id, shown))
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = _unfinished(b"".join(map(tokenizer.piece, prompt_ids[-_MAX_BEGUN:])))
        self._at_start = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer.piece(token_id)
        if self._begun and piece:
            goes_on = piece[0] & 0xC0 == 0x80  # as all bytes of a character but the first
            piece, self._begun = self._begun * goes_on + piece, b""
        text = self._utf8.decode(piece)
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return the rest at the end: a partial character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _unfinished(text: bytes) -> bytes:
    """Return the bytes at the end that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return decoder.getstate()[0]


class StopMatch(NamedTuple):
    """Text up to the end of the output, and the stop string that ended it."""

    text: str
    stop: str


class StopScanner:
    """Finds the first stop string in a growing text.

    Text that may be the start of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._scanner = MarkerScanner(*stops)
        self._include_stop = include_stop

    def push(self, text: str) -> str | StopMatch:
        """Return text that is safe to deliver, or the match that ends the output."""
        found = self._scanner.push(text)
        if found.marker is None:
            return found.before
        shown = found.marker if self._include_stop else ""
        return StopMatch(found.before + shown, found.marker)

    def flush(self) -> str:
        """Return the text held back for a stop string that never came."""
        return self._scanner.flush()


class RepetitionDetector:
    """Finds what vLLM's `repetition_detection` describes. Time and memory of a token grow with the
    longest pattern alone: for each length it counts the tokens that equal the one so far before.
    """

    def __init__(self, min_size: int, max_size: int, min_count: int, *, min_tokens: int) -> None:
        """Patterns have `min_size` to `max_size` tokens; the first `min_tokens` end nothing."""
        self._sizes = np.arange(1, max_size + 1)
        self._enough = self._sizes * (min_count - 1)
        self._enough[: max(min_size, 1) - 1] = np.iinfo(np.int64).max
        self._latest = np.full(max_size, -1)  # token ids, the last one first
        self._equal: IntArray = np.zeros(max_size, dtype=np.int64)
        self._left = min_tokens

    def push(self, token_id: int) -> bool:
        """Return whether a pattern has come often enough with this token."""
        self._equal = np.where(self._latest == token_id, self._equal + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token_id
        self._left -= 1
        return self._left < 0 and bool((self._equal >= self._enough).any())


class Piece(NamedTuple):
    """Addition of a run of tokens to the output of a sequence."""

    events: Sequence[Event]
    token_ids: Sequence[int]  # shorter than the run when a stop string ended the output
    stop: str | None  # the stop string that ended the output
    repeats: bool = False  # it was ended because it repeats itself


class TextAssembler:
    """Turns the tokens of one sequence into events.

    Stop strings are matched in the whole text, including reasoning and calls, but only behind the
    first `min_tokens` tokens. Tokens of the output's structure divide it into several texts, and
    headers among them are not searched. What looked like a header and is text is searched as soon
    as that is known: the output ends with the token that says so.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: StopScanner,
        parser: OutputParser,
        *,
        min_tokens: int,
        include_stop: bool,
        structure: Mapping[int, str] | None = None,
        repetition: RepetitionDetector | None = None,
    ) -> None:
        """`structure` has the parser's by their ids."""
        self._structure = structure or {}
        self._divided = parser.structured if self._structure else None
        self._num_searched = 0  # characters of the open header behind `min_tokens` tokens
        self._repetition = repetition
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._parser = parser
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._num_reasoning = 0

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens between the markers of reasoning; None where reasoning is not parsed."""
        return self._num_reasoning if self._parser.sets_reasoning_apart else None

    @property
    def called(self) -> bool:
        """Return whether the output calls a tool."""
        return self._parser.called

    def push(self, token_ids: Sequence[int], *, ended: bool, stop_token: bool) -> Piece:
        """Add committed tokens: with `ended` the last ones, with `stop_token` a stop id last."""
        events: list[Event] = []
        for count, token_id in enumerate(token_ids, start=1):
            hidden = stop_token and count == len(token_ids) and not self._include_stop
            stop = self._push_one(token_id, events, hidden=hidden)
            if stop is not None:
                return Piece(coalesce(events), token_ids[:count], stop)
            if self._repetition is not None and self._repetition.push(token_id) and not stop_token:
                stop = self._push_end(events)
                return Piece(coalesce(events), token_ids[:count], stop, repeats=stop is None)
        stop = self._push_end(events) if ended else None
        return Piece(coalesce(events), token_ids, stop)

    def _push_one(self, token_id: int, events: list[Event], *, hidden: bool) -> str | None:
        """Return the stop string that the token completes."""
        self._num_tokens += 1
        mark = self._structure.get(token_id)
        if mark is not None and self._divided is not None and self._divided.divides(mark):
            return self._push_mark(mark, events)
        text = "" if hidden else self._text_of(token_id, mark)
        before = self._parser.reasoning
        stop = self._push_text(text, events)
        self._num_reasoning += before and self._parser.reasoning
        return stop

    @property
    def _searches(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _text_of(self, token_id: int, mark: str | None) -> str:
        if mark is None:
            return self._detokenizer.push(token_id)
        return self._detokenizer.flush() + mark

    def _push_text(self, text: str, events: list[Event]) -> str | None:
        """Return the stop string that the text completes."""
        if self._divided is None or not self._divided.in_header:
            return self._parse(self._scanner.push(text) if self._searches else text, events)
        self._num_searched += len(text) * self._searches
        return self._push_held(self._divided.hold(text), events)

    def _push_held(self, text: str, events: list[Event]) -> str | None:
        """Pass on the end of a header, which is text. Return the stop string that it completes."""
        if not text:
            return None
        early = max(0, len(text) - self._num_searched)
        events += self._parser.push(text[:early])
        return self._parse(self._scanner.push(text[early:]), events)

    def _push_mark(self, mark: str, events: list[Event]) -> str | None:
        stop = self._end_text(events, mark)
        if stop is not None:
            return stop
        more, text = self._parser.mark(mark)
        events += more
        stop = self._push_held(text, events)
        self._num_searched = len(mark) * self._searches
        return stop

    def _push_end(self, events: list[Event]) -> str | None:
        stop = self._end_text(events)
        if stop is None:
            events += self._parser.finish()
        return stop

    def _end_text(self, events: list[Event], mark: str | None = None) -> str | None:
        """Pass on what is held back until `mark`. Return the stop string that the end completes."""
        stop = self._push_text(self._detokenizer.flush(), events)
        if stop is None and self._divided is not None:
            stop = self._push_held(self._divided.release(mark), events)
        if stop is None:
            events += self._parser.push(self._scanner.flush())
        return stop

    def _parse(self, checked: str | StopMatch, events: list[Event]) -> str | None:
        if isinstance(checked, str):
            events += self._parser.push(checked)
            return None
        events += self._parser.push(checked.text)
        events += self._parser.finish()
        return checked.stop
