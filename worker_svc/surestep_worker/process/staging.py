"""Weights on their way from a scheduler into the shared memory of a supervisor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from surestep_common.errors import InvalidRequest
from surestep_proto import supervisor_pb2 as pb

from surestep_worker.checkpoint.weight_update import Staged, WeightUpdates, check_room
from surestep_worker.host import shared_memory as memory


async def receive(updates: WeightUpdates, parts: AsyncIterator[pb.WeightPart]) -> pb.StagedWeights:
    """Stage what comes. Raises InvalidRequest for what is not the model's, or does not fit."""
    fd = memory.create("surestep-update")
    try:
        first = await anext(aiter(parts))
        if first.path:
            return _told(await asyncio.to_thread(updates.stage, Path(first.path)))
        await _write(fd, first)
        async for part in parts:
            await _write(fd, part)
        if first.first:
            updates.begin()
        return _told(await asyncio.to_thread(updates.add, os.dup(fd)))
    except StopAsyncIteration:
        raise InvalidRequest("no weights came", param="weights") from None
    finally:
        os.close(fd)


async def _write(fd: int, part: pb.WeightPart) -> None:
    check_room(len(part.data))
    rest = memoryview(part.data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    await asyncio.sleep(0)  # a rank is watched meanwhile


def _told(staged: Staged) -> pb.StagedWeights:
    return pb.StagedWeights(
        num_tensors=staged.num_tensors, nbytes=staged.nbytes, digest=staged.digest
    )
