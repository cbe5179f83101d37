"""Which tokens of a chunk were drafts that were accepted, for clients that ask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from surestep_proto.generate_pb2 import GenerateChunk

from surestep_gateway.request.protocol import GenerationBody


class Run(NamedTuple):
    """Neighbours among the tokens of a chunk, which become one delta."""

    first: int
    end: int
    drafted: bool | None  # None: nobody has asked
    is_last: bool  # the chunk ends with it


def wants_drafted(body: GenerationBody) -> bool:
    """Whether the client has asked for it."""
    return body.speculative is not None and bool(body.speculative.return_drafted)


def runs(chunk: GenerateChunk) -> Iterator[Run]:
    """The whole chunk, or one run after the other of tokens that are all drafted or all not."""
    end, num_tokens = 0, len(chunk.token_ids)
    for drafted, group in groupby(chunk.drafted):
        first, end = end, end + sum(1 for _ in group)
        yield Run(first, end, drafted, end == num_tokens)
    if not end:
        yield Run(0, num_tokens, None, True)
