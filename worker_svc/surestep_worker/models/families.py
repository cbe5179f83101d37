"""The families that are served, by architecture: our own, and whatever transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surestep_common.errors import InvalidRequest

from surestep_worker.configs.model_config import lookup
from surestep_worker.layers.family import Family

from .deepseek import DEEPSEEK
from .gemma import GEMMA
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .hybrid import HYBRID
from .llama import LLAMA, MIMO
from .moe import SPARSE
from .olmo import OLMO
from .phi3 import PHI3

FAMILIES: Mapping[str, Family[Any]] = {
    architecture: family
    for family in (LLAMA, MIMO, PHI3, SPARSE, HYBRID, GPT_OSS, DEEPSEEK, GEMMA, OLMO, GRANITE)
    for architecture in family.architectures
}

# Answers to who computes a model. vLLM's names.
AUTO, OWN, THEIRS = "auto", "surestep", "transformers"


def is_theirs(architecture: str, implementation: str = AUTO) -> bool:
    """Return whether transformers' code computes models of an architecture."""
    return implementation == THEIRS or (implementation == AUTO and architecture not in FAMILIES)


def family_of(architecture: str, implementation: str = AUTO) -> Family[Any]:
    """Return the family that serves an architecture, by our own code or by transformers'.

    Raises InvalidRequest for an architecture that the implementation does not know.
    """
    if not is_theirs(architecture, implementation):
        return lookup(architecture, FAMILIES)
    try:
        from .transformers import TRANSFORMERS, WITH_HEADS  # takes seconds to import
    except ImportError as error:  # of what other releases call otherwise
        raise InvalidRequest(
            f"{architecture} needs another release of transformers: {error}", param="architecture"
        ) from error
    return WITH_HEADS if architecture in WITH_HEADS.architectures else TRANSFORMERS
