"""Requests that wait for a slot: their order, their bounds, and how long a wait is."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from surestep_common.errors import QueueFull

from .limits import Limits
from .sequence import Sequence

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # that a refused caller is told
_MEASURED = 64  # requests whose start tells how fast the queue drains


class WaitingQueue:
    """Sorted by order. Tokens are those known of each request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_refused = 0  # requests that found no room
        self._seqs: list[Sequence] = []
        self._started: deque[tuple[float, int]] = deque(maxlen=_MEASURED)  # time, tokens

    def __len__(self) -> int:
        """Requests."""
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        """In their order."""
        return iter(self._seqs)

    def add(self, seq: Sequence) -> None:
        """Wherever its order puts it."""
        insort(self._seqs, seq, key=lambda other: other.order)
        self.num_tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        """It waits no more."""
        self._seqs.remove(seq)
        self.num_tokens -= len(seq.tokens)

    def first(self, count: int, allows: Callable[[str], bool]) -> list[Sequence]:
        """The first ones that are allowed, by their id."""
        return list(islice((seq for seq in self._seqs if allows(seq.request.id)), count))

    def started(self, seq: Sequence, now: float) -> None:
        """It left the queue for a slot."""
        self._started.append((now, len(seq.tokens)))

    def check_room(self, num_tokens: int, limits: Limits, now: float) -> None:
        """Raise QueueFull when a request of `num_tokens` is one too many.

        A request that alone exceeds the bound on tokens may wait alone.
        """
        num_seqs, sum_tokens = len(self) + 1, self.num_tokens + num_tokens
        if num_seqs > limits.max_queue_len:
            what, left = f"{len(self)} requests", len(self._started)
            excess = num_seqs - limits.max_queue_len
        elif len(self) and 0 < limits.max_queue_tokens < sum_tokens:
            what, left = f"{self.num_tokens} tokens", sum(tokens for _, tokens in self._started)
            excess = sum_tokens - limits.max_queue_tokens
        else:
            return
        self.num_refused += 1
        retry_after = self._wait_s(excess, left, now)
        raise QueueFull(f"{what} are waiting already", retry_after=retry_after)

    def _wait_s(self, excess: int, left: int, now: float) -> float:
        """Until `excess` have left, if they go on leaving as `left` did lately."""
        if left:
            wait_s = excess * (now - self._started[0][0]) / left
        else:  # the head of the queue tells at least how long a wait is
            wait_s = now - min((seq.arrival for seq in self._seqs), default=now)
        return min(max(wait_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def check(self) -> None:
        """Assert order and count. For tests."""
        assert self._seqs == sorted(self._seqs, key=lambda seq: seq.order)
        assert self.num_tokens == sum(len(seq.tokens) for seq in self._seqs)
