"""Request across as many calls as it takes. Without I/O: both clients drive it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, TypedDict

from surestep_common.errors import (
    ConnectionLost,
    DeadlineExceeded,
    QueueFull,
    SurestepError,
    Unavailable,
)
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Options(TypedDict, total=False):
    """Optional fields of a request besides prompt and sampling parameters; see GenerateRequest."""

    max_tokens: int | None  # None = the model's default, else what fits
    ignore_eos: bool
    num_draft_tokens: int | None  # most drafts per step; None = the server decides, 0 = none
    priority: int
    cache_salt: str
    tenant: str
    tenant_weight: float
    request_id: str  # for the server's log; drawn if not given
    model_fingerprint: str  # of the model that is wanted, as SchedulerInfo has it; "" = any
    timeout_s: float | None  # for the whole request; None = none


class ResumableRequest:
    """Decides what to send next, and for how long to retry.

    Times are in seconds on one clock, which only goes forward.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None,
        options: Options,
        *,
        retry_for_s: float,
        now: float,
    ) -> None:
        """Unavailability is bridged for `retry_for_s` from the last token."""
        fields: dict[str, Any] = {"request_id": f"client-{uuid.uuid4().hex}", **options}
        timeout_s = fields.pop("timeout_s", None)
        self._request = GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, **fields)
        self._name = self._request.request_id
        self._deadline = now + timeout_s if timeout_s is not None else None
        self._retry_for_s = retry_for_s
        self._last_token = now
        self._num_calls = 0
        self._num_failures = 0  # in a row, without a token
        self._started = False
        self.num_resumes = 0  # calls that went on from tokens

    def next_call(self, now: float) -> tuple[GenerateRequest, float | None]:
        """Return message and time limit of the next call. Raise DeadlineExceeded."""
        timeout_s = None if self._deadline is None else self._deadline - now
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceeded("the request did not finish in time")
        if self._num_calls:  # the server may not have noticed yet that the last one is gone
            self._request.request_id = f"{self._name}.{self._num_calls}"
        self._num_calls += 1
        self.num_resumes += self._started
        return self._request, timeout_s

    def record(self, chunk: GenerateChunk, now: float) -> GenerateChunk:
        """Record a chunk and return it without what an earlier call has delivered already."""
        request = self._request
        if chunk.HasField("start"):
            if self._started:
                chunk.ClearField("start")
                chunk.ClearField("prompt_logprobs")
            else:
                self._started = True
                request.model_fingerprint = chunk.start.model_fingerprint
                if chunk.start.HasField("resolved"):
                    request.resolved.CopyFrom(chunk.start.resolved)
                request.sampling.want_prompt_logprobs = False
        if chunk.token_ids:
            request.emitted_ids.extend(chunk.token_ids)
            self._last_token, self._num_failures = now, 0
        return chunk

    def pause_s(self, error: SurestepError, now: float) -> float:
        """Return the pause before the next call. Raise the error when there must be none."""
        full = isinstance(error, QueueFull) and self._started  # others may have come in between
        if not (isinstance(error, Unavailable) or full):
            raise error
        backoff_s = min(_SHORTEST_PAUSE_S * 2.0 ** min(self._num_failures, 30), _LONGEST_PAUSE_S)
        pause_s: float = max(backoff_s, error.retry_after or 0.0)
        self._num_failures += 1
        limits = [self._last_token + self._retry_for_s]
        limits += [self._deadline] if self._deadline is not None else []
        if now + pause_s > min(limits):
            raise error
        return pause_s

    def check_ended(self, chunk: GenerateChunk | None) -> None:
        """Check the end of a call. Raise ConnectionLost when it was not the request's."""
        if chunk is None or not chunk.finish_reason:
            raise ConnectionLost("the server ended the stream early")
