"""Defaults of requests: from generation_config.json and from the operator, as in vLLM.

Without torch: settings are checked here too.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from surestep_common.errors import InvalidRequest
from surestep_common.request_params import (
    LEAST_REPETITION,
    MOST_PENALTY,
    MOST_REPETITION,
    SHAPING,
    neutral,
    shown,
)
from surestep_proto.sampling_pb2 import SamplingDefaults

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import GENERATION_CONFIG

logger = logging.getLogger(__name__)

AUTO, NEUTRAL = "auto", "vllm"  # in place of a folder
_OVERRIDE = "--override-generation-config"
_MOST_TEMPERATURE = 1e6
_MOST_TOKENS = (1 << 31) - 1
_LEAST = 2**-149  # above 0 in float32, in which parameters are sent: one token is left in any case
_LENGTH = "max_new_tokens"
# Of transformers' GenerationConfig; vLLM takes them here and does nothing with them either.
_WITHOUT_EFFECT = frozenset(
    (
        "do_sample",
        "max_length",
        "min_length",
        "min_new_tokens",
        "num_beams",
        "early_stopping",
        "num_return_sequences",
        "length_penalty",
        "diversity_penalty",
        "no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "use_cache",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "stop_strings",
        "transformers_version",
        "attn_temperature_tuning",
        "cache_implementation",
        "max_time",
    )
)


def check_override(override: Mapping[str, Any]) -> None:
    """Raise ValueError for values out of range and for unknown names."""
    known = (*SHAPING, _LENGTH)
    for name in override:
        if name not in known and name not in _WITHOUT_EFFECT:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"{name} is not known; {hint}")
    try:
        _read(Fields(override, _OVERRIDE))
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def sampling_defaults(
    generation: Mapping[str, Any], source: str, override: Mapping[str, Any]
) -> SamplingDefaults:
    """The defaults, which are logged where they are not neutral.

    `generation` is what generation_config.json says, and `source` where that was looked for:
    "auto", the model's folder; "vllm", where what it says does not count; or another folder. What
    the file of another folder, or the `override`, says about the length is a limit too. Raises
    InvalidRequest.
    """
    try:
        named = {} if source == NEUTRAL else generation
        defaults = _read(Fields({**named, **override}, GENERATION_CONFIG))
    except InvalidRequest as error:
        hint = f"{error}; --generation-config {NEUTRAL} leaves it out"
        raise InvalidRequest(hint, param="generation_config") from error
    if source not in (AUTO, NEUTRAL) or override.get(_LENGTH) is not None:
        defaults.max_tokens_limit = defaults.max_tokens
    _log(defaults, override)
    return defaults


def _read(values: Fields) -> SamplingDefaults:
    """Neutral values, but for those that are given. Raises InvalidRequest."""
    defaults = neutral()
    if "temperature" in values:
        defaults.temperature = values.number("temperature", _MOST_TEMPERATURE, least=0)
    if "top_k" in values:
        defaults.top_k = max(0, values.size("top_k", _MOST_TOKENS, least=-1))
    if "top_p" in values:
        defaults.top_p = max(_LEAST, values.number("top_p", 1))
    if "min_p" in values:
        defaults.min_p = values.number("min_p", 1, least=0)
    if "repetition_penalty" in values:
        penalty = values.number("repetition_penalty", MOST_REPETITION, least=LEAST_REPETITION)
        defaults.repetition_penalty = penalty
    for name in ("presence_penalty", "frequency_penalty"):
        if name in values:
            penalty = values.number(name, MOST_PENALTY, least=-MOST_PENALTY)
            setattr(defaults, name, penalty)
    if _LENGTH in values:
        defaults.max_tokens = values.size(_LENGTH, _MOST_TOKENS)
    return defaults


def _log(defaults: SamplingDefaults, override: Mapping[str, Any]) -> None:
    idle = sorted(override.keys() & _WITHOUT_EFFECT)
    if idle:
        logger.warning("%s: %s: without effect", _OVERRIDE, ", ".join(idle))
    plain = shown(neutral())
    changed = {name: value for name, value in shown(defaults).items() if value != plain.get(name)}
    if changed:
        logger.info(
            "default sampling parameters: %s, from %s; --generation-config %s leaves the file out",
            changed,
            f"{GENERATION_CONFIG} and {_OVERRIDE}" if override else GENERATION_CONFIG,
            NEUTRAL,
        )
