"""Drafting of a rank: the drafter that its settings name, and the draft head that it needs.

A head in a folder of its own that cannot be used costs the drafts, not the start.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache

from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_proto import worker_pb2 as pb

from surestep_worker.checkpoint.held_weights import StaleWeights
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DRAFTERS, DeviceDrafter, DraftContext, Drafter
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.registry import HEADS_APART, HEADS_INSIDE
from surestep_worker.heads import head_folder
from surestep_worker.models import (
    DraftHead,
    DraftSource,
    Model,
    gather_fingerprints,
    load_eagle3,
)

logger = logging.getLogger(__name__)

_NO_FINGERPRINT = " " * 32  # of a head that could not be loaded


def speculation_asked(settings: WorkerSettings) -> SpeculativeConfig | None:
    """Return how this rank is to draft; None if it is not. Raises InvalidRequest."""
    if not settings.speculative_config:
        return None
    config = _parsed(json.dumps(settings.speculative_config))
    return config if config.num_speculative_tokens else None


@cache
def _parsed(text: str) -> SpeculativeConfig:
    """Parse the flag once for all that is built: what a draft model's files say is read once."""
    return SpeculativeConfig.from_json(text)


def speculation_of(settings: WorkerSettings, model: Model) -> SpeculativeConfig | None:
    """Return how this rank drafts with a model; None also if the head that it needs is missing."""
    config = speculation_asked(settings)
    if config is None or config.method not in HEADS_INSIDE | HEADS_APART:
        return config
    return config if model.draft_head is not None else None


def reads_own_head(settings: WorkerSettings) -> bool:
    """Return whether the model is to be loaded with the head in its checkpoint."""
    config = speculation_asked(settings)
    return config is not None and config.method in HEADS_INSIDE


def make_drafter(
    config: SpeculativeConfig | None, context: DraftContext
) -> Drafter | DeviceDrafter | None:
    """Return the drafter of these settings. Raises InvalidRequest."""
    if config is None:
        return None
    if not context.model.has_head:
        message = "the model has no output head: there is nothing to draft"
        raise InvalidRequest(message, param="speculative_config")
    return DRAFTERS.get(config.method)(config, context)


def attach_draft_head(
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
    known: pb.ProfileResult | None = None,
    held: WeightStore | None = None,
) -> str:
    """Load the head that has a folder of its own, if one is asked for, and give it to the model.

    Returns what is wrong with it; then no rank of the group has it, and nothing is drafted. `known`
    is what an earlier rank found out, `held` what one has loaded. Raises InvalidRequest instead
    where a drafter is required.
    """
    if known is not None and known.drafter_fault:  # of a head in the model's checkpoint, too
        model.draft_head = None
        return known.drafter_fault
    config = speculation_asked(settings)
    if config is None or config.method not in HEADS_APART:
        return ""
    assert config.model is not None
    layer_ids = config.eagle_aux_hidden_state_layer_ids
    if known is not None and known.draft_layers:
        layer_ids = tuple(known.draft_layers)
    source = DraftSource(folder=head_folder(config.model), layer_ids=layer_ids, store=held)
    head, fault = _load_alike(source, settings, model, tp, kernels)
    if not fault:
        model.draft_head = head
        return ""
    fault = f"draft model {source.folder}: {fault}"
    if settings.require_drafter:
        raise InvalidRequest(fault, param="speculative_config")
    logger.error("%s; the model is served without speculation", fault)
    return fault


def _load_alike(
    source: DraftSource,
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
) -> tuple[DraftHead | None, str]:
    """Return the head, or what is wrong with it; the ranks agree whether anything is.

    Where they have different ones in memory, all of them look into their folders once more.
    """
    for attempt in (source, replace(source, store=None)):
        head, mine, fault = _load(attempt, settings, model, tp, kernels)
        if set(gather_fingerprints(mine, tp)) == {mine}:
            return head, fault
    return None, fault or "another rank has another one, or could not load it"


def _load(
    source: DraftSource,
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
) -> tuple[DraftHead | None, str, str]:
    """Return the head and its fingerprint, or what is wrong with it."""
    try:
        head, found = load_eagle3(
            source,
            model,
            device=settings.device,
            tp=tp,
            kernels=kernels,
            max_model_len=settings.max_model_len or model.config.max_position,
        )
    except StaleWeights:
        raise
    except InvalidRequest as error:
        return None, _NO_FINGERPRINT, error.message
    except Exception as error:
        logger.exception("loading the draft model failed")
        return None, _NO_FINGERPRINT, repr(error)
    return head, found, ""
