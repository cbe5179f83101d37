"""Tell which tokens of a chunk were accepted drafts, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from surestep_proto.scheduler_pb2 import GenerateChunk

from surestep_gateway.request.protocol import GenerationBody


class Run(NamedTuple):
    """Neighbouring tokens of a chunk that become one delta."""

    first: int
    end: int
    drafted: bool | None  # None: not requested
    is_last: bool  # the chunk ends with it


def wants_drafted(body: GenerationBody) -> bool:
    """Return whether the request asks for it."""
    return body.speculative is not None and bool(body.speculative.return_drafted)


def runs(chunk: GenerateChunk) -> Iterable[Run]:
    """Return the whole chunk, or its runs of tokens that are all drafted or all not."""
    if not chunk.drafted:
        return (Run(0, len(chunk.token_ids), None, True),)
    return _alike(chunk.drafted)


def _alike(drafted: Sequence[bool]) -> Iterator[Run]:
    end = 0
    for same, group in groupby(drafted):
        first, end = end, end + sum(1 for _ in group)
        yield Run(first, end, same, end == len(drafted))
