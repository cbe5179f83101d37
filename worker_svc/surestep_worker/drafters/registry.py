"""Drafters, by the `method` of `--speculative-config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import DeviceDrafter, DraftContext, Drafter

if TYPE_CHECKING:
    from .config import SpeculativeConfig
    from .ngram import NgramDrafter

# Factories take the SpeculativeConfig and the DraftContext.
DRAFTERS: Registry[Drafter | DeviceDrafter] = Registry("speculative method")

HEADS_INSIDE = frozenset({"mtp"})  # methods that use a head in the model's checkpoint
HEADS_APART = frozenset({"eagle3", "dflash", "draft_model"})  # and one in a folder of its own

# vLLM's names for a method.
ALIASES = {
    "[ngram]": "ngram",
    "suffix": "ngram",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
    "ernie_mtp": "mtp",
}


@DRAFTERS.register("ngram")
def _ngram(config: SpeculativeConfig, context: DraftContext) -> Drafter:
    return _lookup(config, context)


def _lookup(config: SpeculativeConfig, context: DraftContext) -> NgramDrafter:
    from .ngram import NgramDrafter

    return NgramDrafter(
        context.kernels.ngram,
        num_drafts=config.num_speculative_tokens,
        max_n=config.prompt_lookup_max,
        min_n=config.prompt_lookup_min,
        recent=context.recent,
    )


@DRAFTERS.register("mtp")
@DRAFTERS.register("eagle3")
@DRAFTERS.register("dflash")
@DRAFTERS.register("draft_model")
def _head(config: SpeculativeConfig, context: DraftContext) -> DeviceDrafter:
    from .block import BlockDrafter
    from .head import HeadDrafter
    from .temperature import DraftTemperature

    temperature = DraftTemperature(context.num_slots, config.draft_temperature)
    lookup = _lookup(config, context) if context.recent is not None else None
    head = context.model.draft_head
    at_once = head is not None and head.block is not None
    return (BlockDrafter if at_once else HeadDrafter)(context, temperature, lookup)
