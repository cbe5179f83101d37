"""The search for a poison request, one that ends the workers: candidates are halved, at last alone.

When workers are lost, every request with rows in unanswered plans may have done it, at a position
between what was committed and what it may have come to: its window. After a first loss all of them
are admitted again. Those that are lost again over the same positions are suspects: one group of
them are the candidates, the other groups are held back. Candidates that end the workers again are
halved; when all of them got past their windows they are cleared, and the next group has its turn. A
suspect that is left over is admitted alone. Having ended the workers alone, it runs in another
shape: without drafts, its prompt in smaller chunks. If that gets past, the request goes on. If it
does not, the request is the culprit, unless the canary, alone as well, ends the workers too; then
no request is to blame.

One such request among n is found within log2(n) + 4 losses. Requests that are not suspected go on.
Several culprits may hide each other, for what one does changes where the others seem to be lost.
After too many losses without a result, all that were under way are admitted alone, one by one,
until they are past everything that they had come to.

Losses that are explained by signals from outside count an eighth, so that a few of them make no
request a suspect.

Logits that are not finite have a rule of their own. A request is computed again from nothing at its
first failure, and fails at its second. When several requests have their first failure within a few
steps, the workers are at fault.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from surestep_common.errors import SurestepError

_WINDOW = 16  # steps
_REQUESTS = 2  # that fail within the window
_TRUST = 1000  # steps for which workers that were replaced in vain, or not, are not replaced again


class NonFiniteLogits(SurestepError):
    """The workers compute nonsense for one request after the other."""


class NonFiniteWatch:
    """First failures of requests, over all epochs. Steps are numbered over all epochs too."""

    def __init__(self) -> None:
        self._failures: deque[int] = deque(maxlen=_REQUESTS)  # steps
        self._trusted_until = 0  # step

    def observe(self, num_requests: int, step: int) -> None:
        """Count requests that failed for the first time in a step.

        Raises NonFiniteLogits when the workers are to be replaced.
        """
        self._failures.extend([step] * num_requests)
        many = len(self._failures) == _REQUESTS and step - self._failures[0] < _WINDOW
        if num_requests and many and step >= self._trusted_until:
            self._trusted_until = step + _TRUST
            raise NonFiniteLogits(f"{_REQUESTS} requests met logits that were not finite")


CANARY = "canary"  # id of the scheduler's own request that shows whether the workers live

# How much a loss says against the requests under way, in eighths.
NO_LOSS, OUTSIDE_LOSS, WHOLE_LOSS = 0, 1, 8

_LONE_LOSSES = 2  # in a row, all but the first in another shape
_LONE_LOSSES_ONE_BY_ONE = 4  # one by one there are no losses in company before these
_FRUITLESS_LOSSES = 24  # without a result, after which suspects are admitted one by one


class Window(NamedTuple):
    """Positions of a request, the first and the last, among which a fatal one may be."""

    low: int
    high: int

    def common(self, other: Window) -> Window | None:
        """Return the positions in both."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Window(low, high) if low <= high else None


class PoisonSearch:
    """The search over all epochs. Requests go by their ids, lengths are in tokens."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}  # of requests that may have ended the workers
        self._num_losses: Counter[str] = Counter()  # since a request has its window
        self._reached: dict[str, int] = {}  # farthest that it may have come to at a loss
        self._fruitless = 0  # losses since the last result
        self._one_by_one = False  # for as long as there are suspects
        self._groups: list[list[str]] = []  # of suspects; the last group are the candidates
        self._alone = False  # no other request is admitted beside the candidate
        self._lone_losses = 0  # in a row
        self._canary_lives = False  # it got through instead of the suspect
        self._eighths = 0  # of a loss that signals from outside have added up to

    @property
    def active(self) -> bool:
        """Return whether some request has not got past what it may have come to at a loss."""
        return bool(self._reached)

    @property
    def needs_canary(self) -> bool:
        """Return whether a canary has to show first that the workers live without the candidate."""
        enough = _LONE_LOSSES_ONE_BY_ONE if self._one_by_one else _LONE_LOSSES
        return self._lone_losses >= enough

    @property
    def candidates(self) -> Sequence[str]:
        """Suspects that are admitted to see whether the workers end."""
        return self._groups[-1] if self._groups else ()

    def allows(self, request_id: str) -> bool:
        """Return whether the request may be admitted now."""
        if not self._groups:
            return True
        if self.needs_canary:
            return request_id == CANARY
        if self._alone:
            return request_id in self._groups[-1]
        return not any(request_id in group for group in self._groups[:-1])

    def reshapes(self, request_id: str) -> bool:
        """Return whether the request is to run in another shape: its shape may end the workers."""
        return self._alone and self._lone_losses > 0 and request_id in self._groups[-1]

    def num_losses(self, request_id: str) -> int:
        """Losses in which the request was under way, since it has its window."""
        return self._num_losses[request_id]

    def lost(self, under_way: Mapping[str, Window], weight: int = WHOLE_LOSS) -> None:
        """Account for a loss of the workers while these requests were within these windows.

        `weight` is one of NO_LOSS, OUTSIDE_LOSS and WHOLE_LOSS.
        """
        self._eighths += weight
        if self._eighths < WHOLE_LOSS:
            return
        self._eighths -= WHOLE_LOSS
        if self.needs_canary:
            self._clear_all()
            return
        rows = {name: window for name, window in under_way.items() if name != CANARY}
        if not rows:
            return
        for name, window in rows.items():
            self._reached[name] = max(self._reached.get(name, 0), window.high)
        self._fruitless += 1
        was_alone = self._alone
        for name, window in rows.items():
            before = self._windows.get(name)
            if before is not None and before.common(window) is None:
                self._clear(name)  # whatever it was, it was not at one position
        self._lone_losses = self._lone_losses + 1 if was_alone and self._alone else 0
        self._regroup(rows)
        self._alone = bool(self._groups) and len(self._groups[-1]) == 1
        self._num_losses.update(rows.keys())
        for name, window in rows.items():
            self._windows[name] = self._windows.get(name, window).common(window) or window
        if self._fruitless >= _FRUITLESS_LOSSES and not self._one_by_one:
            self._separate()

    def _separate(self) -> None:
        """Begin a search in which no request can hide behind another."""
        self._windows = {name: Window(0, high) for name, high in self._reached.items()}
        self._groups = [[name] for name in self._reached]
        self._one_by_one = self._alone = True
        self._lone_losses = self._fruitless = 0

    def _regroup(self, rows: Mapping[str, Window]) -> None:
        """Choose as candidates half of those that were under way, or half of the fresh suspects."""
        held = {name for group in self._groups for name in group}
        fresh = [name for name in rows if name in self._windows and name not in held]
        candidates = self._groups.pop() if self._groups else []
        lost = [name for name in candidates if name in rows]
        others = [name for name in candidates if name not in rows]
        if not lost:
            lost, fresh = fresh, []
        half = (len(lost) + 1) // 2
        groups = (fresh, others, lost[half:], lost[:half])
        self._groups += [group for group in groups if group]

    def applied(self, lengths: Mapping[str, int]) -> str | None:
        """Account for an applied step; running requests have these committed lengths.

        Returns the culprit when it is found; the caller closes it.
        """
        if self._canary_lives:
            self._fruitless = 0
            return self._groups[-1][0]
        self._reached = {n: high for n, high in self._reached.items() if lengths.get(n, 0) <= high}
        if not self._reached:
            self._fruitless = 0
        past = [n for n, window in self._windows.items() if lengths.get(n, 0) > window.high]
        for name in past:
            self._clear(name)
        return None

    def canary_lived(self) -> None:
        """Account for a canary that ended well."""
        self._canary_lives = self.needs_canary

    def close(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._reached.pop(request_id, None)
        self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        """Drop a request from the suspects."""
        if self._windows.pop(request_id, None) is None:
            return
        del self._num_losses[request_id]
        candidates = self._groups[-1] if self._groups else None
        groups = [[n for n in group if n != request_id] for group in self._groups]
        self._groups = [group for group in groups if group]
        if candidates == [
            request_id
        ]:  # the next group has its turn, in company if that is possible
            self._one_by_one = self._one_by_one and bool(self._groups)
            self._alone, self._lone_losses, self._canary_lives = self._one_by_one, 0, False

    def _clear_all(self) -> None:
        for books in (self._windows, self._num_losses, self._reached, self._groups):
            books.clear()
        self._fruitless, self._one_by_one = 0, False
        self._alone, self._lone_losses, self._canary_lives = False, 0, False
