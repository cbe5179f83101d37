"""Scales of keys and values that a checkpoint keeps beside its layers, for pages in FP8."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import torch
from surestep_common.errors import InvalidRequest

from .parameters import Parameter, TensorSource
from .prepared import Weights
from .safetensors_header import Entry

logger = logging.getLogger(__name__)

# As vLLM and llm-compressor name them, NVIDIA's ModelOpt, and llm-compressor before.
_NAME = re.compile(
    r"(?:model\.|language_model\.|transformer\.)*layers\.(\d{1,9})\.(?:self_attn|attn|attention)\."
    r"(?:(?:attn\.)?([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))"
)
_BOTH = "kv"


def kv_scale_table(entries: Mapping[str, Entry], num_layers: int) -> dict[str, Parameter]:
    """Return the parameters of the scales that checkpoint tensors hold, one number each."""
    table, others = dict[str, Parameter](), list[str]()
    for name, entry in entries.items():
        found = _NAME.fullmatch(name)
        if found is None or int(found[1]) >= num_layers:
            continue
        if entry.shape not in ((), (1,)):
            others.append(name)
            continue
        source = TensorSource(name, entry.shape, slice(0, 1))
        table.setdefault(_own(int(found[1]), found[2] or found[3]), Parameter((1,), (source,)))
    if others:
        logger.info(
            "%d scales as %s are not used: they are of parts of heads", len(others), others[0]
        )
    return table


def take_kv_scales(
    weights: Weights, layers: Sequence[int], num_layers: int
) -> tuple[tuple[float, float], ...]:
    """Return what keys and values of each of `layers` were divided by; empty if none were.

    Those of all layers are taken, also of such as keep none. Raises InvalidRequest for a scale that
    is not a positive number.
    """
    every = [
        tuple(_take(weights, _own(layer, which)) for which in _BOTH) for layer in range(num_layers)
    ]
    if all(scale is None for both in every for scale in both):
        return ()
    kept = (every[i] if 0 <= i < num_layers else (None, None) for i in layers)
    return tuple((k or 1.0, v or 1.0) for k, v in kept)


def _own(layer: int, which: str) -> str:
    return f"kv_scales.{layer}.{which}"


def _take(weights: Weights, name: str) -> float | None:
    if name not in weights:
        return None
    scale = weights.take(name, torch.float32).item()
    if not 0 < scale < float("inf"):
        raise InvalidRequest(
            f"{name}: the checkpoint has {scale} for it, not a positive number", param="model"
        )
    return scale
