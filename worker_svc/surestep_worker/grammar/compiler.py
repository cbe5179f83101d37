"""Compiles grammars on threads of its own, so that no step waits for a long one.

llguidance releases the interpreter lock meanwhile. What a grammar may take is bounded: its source
by surestep_common.request_bounds, the sizes of lexer and parser by LIMITS. Measured with hostile
sources of the greatest length a compilation takes less than a second and 100 MB.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from surestep_common.errors import InvalidRequest, UnsupportedParameter

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
MAX_CACHED_GRAMMARS = 64
_NUM_THREADS = 2
_TIMEOUT_S = 10.0  # of a compilation ahead of its request
_STEP_TIMEOUT_S = 2.0  # of one that a step needs: less than any step may take


class Compiler:
    """Compiles an owner's source once, while it is among the latest. Called from any thread."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        """`load_tokenizer` is called once, on a thread of this compiler, for the first grammar."""
        self._load_tokenizer = load_tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._cache = OrderedDict[tuple[str, str], Future[LLMatcher]]()  # by owner and source
        self._lock = Lock()

    def start(self, source: str, owner: str = "") -> Future[LLMatcher]:
        """Begin to compile a source, unless it is known already as one of this owner."""
        key = owner, source
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._threads.submit(self._load_tokenizer)
            found = self._cache.pop(key, None)
            if found is None:
                found = self._threads.submit(_compile, self._tokenizer, source)
            self._cache[key] = found
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return found

    def compile(self, source: str, owner: str = "") -> LLMatcher:
        """Return a matcher of an owner's source, which must not be advanced itself but copied.

        Raises InvalidRequest for a grammar that is wrong or takes too much.
        """
        return compiled(self.start(source, owner), _TIMEOUT_S)


def compiled(matcher: Future[LLMatcher], timeout_s: float = _STEP_TIMEOUT_S) -> LLMatcher:
    """Wait for a compilation. Raises InvalidRequest for a grammar that is wrong or takes too
    much."""
    try:
        return matcher.result(timeout_s)
    except TimeoutError:
        raise InvalidRequest(
            f"grammar: it takes more than {timeout_s:g} s to compile", param="grammar"
        ) from None


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


def one_line(message: str) -> str:
    """Return the first words of a message of llguidance, which may have many lines."""
    return " ".join(message.split("<state>")[0].split())[:500]


def _compile(tokenizer: Future[LLTokenizer], source: str) -> LLMatcher:
    """Return a matcher that has computed its first mask, for most the slowest one."""
    matcher = LLMatcher(tokenizer.result(), source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest(f"grammar: {one_line(matcher.get_error())}", param="grammar")
    return matcher
