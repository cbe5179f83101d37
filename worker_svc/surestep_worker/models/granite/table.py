"""Granite: where its parameters are, which is where those of Llama are."""

from __future__ import annotations

from surestep_worker.layers.family import Family
from surestep_worker.models.llama.table import ignored, parameter_table

from .config import GraniteConfig

GRANITE = Family(
    architectures=("GraniteForCausalLM",),
    parse=GraniteConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
)
