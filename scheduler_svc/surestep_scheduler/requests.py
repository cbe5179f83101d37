"""From the wire to a Request, with every range checked."""

from __future__ import annotations

from surestep_common.errors import InvalidRequest
from surestep_common.sampling_ranges import check_sampling
from surestep_proto import generate_pb2

from .sequence import CANARY, Finish, Request


def parse_request(message: generate_pb2.GenerateRequest, vocab_size: int) -> Request:
    """The request in the core's terms. Raises InvalidRequest naming the parameter."""
    if not message.request_id:
        raise InvalidRequest("a request needs an id", param="request_id")
    if message.request_id == CANARY:
        raise InvalidRequest(f"'{CANARY}' is the scheduler's own", param="request_id")
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    sampling = message.sampling
    check_sampling(sampling, vocab_size)
    return Request(
        id=message.request_id,
        prompt_ids=list(message.prompt_ids),
        emitted_ids=list(message.emitted_ids),
        max_tokens=message.max_tokens,
        stop_ids=frozenset(sampling.stop_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        draft_cap=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        want_prompt_logprobs=sampling.want_prompt_logprobs,
        sampling=sampling,
    )


def ended(request: Request, max_request_len: int) -> Finish | None:
    """Why nothing is left of a resumed request whose last token was delivered, but not its end."""
    emitted = request.emitted_ids
    if emitted and emitted[-1] in request.stop_ids:
        return Finish.STOP
    total = len(request.prompt_ids) + len(emitted)
    if emitted and (len(emitted) >= request.max_tokens or total >= max_request_len):
        return Finish.LENGTH
    return None
