"""Drafting of a rank: as its settings say, or as the model suggests, and what drafts for it.

Without a word about it, a rank drafts with the head in the model's checkpoint, or one on this
machine that was made for the model, or looks up what repeats itself. A head or a draft model in a
folder of its own that cannot be used costs the drafts, not the start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import ValidationError
from surestep_common.errors import InvalidRequest
from surestep_common.model_files import name_of
from surestep_kernels import KernelSet
from surestep_proto import worker_pb2 as pb

from surestep_worker.checkpoint.held_weights import StaleWeights
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.config import WorkerSettings
from surestep_worker.configs.model_config import lookup
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DRAFTERS, DeviceDrafter, DraftContext, Drafter
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.detect import filled_in
from surestep_worker.drafters.registry import HEADS_APART, HEADS_INSIDE
from surestep_worker.heads import head_folder
from surestep_worker.heads.search import heads_for
from surestep_worker.models import (
    HEAD_KINDS,
    LOADERS,
    DraftHead,
    DraftRank,
    DraftSource,
    Load,
    Model,
    ModelSource,
    gather_fingerprints,
)

from .choose_kernels import check_attention

logger = logging.getLogger(__name__)

_NO_FINGERPRINT = " " * 32  # of a head that could not be loaded
_MATCHES: Mapping[str, Any] = {"prompt_lookup_min": 2, "prompt_lookup_max": 32}  # tokens
_LOOKUPS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, **_MATCHES)
_OWN_HEAD = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
# Of a head in a folder of its own; what it says itself counts before this.
_HEAD_DRAFTS = {"method": "eagle3", "num_speculative_tokens": 4, **_MATCHES}


class Speculation(NamedTuple):
    """Configuration of a rank's drafts."""

    config: SpeculativeConfig | None = None  # None: nothing is drafted
    because: str = ""  # why it was chosen; empty: it was asked for

    @property
    def method(self) -> str:
        """Name of the drafter; empty without one."""
        return self.config.method if self.config is not None else ""

    @property
    def max_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return self.config.num_speculative_tokens if self.config is not None else 0

    @property
    def text(self) -> str:
        """JSON of the configuration; empty without one."""
        return self.config.model_dump_json(exclude_unset=True) if self.config is not None else ""

    @property
    def looks_up(self) -> bool:
        """Return whether texts that repeat themselves are looked up, alone or before a head."""
        config = self.config
        if config is None or config.method not in HEADS_INSIDE | HEADS_APART:
            return self.method == "ngram"
        return config.looks_up

    @property
    def uses_own_head(self) -> bool:
        """Return whether the model is to be loaded with the head in its checkpoint."""
        return self.method in HEADS_INSIDE

    def of(self, model: Model) -> Speculation:
        """Return how a loaded model drafts, which may lack the head for this: then it does not if
        that was asked for, and looks up if it was chosen."""
        if self.because and not model.has_head:
            return Speculation()
        if self.method not in HEADS_INSIDE | HEADS_APART or model.draft_head is not None:
            return self
        return look_up(f"{self.because}, which cannot be used") if self.because else Speculation()


def look_up(because: str) -> Speculation:
    """Return that what repeats itself is looked up, which every model that writes can."""
    return Speculation(_LOOKUPS, because)


def speculation_asked(settings: WorkerSettings) -> Speculation:
    """Return how this rank is asked to draft; not at all where that is left to it.

    Raises InvalidRequest.
    """
    if not settings.speculative_config:
        return Speculation()
    config = _parsed(json.dumps(settings.speculative_config))
    return Speculation(config if config.num_speculative_tokens else None)


@cache
def _parsed(text: str) -> SpeculativeConfig:
    """Parse the flag once for all that is built: what a draft model's files say is read once."""
    return SpeculativeConfig.from_json(text)


def choose_speculation(
    settings: WorkerSettings,
    source: ModelSource,
    tp: TensorParallel,
    known: pb.ProfileResult | None = None,
) -> Speculation:
    """Return how this rank drafts: as an earlier rank did (`known`), as asked, or as is best.

    Raises InvalidRequest.
    """
    if known is not None:  # what a draft model's files said may be gone by now
        config = _parsed(known.speculative_config) if known.speculative_config else None
        return Speculation(config, known.drafts_because)
    if settings.speculative_config is not None:
        return speculation_asked(settings)
    mine = _best(settings, source)
    fingerprint = hashlib.md5(mine.text.encode(), usedforsecurity=False).hexdigest()
    if set(gather_fingerprints(fingerprint, tp)) != {fingerprint}:
        return look_up("the ranks have different draft heads")
    return mine


def _best(settings: WorkerSettings, source: ModelSource) -> Speculation:
    if source.has_own_head:
        return Speculation(_OWN_HEAD, "the checkpoint has an MTP head")
    for head in heads_for(source.folder, settings.drafters):
        try:
            config = SpeculativeConfig.model_validate(
                _HEAD_DRAFTS | filled_in({"model": str(head)})
            )
            kind = lookup(config.method, HEAD_KINDS, "draft head")
            kind.parse(ConfigFiles.read(head), source.config, None)
        except (InvalidRequest, ValidationError) as error:
            logger.warning("the draft head %s does not fit this model: %s", head, error)
            continue
        return Speculation(config, f"the head {name_of(head)} is for this model")
    return look_up("no draft head for this model is here")


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
    speculation: Speculation,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
    known: pb.ProfileResult | None = None,
    held: WeightStore | None = None,
) -> str:
    """Load the head that has a folder of its own, if there is to be one, and give it to the model.

    Returns what is wrong with one that was asked for. A head that cannot be used is given to no
    rank of the group. `known` is what an earlier rank found out, `held` what one has loaded. Raises
    InvalidRequest instead where a drafter is required.
    """
    if known is not None and known.drafter_fault:  # of a head in the model's checkpoint, too
        model.draft_head = None
        return known.drafter_fault
    config = speculation.config
    if config is None or config.method not in HEADS_APART:
        return ""
    assert config.model is not None
    layer_ids = config.eagle_aux_hidden_state_layer_ids
    if known is not None and known.draft_layers:
        layer_ids = tuple(known.draft_layers)
    source = DraftSource(
        folder=head_folder(config.model),
        model_folder=settings.model,
        layer_ids=layer_ids,
        max_drafts=config.num_speculative_tokens,
        store=held,
        check_attention=partial(check_attention, settings),
    )
    length = settings.max_model_len or model.config.max_position
    rank = DraftRank(settings.device, tp, kernels, length)
    head, fault = _load_alike(LOADERS[config.method], source, model, rank)
    if not fault:
        model.draft_head = head
        return ""
    fault = f"draft model {source.folder}: {fault}"
    if settings.require_drafter:
        raise InvalidRequest(fault, param="speculative_config")
    if speculation.because:
        logger.warning("%s; what repeats itself is looked up instead", fault)
        return ""
    logger.error("%s; the model is served without speculation", fault)
    return fault


def _load_alike(
    load: Load, source: DraftSource, model: Model, rank: DraftRank
) -> tuple[DraftHead | None, str]:
    """Return the head, or what is wrong with it; the ranks agree whether anything is.

    Where they have different ones in memory, all of them look into their folders once more.
    """
    for attempt in (source, replace(source, store=None)):
        head, mine, fault = _load(load, attempt, model, rank)
        if set(gather_fingerprints(mine, rank.tp)) == {mine}:
            return head, fault
    return None, fault or "another rank has another one, or could not load it"


def _load(
    load: Load, source: DraftSource, model: Model, rank: DraftRank
) -> tuple[DraftHead | None, str, str]:
    """Return the head and its fingerprint, or what is wrong with it."""
    try:
        head, found = load(source, model, rank)
    except StaleWeights:
        raise
    except InvalidRequest as error:
        return None, _NO_FINGERPRINT, error.message
    except Exception as error:
        logger.exception("loading the draft model failed")
        return None, _NO_FINGERPRINT, repr(error)
    return head, found, ""
