"""The whole output of a request, accumulated from its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_proto.scheduler_pb2 import ABORTED, LENGTH, GenerateChunk, RequestEnd, RequestStart

_CUT: Mapping[int, Literal["length", "abort"]] = {LENGTH: "length", ABORTED: "abort"}


@dataclass(slots=True)
class Completion:
    """The output of a request."""

    token_ids: list[int] = field(default_factory=list)
    # Empty while it is not complete; "abort": an operator has ended it.
    finish_reason: Literal["stop", "length", "abort", ""] = ""
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)  # row = index into token_ids
    prompt_logprobs: LogprobColumns = field(default_factory=LogprobColumns)  # row = position
    start: RequestStart = field(default_factory=RequestStart)
    end: RequestEnd = field(default_factory=RequestEnd)  # of the call that ended it

    def add(self, chunk: GenerateChunk) -> None:
        """Append the next chunk."""
        if chunk.HasField("start"):
            self.start.CopyFrom(chunk.start)
            self.prompt_logprobs.CopyFrom(chunk.prompt_logprobs)
        rows = [row + len(self.token_ids) for row in chunk.logprobs.row]
        num_known = len(self.logprobs.row)
        self.logprobs.MergeFrom(chunk.logprobs)
        self.logprobs.row[num_known:] = rows
        self.token_ids += chunk.token_ids
        if chunk.finish_reason:
            self.finish_reason = _CUT.get(chunk.finish_reason, "stop")
            self.end.CopyFrom(chunk.end)
