"""The responses that are being written, so that other requests can look at them and end them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from surestep_gateway.generation.event_stream import Interrupted


class Live(Protocol):
    """A response that is being written."""

    def shown(self) -> dict[str, Any]:
        """Return the response as it is now."""

    def stop(self) -> None:
        """Note that it was cancelled."""


class _Writing:
    def __init__(self, task: asyncio.Task[object], live: Live) -> None:
        self.task = task
        self.live = live
        self.interrupted = False
        self.over = asyncio.Event()


class Running:
    """The responses that this gateway is writing, by their keys."""

    def __init__(self) -> None:
        self._writing: dict[str, _Writing] = {}

    @contextlib.contextmanager
    def interruptible(self, key: str, live: Live) -> Iterator[None]:
        """Let `interrupt` end what runs inside. Raise Interrupted if it does."""
        task = asyncio.current_task()
        assert task is not None
        writing = self._writing[key] = _Writing(task, live)
        try:
            yield
        except asyncio.CancelledError:
            if not writing.interrupted:
                raise
            task.uncancel()
            live.stop()
            raise Interrupted("the response was cancelled") from None
        finally:
            del self._writing[key]
            writing.over.set()

    def find(self, key: str) -> Live | None:
        """Return a response that is being written."""
        writing = self._writing.get(key)
        return writing.live if writing is not None else None

    async def interrupt(self, key: str) -> Live | None:
        """End a response, wait until it is over and return it; None if there is none to end."""
        writing = self._writing.get(key)
        if writing is None:
            return None
        if not writing.interrupted:
            writing.interrupted = True
            writing.task.cancel()
        await writing.over.wait()
        return writing.live
