"""Waiting for the model's folder: whoever fetches it may not be done when the gateway starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_POLLS_PER_WORD = 120  # a minute


async def until_there(folders: Sequence[Path], stopping: asyncio.Event) -> bool:
    """Whether all of them are there; False when it is told to stop before they are.

    A link to nowhere is not there. What is wrong with a folder that is there is for others to say.
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
