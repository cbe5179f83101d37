"""Configuration of Granite: a Llama whose embeddings, branches, scores and logits are scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_WIDTH,
    architecture_of,
    read_dtype,
    read_eos_token_ids,
    read_sizes,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import read_rope, rope_parameters
from surestep_worker.models.llama.config import LlamaConfig

_LEAST, _MOST = 1e-6, 1e6  # of factors
_FACTORS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Architecture of a Granite decoder."""

    embedding_multiplier: float

    @classmethod
    def parse(cls, files: ConfigFiles) -> GraniteConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        raw = Fields(files.config).or_else(dict.fromkeys(_FACTORS, 1.0))
        refuse_unserved(raw)
        embedding, attention, residual, logits = (
            raw.number(name, _MOST, least=_LEAST) for name in _FACTORS
        )
        bias, sizes = raw.flag("attention_bias", default=False), read_sizes(raw)
        return cls(
            architecture=architecture_of(files.config),
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, rope_parameters(raw)),
            sliding_window=None,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=raw.flag("mlp_bias", default=False),
            qk_norm=False,
            attention_gate=False,
            attention_scale=attention,
            zero_centred_norms=False,
            branch_scale=residual,
            layer_types=(FULL_ATTENTION,) * sizes["num_layers"],
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=False,
            embedding_multiplier=embedding,
            logits_divisor=logits,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
        )

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings."""
        return self.embedding_multiplier
