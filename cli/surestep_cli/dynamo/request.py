"""Requests of Dynamo as our own. Nothing here needs Dynamo's packages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from surestep.client.request import Options
from surestep_common.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from surestep_common.request_params import check_entries, sibling_seed
from surestep_proto.sampling_pb2 import Grammar, SamplingDefaults, SamplingParams, TokenSequence
from surestep_proto.vllm_engine_pb2 import SamplingParams as Constraint
from surestep_scheduler.vllm.constraints import grammar_of

Fields = Mapping[str, Any]
_FLOATS = tuple(
    field.name
    for field in SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT
)
# Counted in the output alone, which a frontend that migrates a request makes a prompt of.
_OF_OUTPUT = tuple(n for n in _FLOATS if n.endswith("_penalty") and n != "repetition_penalty")
_REFUSED = {
    "n": "Dynamo's frontend tells one choice alone",
    "best_of": "one answer is made",
    "use_beam_search": "beams are not searched",
    "length_penalty": "beams are not searched",
    "max_thinking_tokens": "reasoning has no budget of its own here",
    "multi_modal_data": "text is served alone",
    "prefill_result": "a prompt is computed where its answer is",
    "encoder_result": "text is served alone",
}
_MOST = (1 << 31) - 1  # tokens that may be asked for
_ONES = ("n", "best_of")
_ENDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_CONSTRAINTS = ("json", "regex", "choice", "grammar")
_TOKENS = "top_k", "logit_bias", "allowed_token_ids", "bad_words_token_ids"
_KNOWN = {
    "sampling_options": {
        *_FLOATS,
        *_TOKENS,
        "seed",
        "guided_decoding",
        "include_stop_str_in_output",
    },
    "stop_conditions": {*_ENDS, "max_tokens", "min_tokens", "ignore_eos", "stop"},
}


class Wanted(NamedTuple):
    """Request of Dynamo in our terms."""

    prompt_ids: list[int]
    sampling: SamplingParams
    options: Options
    held: bool  # its tokens are handed on together, at its end


def wanted(request: Fields, request_id: str, defaults: SamplingDefaults) -> Wanted:
    """Translate a request. Raise InvalidRequest for what is not served.

    Dynamo migrates a request by sending prompt and tokens so far as the prompt of another one with
    the same id. The noise of a token depends on seed, position and token alone, so that the text
    goes on as it would have; a seed that was not given follows from the id, and what is left of
    `min_tokens` is sent. Penalties that count the output and the prompt's log-probabilities do not
    survive that, for nothing says where the prompt ended, and nothing that a worker sends goes to
    the next one: such a request is held, its tokens come at its end, and if it is migrated before
    that it begins anew.
    """
    asked, stop = _part(request, "sampling_options"), _part(request, "stop_conditions")
    asked = {**asked, **_part(_part(request, "extra_args"), "sampling_options")}
    told = _part(request, "output_options")
    for name, why in _REFUSED.items():
        for part in (request, asked, stop, told):
            value = part.get(name)
            if value not in (None, False) and not (name in _ONES and value == 1):
                raise UnsupportedParameter(f"{name}: {why}", param=name)
    for part, known in ((asked, "sampling_options"), (stop, "stop_conditions")):
        for name in part.keys() - _KNOWN[known] - _REFUSED.keys():
            if part[name] not in (None, False):
                raise UnsupportedParameter(f"{known}: {name} is not known here", param=name)
    prompt_ids = list(request.get("token_ids") or ())
    if not prompt_ids:
        raise MissingParameter("the prompt has no tokens", param="token_ids")
    sampling = _sampling(asked, stop, told)
    check_entries(sampling, 1)
    seed = _number(asked, "seed", int)
    sampling.seed = _seed_of(request_id) if seed is None else sibling_seed(seed, 0)
    max_tokens = _number(stop, "max_tokens", int)
    if max_tokens is not None and not 0 < max_tokens <= _MOST:
        raise InvalidRequest(f"max_tokens must be 1 to {_MOST}", param="max_tokens")
    options = Options(
        max_tokens=max_tokens,
        ignore_eos=bool(stop.get("ignore_eos")),
        cache_salt=str(_part(request, "routing").get("cache_salt") or ""),
    )
    counted = [getattr(sampling if asked.get(n) is not None else defaults, n) for n in _OF_OUTPUT]
    held = bool(sampling.bad_words) or any(counted) or sampling.want_prompt_logprobs
    return Wanted(prompt_ids, sampling, options, held)


def _sampling(asked: Fields, stop: Fields, told: Fields) -> SamplingParams:
    top_k = _number(asked, "top_k", int)
    logprobs, of_prompt = (_number(told, name, int) for name in ("logprobs", "prompt_logprobs"))
    ends = {token for name in _ENDS for token in stop.get(name) or ()}
    banned = asked.get("bad_words_token_ids") or ()
    try:
        return SamplingParams(
            **{name: _number(asked, name, float) for name in _FLOATS},
            top_k=None if top_k is None else max(top_k, 0),  # -1 is off, too
            min_tokens=_number(stop, "min_tokens", int) or 0,
            stop_token_ids=sorted(ends),
            logit_bias={int(token): bias for token, bias in _part(asked, "logit_bias").items()},
            allowed_token_ids=asked.get("allowed_token_ids") or (),
            bad_words=[TokenSequence(token_ids=ids) for ids in banned],
            want_logprobs=logprobs is not None,
            num_top_logprobs=logprobs or 0,
            want_prompt_logprobs=of_prompt is not None,
            num_top_prompt_logprobs=of_prompt or 0,
            grammar=_grammar(_part(asked, "guided_decoding")),
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling_options: {error}") from None


def _grammar(guided: Fields) -> Grammar | None:
    """Return the grammar of a constraint; None without one. Raise InvalidRequest."""
    given = {name: value for name, value in guided.items() if value is not None}
    for name in ("backend", "whitespace_pattern"):
        given.pop(name, None)  # how, and not what
    if not given:
        return None
    (name, value), *others = given.items()
    if others or name not in _CONSTRAINTS:
        raise UnsupportedParameter(
            f"guided_decoding: one of {', '.join(_CONSTRAINTS)} is served", param="guided_decoding"
        )
    constraint = Constraint()
    if name == "json":
        constraint.json_schema = value if isinstance(value, str) else json.dumps(value)
    elif name == "choice":
        constraint.choice.choices.extend(value)
    else:
        setattr(constraint, name, value)
    return grammar_of(constraint)


def _part(of: Fields, name: str) -> Fields:
    """Return an object within; an empty one where there is none. Raise InvalidRequest."""
    part = of.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise InvalidRequest(f"{name} must be an object", param=name)
    return part or {}


def _number(of: Fields, name: str, kind: type[int] | type[float]) -> Any:
    value = of.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise InvalidRequest(f"{name} must be a number, got {value!r}", param=name)
    return kind(value)


def _seed_of(request_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")
