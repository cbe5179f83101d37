"""Settles what a request leaves open, once, when it comes; its first chunk reports the values.

From then on the request is complete: neither another epoch, with workers that may have other
defaults, nor another scheduler, to which the client names what was settled, changes its tokens.
"""

from __future__ import annotations

import secrets

from surestep_common.request_bounds import check_entries
from surestep_common.sampling_defaults import SHAPING
from surestep_proto.sampling_pb2 import SamplingDefaults
from surestep_proto.scheduler_pb2 import GenerateRequest, ResolvedParams
from surestep_proto.worker_pb2 import WorkerInfo


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
