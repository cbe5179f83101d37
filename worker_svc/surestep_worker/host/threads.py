"""How many threads a step on CPUs gets: as few as are as quick as all.

A step of few tokens is as quick as memory is read, which half of the threads may do as well. The
cores that they leave are those of the gateway and the scheduler, for whose work the next step has
to wait otherwise. Which number is best depends on the machine, the model and what else runs, so it
is found out while serving: now and then steps of one size take turns with twice or half as many
threads, and what was quicker stays. How many there are changes no bit of a result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from statistics import median

logger = logging.getLogger(__name__)

_MOST_TOKENS = 7  # of a step that may have fewer; larger ones are bound by arithmetic
_TRIES = 6  # steps with each of the two numbers
_UNTIL_FIRST, _BETWEEN = 8, 400  # steps of a size before its first trial, and between two
_AS_QUICK = 1.02  # fewer threads may take so much longer than more


class _Trial:
    """Steps in turns with `other` threads and with those that they have."""

    def __init__(self, other: int, now: int) -> None:
        self.other, self._now = other, now
        self._times: dict[int, list[float]] = {other: [], now: []}

    @property
    def next(self) -> int:
        """The number of threads that the next step should have."""
        times = self._times
        return self.other if len(times[self.other]) <= len(times[self._now]) else self._now

    def winner(self, num_threads: int, took_s: float) -> int | None:
        """Count a step; return what the steps should have from now on, None until that is known."""
        self._times[num_threads].append(took_s)
        if min(map(len, self._times.values())) < _TRIES:
            return None
        fewer, more = sorted(self._times)
        quick = median(self._times[fewer]) <= _AS_QUICK * median(self._times[more])
        return fewer if quick else more


class ThreadChoice:
    """The number of threads for steps of one size, at most `most`."""

    def __init__(self, most: int) -> None:
        self.now = most
        self._most = most
        self._left = _UNTIL_FIRST  # steps until the next trial
        self._trial: _Trial | None = None
        self._fewer_next = True  # the next trial is of half as many

    @property
    def next(self) -> int:
        """The number that the next step should have."""
        return self._trial.next if self._trial is not None else self.now

    def took(self, num_threads: int, took_s: float) -> None:
        """Count a step that had so many threads."""
        if self._trial is None:
            self._left -= 1
            if self._left <= 0:
                self._begin()
            return
        winner = self._trial.winner(num_threads, took_s)
        if winner is not None:
            self._fewer_next = winner < self.now if winner != self.now else not self._fewer_next
            self.now, self._trial, self._left = winner, None, _BETWEEN

    def _begin(self) -> None:
        fewer, more = self.now // 2, min(2 * self.now, self._most)
        other = fewer if fewer and (self._fewer_next or more == self.now) else more
        if other != self.now:
            self._trial = _Trial(other, self.now)


class StepThreads:
    """Sets the number of threads of each step of a rank."""

    def __init__(
        self,
        most: int,
        set_num_threads: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most = self._set = most
        self._set_num_threads = set_num_threads
        self._clock = clock
        self._choices: dict[int, ThreadChoice] = {}  # by the bits of a step's number of tokens

    @contextlib.contextmanager
    def of_step(self, num_tokens: int) -> Iterator[None]:
        """Give a step of so many tokens its threads, and see how long it takes."""
        if num_tokens > _MOST_TOKENS:
            self._use(self._most)
            yield
            return
        size = num_tokens.bit_length()
        choice = self._choices.setdefault(size, ThreadChoice(self._most))
        num_threads, before = choice.next, choice.now
        self._use(num_threads)
        began = self._clock()
        yield
        choice.took(num_threads, self._clock() - began)
        if choice.now != before:
            logger.debug("steps of %d bits of tokens: %d threads", size, choice.now)

    def _use(self, num_threads: int) -> None:
        if num_threads != self._set:
            self._set = num_threads
            self._set_num_threads(num_threads)
