"""Which request ends the workers: suspects are admitted again by halves, at last one by one.

When workers are lost, the requests with rows in unanswered plans are accused: the fatal position is
between what was committed and what they may have come to. After a first loss all of them are
admitted again. Those that are lost again over the same positions are suspects: one group of them is
on trial, the others are held. A trial that ends with the workers is halved; when all of its
requests got past those positions, the next group has its turn. A suspect left over is tried alone.
Having ended the workers alone, it is tried in another shape: without drafts, its prompt in smaller
chunks. If that gets past, the request goes on. If it does not, the request is guilty, unless the
canary, alone as well, ends the workers too; then nobody is to blame.

One such request among n is found within log2(n) + 4 losses. Those without suspicion go on. Several
may hide each other, for what one does changes where the others seem to be lost. After too many
losses without a verdict, all who were under way are tried alone, one by one, until they are past
everything that they had come to.

Losses that somebody else's signals explain count an eighth, so that a few of them accuse nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CANARY = "canary"  # id of the scheduler's own request that shows whether the workers live

# What a loss says of those under way, in eighths.
NO_LOSS, OUTSIDE_LOSS, WHOLE_LOSS = 0, 1, 8

_LONE_LOSSES = 2  # in a row, all but the first in another shape
_LONE_LOSSES_ONE_BY_ONE = 4  # as many as otherwise with those in company, which say nothing there
_PATIENCE = 24  # losses without a verdict, after which suspects are tried one by one


class Window(NamedTuple):
    """Positions of a request, the first and the last, among which a fatal one may be."""

    low: int
    high: int

    def common(self, other: Window) -> Window | None:
        """Positions in both."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Window(low, high) if low <= high else None


class Suspicion:
    """Requests are known by their ids, lengths are in tokens."""

    def __init__(self) -> None:
        self._accused: dict[str, Window] = {}
        self._num_losses: Counter[str] = Counter()  # since it was accused first
        self._reached: dict[str, int] = {}  # farthest that it may have come to at a loss
        self._fruitless = 0  # losses since the last verdict
        self._one_by_one = False  # for as long as there are suspects
        self._groups: list[list[str]] = []  # of suspects; the last one is on trial
        self._alone = False  # nobody else is admitted during this trial
        self._lone_losses = 0  # in a row
        self._canary_lives = False  # it got through instead of the suspect
        self._eighths = 0  # of a loss that others' signals have made up so far

    @property
    def active(self) -> bool:
        """Somebody has not got past yet what it may have come to at a loss."""
        return bool(self._reached)

    @property
    def needs_canary(self) -> bool:
        """Before there is a verdict, a canary has to show that the workers live without it."""
        enough = _LONE_LOSSES_ONE_BY_ONE if self._one_by_one else _LONE_LOSSES
        return self._lone_losses >= enough

    @property
    def trial(self) -> Sequence[str]:
        """Suspects that are admitted to see what happens."""
        return self._groups[-1] if self._groups else ()

    def allows(self, request_id: str) -> bool:
        """The request may be admitted now."""
        if not self._groups:
            return True
        if self.needs_canary:
            return request_id == CANARY
        if self._alone:
            return request_id in self._groups[-1]
        return not any(request_id in group for group in self._groups[:-1])

    def reshapes(self, request_id: str) -> bool:
        """The request is to run in another shape: what it did alone may have been the shape's."""
        return self._alone and self._lone_losses > 0 and request_id in self._groups[-1]

    def num_losses(self, request_id: str) -> int:
        """Losses in which the request was under way, since it was accused first."""
        return self._num_losses[request_id]

    def lost(self, under_way: Mapping[str, Window], weight: int = WHOLE_LOSS) -> None:
        """The workers are lost while these requests were somewhere in these windows.

        `weight` is one of NO_LOSS, OUTSIDE_LOSS and WHOLE_LOSS.
        """
        self._eighths += weight
        if self._eighths < WHOLE_LOSS:
            return
        self._eighths -= WHOLE_LOSS
        if self.needs_canary:
            self._acquit_all()
            return
        rows = {name: window for name, window in under_way.items() if name != CANARY}
        if not rows:
            return
        for name, window in rows.items():
            self._reached[name] = max(self._reached.get(name, 0), window.high)
        self._fruitless += 1
        was_alone = self._alone
        for name, window in rows.items():
            before = self._accused.get(name)
            if before is not None and before.common(window) is None:
                self._acquit(name)  # whatever it was, it was not at one position
        self._lone_losses = self._lone_losses + 1 if was_alone and self._alone else 0
        self._regroup(rows)
        self._alone = bool(self._groups) and len(self._groups[-1]) == 1
        self._num_losses.update(rows.keys())
        for name, window in rows.items():
            self._accused[name] = self._accused.get(name, window).common(window) or window
        if self._fruitless >= _PATIENCE and not self._one_by_one:
            self._separate()

    def _separate(self) -> None:
        """Begin a search in which nobody can hide behind another."""
        self._accused = {name: Window(0, high) for name, high in self._reached.items()}
        self._groups = [[name] for name in self._reached]
        self._one_by_one = self._alone = True
        self._lone_losses = self._fruitless = 0

    def _regroup(self, rows: Mapping[str, Window]) -> None:
        """The new trial is half of those on trial that were under way, or of fresh suspects."""
        held = {name for group in self._groups for name in group}
        fresh = [name for name in rows if name in self._accused and name not in held]
        trial = self._groups.pop() if self._groups else []
        guilty = [name for name in trial if name in rows]
        others = [name for name in trial if name not in rows]
        if not guilty:
            guilty, fresh = fresh, []
        half = (len(guilty) + 1) // 2
        groups = (fresh, others, guilty[half:], guilty[:half])
        self._groups += [group for group in groups if group]

    def applied(self, lengths: Mapping[str, int]) -> str | None:
        """A step was applied; running requests have these committed lengths.

        Returns the request that is found guilty; the caller closes it.
        """
        if self._canary_lives:
            self._fruitless = 0
            return self._groups[-1][0]
        self._reached = {n: high for n, high in self._reached.items() if lengths.get(n, 0) <= high}
        if not self._reached:
            self._fruitless = 0
        past = [n for n, window in self._accused.items() if lengths.get(n, 0) > window.high]
        for name in past:
            self._acquit(name)
        return None

    def canary_lived(self) -> None:
        """A canary has ended well."""
        self._canary_lives = self.needs_canary

    def close(self, request_id: str) -> None:
        """The request has ended."""
        self._reached.pop(request_id, None)
        self._acquit(request_id)

    def _acquit(self, request_id: str) -> None:
        """Nothing is held against it."""
        if self._accused.pop(request_id, None) is None:
            return
        del self._num_losses[request_id]
        trial = self._groups[-1] if self._groups else None
        groups = [[n for n in group if n != request_id] for group in self._groups]
        self._groups = [group for group in groups if group]
        if trial == [request_id]:  # the next group has its turn, in company if that is possible
            self._one_by_one = self._one_by_one and bool(self._groups)
            self._alone, self._lone_losses, self._canary_lives = self._one_by_one, 0, False

    def _acquit_all(self) -> None:
        for books in (self._accused, self._num_losses, self._reached, self._groups):
            books.clear()
        self._fruitless, self._one_by_one = 0, False
        self._alone, self._lone_losses, self._canary_lives = False, 0, False
