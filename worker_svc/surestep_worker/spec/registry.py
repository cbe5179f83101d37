"""Drafters, by the name that `--speculative-config` gives as `method`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import Drafter

if TYPE_CHECKING:
    from .config import SpeculativeConfig

DRAFTERS: Registry[Drafter] = Registry("speculative method")  # factories take the SpeculativeConfig


@DRAFTERS.register("ngram")
def _ngram(config: SpeculativeConfig) -> Drafter:
    from .ngram import NgramDrafter

    return NgramDrafter(
        num_drafts=config.num_speculative_tokens,
        max_n=config.prompt_lookup_max,
        min_n=config.prompt_lookup_min,
    )
