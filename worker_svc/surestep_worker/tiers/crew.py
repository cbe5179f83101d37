"""Threads that a process does not wait for at its end: they may hang with a disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Crew:
    """Threads that do work in the order in which it comes; they are started with the first."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._work = queue.SimpleQueue[Callable[[], None] | None]()
        self._threads = list[threading.Thread]()

    def submit(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Return the future of some work."""
        future = Future[T]()

        def do() -> None:
            try:
                future.set_result(work(*args, **named))
            except BaseException as error:  # noqa: BLE001  # of who waits for it
                future.set_exception(error)

        if len(self._threads) < self._size:
            self._start()
        self._work.put(do)
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self, timeout_s: float) -> None:
        """Return when all work is done, or the time is over."""
        for _ in self._threads:
            self._work.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
