"""Streams of messages to several services at once, beside rpc, which every service imports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Sequence
from typing import Any

import grpc

from .rpc import translate_errors

_BROKEN = grpc.aio.AioRpcError, asyncio.InvalidStateError


async def send_to_all(calls: Sequence[Any], messages: AsyncIterable[Any]) -> list[Any]:
    """Send messages by all `calls`, which take streams; return the answer of each.

    Raises a SurestepError unless all answer, at the end: until then the others are not kept waiting
    for what is wrong with one. Whatever `messages` raises ends all calls.
    """
    try:
        with translate_errors():
            async for message in messages:
                for call in calls:
                    with contextlib.suppress(*_BROKEN):
                        await call.write(message)
            for call in calls:
                with contextlib.suppress(*_BROKEN):
                    await call.done_writing()
            return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
