"""Which tokens of a chunk were accepted drafts, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
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


def runs(chunk: GenerateChunk) -> Iterator[Run]:
    """Yield the whole chunk, or its runs of tokens that are all drafted or all not."""
    end, num_tokens = 0, len(chunk.token_ids)
    if not chunk.drafted:
        yield Run(0, num_tokens, None, True)
        return
    for drafted, group in groupby(chunk.drafted):
        first, end = end, end + sum(1 for _ in group)
        yield Run(first, end, drafted, end == num_tokens)
