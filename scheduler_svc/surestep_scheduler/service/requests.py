"""From the wire to a Request, with every range checked."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
from surestep_common.errors import InvalidRequest
from surestep_common.request_bounds import check_labels, check_name, check_prompt_logprobs
from surestep_common.sampling_ranges import check_sampling, check_vocab
from surestep_proto import sampling_pb2, scheduler_pb2

from surestep_scheduler.core.sequence import Finish, Request
from surestep_scheduler.recovery.poison import CANARY

MOST_PRIORITY = 10  # either way: beyond that a request might as well be the only one
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e3
_LABEL_BYTES = 5  # most of an id on the wire
# Fields that have no meaning where a vector is wanted.
_OF_TOKENS = (
    *("max_tokens", "emitted_ids", "sampling", "num_draft_tokens"),
    *("ignore_eos", "resolved", "want_drafted"),
)


def parse_request(message: scheduler_pb2.GenerateRequest, vocab_size: int) -> Request:
    """Translate a request that leaves nothing open into the core's terms; see `resolve`.

    Raises InvalidRequest or RequestTooLarge naming the parameter.
    """
    if not message.request_id:
        raise InvalidRequest("a request needs an id", param="request_id")
    if message.request_id == CANARY:
        raise InvalidRequest(f"'{CANARY}' is the scheduler's own", param="request_id")
    for name in ("request_id", "cache_owner", "cache_salt", "tenant"):
        check_name(name, getattr(message, name))
    sampling = message.sampling
    check_labels(message.pooling, message.label_ids)
    if message.pooling:
        _check_pooled(message)
        check_vocab("label_ids", message.label_ids, vocab_size)
    else:
        check_sampling(sampling, vocab_size)
        _check_lengths(message)
        check_prompt_logprobs(sampling, len(message.prompt_ids))
    prompt_ids, emitted_ids = _ids(message.prompt_ids), _ids(message.emitted_ids)
    message.prompt_ids.MergeFrom(message.emitted_ids)
    return Request(
        id=message.request_id,
        prompt_ids=prompt_ids,
        emitted_ids=emitted_ids,
        max_tokens=1 if message.pooling else message.max_tokens,
        pooling=message.pooling,
        label_ids=tuple(message.label_ids),
        stop_ids=frozenset(sampling.stop_token_ids),
        priority=max(-MOST_PRIORITY, min(message.priority, MOST_PRIORITY)),
        cache_owner=message.cache_owner,
        cache_salt=message.cache_salt,
        draft_cap=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        has_grammar=sampling.HasField("grammar"),
        want_logprobs=sampling.want_logprobs,
        want_prompt_logprobs=sampling.want_prompt_logprobs,
        want_drafted=message.want_drafted,
        num_top_prompt_logprobs=sampling.num_top_prompt_logprobs,
        tenant=message.tenant,
        weight=_weight(message.tenant_weight),
        sampling=None if message.pooling else sampling,
        passed_bytes=sampling.ByteSize() + _LABEL_BYTES * len(message.label_ids),
        wire_ids=message.prompt_ids,
    )


def _check_pooled(message: scheduler_pb2.GenerateRequest) -> None:
    """Raise InvalidRequest for what has no meaning where a vector is wanted."""
    if message.pooling not in sampling_pb2.Pooling.values():
        raise InvalidRequest(f"pooling {message.pooling} is not known", param="pooling")
    given = {field.name for field, _ in message.ListFields()}
    for name in _OF_TOKENS:
        if name in given:
            raise InvalidRequest(f"{name} has no meaning with pooling", param=name)


def _check_lengths(message: scheduler_pb2.GenerateRequest) -> None:
    least, most = message.sampling.min_tokens, message.max_tokens
    if most < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if least > most:
        raise InvalidRequest(f"min_tokens={least} exceeds max_tokens={most}", param="min_tokens")


def _ids(column: Any) -> array[int]:
    """A column of the message, without a look at each of a million ids."""
    ids = array("I")
    ids.frombytes(np.array(column, dtype=np.uint32).tobytes())
    return ids


def _weight(weight: float) -> float:
    if not weight:
        return 1.0
    if not (_LEAST_WEIGHT <= weight <= _MOST_WEIGHT and math.isfinite(weight)):
        raise InvalidRequest(
            f"tenant_weight is {weight:g}, not in [{_LEAST_WEIGHT:g}, {_MOST_WEIGHT:g}]",
            param="tenant_weight",
        )
    return weight


def ended(request: Request, max_request_len: int) -> Finish | None:
    """Return how a resumed request ended whose last token was delivered, but not its end."""
    emitted = request.emitted_ids
    if emitted and emitted[-1] in request.stop_ids:
        return Finish.STOP
    total = len(request.prompt_ids) + len(emitted)
    if emitted and (len(emitted) >= request.max_tokens or total >= max_request_len):
        return Finish.LENGTH
    return None
