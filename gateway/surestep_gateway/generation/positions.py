"""Log-probabilities by position, from the columns of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from surestep_proto.sampling_pb2 import LogprobColumns

_FLOOR = -9999.0  # JSON has no infinity
_SLICE_ROWS = 256


class TokenLogprob(NamedTuple):
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


class Position(NamedTuple):
    """Position of the output or of the prompt."""

    chosen: TokenLogprob
    rank: int  # 1 = most likely
    top: list[TokenLogprob]  # most likely first


def positions(columns: LogprobColumns) -> list[Position]:
    """Return the rows of the columns."""
    return [position for part in position_slices(columns) for position in part]


def position_slices(columns: LogprobColumns) -> Iterator[list[Position]]:
    """Yield the rows in lists of a bounded size: the columns of a long prompt are large."""
    at = 0
    for first in range(0, len(columns.token_id), _SLICE_ROWS):
        rows = slice(first, first + _SLICE_ROWS)
        part = []
        for token_id, logprob, rank, num_top in zip(
            *(columns.token_id[rows], columns.logprob[rows], columns.rank[rows]),
            columns.num_top[rows],
            strict=True,
        ):
            ids = columns.top_token_ids[at : at + num_top]
            values = columns.top_logprobs[at : at + num_top]
            top = [TokenLogprob(i, max(v, _FLOOR)) for i, v in zip(ids, values, strict=True)]
            part.append(Position(TokenLogprob(token_id, max(logprob, _FLOOR)), rank, top))
            at += num_top
        yield part
