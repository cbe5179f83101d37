"""Drafters, by the name that `--speculative-config` gives as `method`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import DeviceDrafter, Drafter, Target

if TYPE_CHECKING:
    from .config import SpeculativeConfig

# Factories take the SpeculativeConfig and the Target.
DRAFTERS: Registry[Drafter | DeviceDrafter] = Registry("speculative method")

# Names under which vLLM knows a method.
ALIASES = {
    "[ngram]": "ngram",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
}


@DRAFTERS.register("ngram")
def _ngram(config: SpeculativeConfig, target: Target) -> Drafter:
    from .ngram import NgramDrafter

    return NgramDrafter(
        target.kernels.ngram,
        num_drafts=config.num_speculative_tokens,
        max_n=config.prompt_lookup_max,
        min_n=config.prompt_lookup_min,
    )


@DRAFTERS.register("mtp")
def _mtp(config: SpeculativeConfig, target: Target) -> DeviceDrafter:
    from .mtp import MtpDrafter
    from .temperature import DraftTemperature

    temperature = DraftTemperature(target.slots.num_slots, config.draft_temperature)
    return MtpDrafter(target, temperature)
