"""Defaults of requests where neither they nor the served model say anything."""

from __future__ import annotations

from surestep_proto.sampling_pb2 import SamplingDefaults

# Fields of SamplingParams that a model may have defaults for.
SHAPING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_DIGITS = 6  # that a number keeps on the wire, in single precision


def neutral() -> SamplingDefaults:
    """Return values that leave the model's own distribution alone."""
    return SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Return what people and clients are shown; lengths that are not set are left out."""
    values = {name: round(getattr(defaults, name), _DIGITS) for name in SHAPING}
    lengths = {name: getattr(defaults, name) for name in ("max_tokens", "max_tokens_limit")}
    return values | {name: length for name, length in lengths.items() if length}
