"""From the wire to a Request: every range is checked, and everything is settled that was left open.

What is settled is reported by the first chunk. From then on the request is complete: neither
another epoch, with workers that may have other defaults, nor another scheduler, to which the client
names what was settled, changes its tokens.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from surestep_common.access import shown_key
from surestep_common.errors import InvalidRequest, ModelChanged
from surestep_common.request_params import (
    SHAPING,
    check_entries,
    check_labels,
    check_name,
    check_prompt_logprobs,
    check_sampling,
    check_vocab,
)
from surestep_proto import sampling_pb2, scheduler_pb2
from surestep_proto.sampling_pb2 import SamplingDefaults
from surestep_proto.scheduler_pb2 import GenerateRequest, ResolvedParams
from surestep_proto.worker_pb2 import WorkerInfo

from surestep_scheduler.core.poison import CANARY
from surestep_scheduler.core.sequence import Adapter, Finish, Request


class CacheOwners:
    """The owners of requests: clients by their gRPC keys, others as the gateway says."""

    def __init__(self, keys: Sequence[str], *, shared: bool) -> None:
        """`keys` of gRPC clients; `shared`: all requests have one owner."""
        self._keys = [key.encode() for key in keys]
        self._names = [f"grpc {blake2b(key, digest_size=16).hexdigest()}" for key in self._keys]
        self._shared = shared

    def settle(self, request: scheduler_pb2.GenerateRequest, metadata: Any) -> None:
        """Write the owner into a request that came with this metadata, and into its grammar.

        Raises InvalidRequest where a client with a key of its own names another owner.
        """
        index = shown_key(metadata, self._keys)
        if index is not None:
            if request.cache_owner:
                raise InvalidRequest(
                    "cache_owner is for gateways: a key of this scheduler is an owner by itself, "
                    "and cache_salt tells its own clients apart",
                    param="cache_owner",
                )
            request.cache_owner = self._names[index]
        if self._shared:
            request.cache_owner = ""
        if request.sampling.HasField("grammar"):
            request.sampling.grammar.owner = request.cache_owner


def resolve(message: GenerateRequest, model: WorkerInfo, max_request_len: int) -> ResolvedParams:
    """Set every field of `message` that is open, and add the end-of-sequence tokens.

    Values that are given are taken as they are, also wrong ones: see `parse_request`. Raises
    InvalidRequest or RequestTooLarge for more of them than are worth a look.
    """
    check_entries(message.sampling)
    sampling, defaults = message.sampling, model.defaults
    if message.HasField("resolved"):
        _take(message)
    for name in SHAPING:
        if not sampling.HasField(name):
            setattr(sampling, name, getattr(defaults, name))
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    message.max_tokens = _max_tokens(message, defaults, max_request_len)
    if not message.ignore_eos:
        given = set(sampling.stop_token_ids)
        sampling.stop_token_ids.extend(id_ for id_ in model.eos_token_ids if id_ not in given)
    shaping = {name: getattr(sampling, name) for name in SHAPING}
    return ResolvedParams(**shaping, seed=sampling.seed, max_tokens=message.max_tokens)


def settle_adapter(
    message: GenerateRequest, resolved: ResolvedParams | None, adapter: Adapter | None
) -> None:
    """Write into `resolved` what adapter the request has. Raises ModelChanged where it was begun
    with another one."""
    digest = "" if adapter is None else adapter.digest
    if message.HasField("resolved") and message.resolved.adapter_digest != digest:
        raise ModelChanged("the request was begun with another adapter of this name")
    if resolved is not None:
        resolved.adapter_digest = digest


def _take(message: GenerateRequest) -> None:
    """Take the values that the request was begun with elsewhere."""
    resolved, sampling = message.resolved, message.sampling
    for name in (*SHAPING, "seed"):
        setattr(sampling, name, getattr(resolved, name))
    message.max_tokens = resolved.max_tokens


def _max_tokens(message: GenerateRequest, defaults: SamplingDefaults, max_request_len: int) -> int:
    """Return the most tokens to emit.

    The operator's limit is for requests that begin here. What is under way keeps its length, and a
    client that lies about that could as well send its tokens as the prompt of a new request.
    """
    room = max(max_request_len - len(message.prompt_ids), 1)  # prompts too long are refused later
    limits = [room]
    if defaults.max_tokens_limit and not message.emitted_ids:
        limits.append(defaults.max_tokens_limit)
    if message.HasField("max_tokens"):
        limits.append(message.max_tokens)
    elif defaults.max_tokens:
        limits.append(defaults.max_tokens)
    return min(limits)


MOST_PRIORITY = 10  # either way: beyond that a request might as well be the only one
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e3
_LABEL_BYTES = 5  # most of an id on the wire
# Fields that have no meaning where a vector is wanted.
_OF_TOKENS = (
    "max_tokens",
    "emitted_ids",
    "sampling",
    "num_draft_tokens",
    "ignore_eos",
    "resolved",
    "want_drafted",
)


def parse_request(
    message: scheduler_pb2.GenerateRequest, vocab_size: int, adapter: Adapter | None = None
) -> Request:
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
        adapter=adapter,
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
