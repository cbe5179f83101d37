"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.1


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel `task` until it has ended; its result or error stays in it.

    Once is not enough before Python 3.13: a task group whose child fails in the same moment
    swallows the cancellation of its owner, which then goes on for ever (python/cpython#116720).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
