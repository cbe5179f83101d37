"""`python -m surestep_worker.grammar.process TOKENIZER VOCAB_SIZE EOS_ID...`: grammars' processes.

This one reads the tokenizer and forks another for each grammar, which compiles it and then follows
the requests that have it. A grammar that takes too much ends its own process and nothing else: the
system counts processor time and memory, and kills. Standard input is the rank's socket, over which
it sends one end of a connection for each process. All of them end when the rank does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from surestep_common.errors import InvalidRequest, SurestepError
from surestep_common.process import die_with_parent, prefer_as_victim

from .frames import Frames, Question, questions_of, told_of_error, told_of_windows
from .matcher import matcher_of, tokenizer_of
from .walk import Walk
from .window import Ask, Window, make_window, mask_window

COMPILE_S = 2.0  # of processor time
STEP_S = 0.5  # of processor time for the window of a row, and
_TOKEN_S = 0.001  # for each token that its grammar has not seen
_SPARE_S, _TOKEN_SHARE_S = 2.0, 0.02  # of processor time for all windows of a request, per token
_MEMORY_BYTES = 512 << 20  # for one grammar
_NICE = 10  # while it compiles, beside the steps
_VICTIM = 1000  # rather than any other process of the server


@dataclass(slots=True)
class _Followed:
    """A request that is followed, and the processor time that it may still spend."""

    walk: Walk
    left_s: float = _SPARE_S


class Follower:
    """Answers for the requests of one grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words
        self._followed = dict[int, _Followed]()

    def answer(self, forgotten: Sequence[int], questions: Sequence[Question]) -> list[Window]:
        """Return the window of each question."""
        for key in forgotten:
            self._followed.pop(key, None)
        return [self._window(question) for question in questions]

    def _window(self, question: Question) -> Window:
        emitted, began = question.ask.emitted, time.process_time()
        with processor_time(STEP_S + _TOKEN_S * len(emitted)):
            if question.begin is not None:
                walk = Walk(self._matcher.deep_copy(), *question.begin)
                self._followed[question.key] = _Followed(walk)
            followed = self._followed[question.key]
            try:
                window = self._next(followed.walk, question.ask)
            except SurestepError as error:
                return Window(fault=error.message)
        followed.left_s += _TOKEN_SHARE_S * len(emitted) - (time.process_time() - began)
        if followed.left_s < 0 and not window.fault:
            return Window(fault="grammar: it takes too much time to follow")
        return window

    def _next(self, walk: Walk, ask: Ask) -> Window:
        for token in ask.emitted:
            walk.advance(token)
        if ask.most is None:
            return mask_window(walk, ask.drafts, self._num_words)
        return make_window(walk, ask.drafts, ask.most, self._num_words)


@contextlib.contextmanager
def processor_time(limit_s: float) -> Iterator[None]:
    """End this process if the block takes more processor time, native code included."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(arguments: Sequence[str]) -> int:
    """Fork a process for each connection that the rank sends, until it closes the socket."""
    die_with_parent()
    prefer_as_victim(_VICTIM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the rank sees how a connection ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, vocab_size, *eos_ids = arguments
    tokenizer: LLTokenizer | SurestepError
    try:
        tokenizer = tokenizer_of(Path(path), int(vocab_size), [int(token) for token in eos_ids])
    except SurestepError as error:
        tokenizer = error
    gc.freeze()
    with socket.socket(fileno=sys.stdin.fileno()) as rank:
        while fds := socket.recv_fds(rank, 1, 1)[1]:
            if os.fork() == 0:
                rank.close()
                serve(fds[0], tokenizer, -(-int(vocab_size) // 32))
                os._exit(0)
            os.close(fds[0])
    return 0


def serve(fd: int, tokenizer: LLTokenizer | SurestepError, num_words: int) -> None:
    """Compile the grammar that comes first, then answer, until the rank hangs up."""
    with socket.socket(fileno=fd) as rank:
        socket.send_fds(rank, [b"."], [os.pidfd_open(os.getpid())])
        frames = Frames(socket.socket(fileno=rank.detach()))
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + _MEMORY_BYTES, limit))
    with contextlib.suppress(EOFError, OSError):
        try:
            matcher = _compile(tokenizer, frames.receive()[0])
        except SurestepError as error:
            frames.send(told_of_error(error))
            return
        follower = Follower(matcher, num_words)
        frames.send(None)
        while True:
            windows = follower.answer(*questions_of(frames.receive()[0]))
            frames.send(*told_of_windows(windows))


def _compile(tokenizer: LLTokenizer | SurestepError, source: str) -> LLMatcher:
    """Compile with low priority, which only a thread can have and its process be rid of again."""
    if isinstance(tokenizer, SurestepError):
        raise tokenizer
    with (
        processor_time(COMPILE_S),
        ThreadPoolExecutor(1, initializer=os.nice, initargs=(_NICE,)) as thread,
    ):
        return thread.submit(matcher_of, tokenizer, source).result()


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def took_too_long(limit_s: float, what: str) -> InvalidRequest:
    """Return the error of a grammar whose process was ended for its processor time."""
    return InvalidRequest(
        f"grammar: it takes more than {limit_s:g} s of processor time to {what}", param="grammar"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
