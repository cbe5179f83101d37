"""The families that are served, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surestep_worker.layers.family import Family

from .deepseek import DEEPSEEK
from .gpt_oss import GPT_OSS
from .hybrid import HYBRID
from .llama import LLAMA

FAMILIES: Mapping[str, Family[Any]] = {
    architecture: family
    for family in (LLAMA, HYBRID, GPT_OSS, DEEPSEEK)
    for architecture in family.architectures
}
