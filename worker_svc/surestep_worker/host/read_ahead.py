"""Read the next parameter while this one is packed: both take about as long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads parameters in a thread, in the order in which a model is expected to take them."""

    def __init__(self, names: Sequence[str], read: Callable[[str], T], stack: ExitStack) -> None:
        """`read` may be called in two threads at once. `stack` ends the thread."""
        self._read = read
        self._after = dict(pairwise(names))
        self._ahead: tuple[str, Future[T]] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        stack.callback(self._thread.shutdown, cancel_futures=True)

    def get(self, name: str) -> T:
        """Return a parameter, read by now or not, and have the next one read meanwhile.

        Raises what `read` raises.
        """
        ahead, self._ahead = self._ahead, None
        found = ahead[1] if ahead is not None and ahead[0] == name else None
        if ahead is not None and found is None:
            self._after.clear()  # this model takes them in another order: nothing is read twice
        if found is not None:
            found.result()  # so that one more is in memory, and not two
        following = self._after.get(name)
        if following is not None:
            self._ahead = following, self._thread.submit(self._read, following)
        return self._read(name) if found is None else found.result()
