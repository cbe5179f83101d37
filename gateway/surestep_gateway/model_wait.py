"""Waiting for the model's folder, whose download may not be finished when the gateway starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_POLLS_PER_WORD = 120  # a minute


async def until_there(folders: Sequence[Path], stopping: asyncio.Event) -> bool:
    """Wait for all folders; return False when stopped before they exist.

    A dangling link does not count as existing. The content of a folder is checked elsewhere.
    """
    polls = 0
    while missing := [folder for folder in folders if not folder.exists()]:
        if polls % _POLLS_PER_WORD == 0:
            logger.warning("waiting for %s, which is not there yet", missing[0])
        polls += 1
        try:
            async with asyncio.timeout(_POLL_S):
                await stopping.wait()
        except TimeoutError:
            continue
        return False
    if polls:
        logger.info("%s is there", folders[0])
    return True
