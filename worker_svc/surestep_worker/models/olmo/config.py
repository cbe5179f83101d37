"""Configuration of OLMo 2 and 3: norms behind attention and MLP alone."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
    read_dtype,
    read_eos_token_ids,
    read_layer_types,
    read_sizes,
    read_window,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import read_layer_ropes, read_rope, rope_parameters

OLMO2, OLMO3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM"
_PERIOD = 4  # layers, of which the last has no window
_THETA = 5e5  # of OLMo 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(ModelConfig):
    """Architecture of an OLMo decoder."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> OlmoConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture, raw = architecture_of(files.config), Fields(files.config)
        raw = raw.or_else({"sliding_window": 4096})  # as transformers' class has it
        refuse_unserved(raw)
        bias, sizes = raw.flag("attention_bias", default=False), read_sizes(raw)
        layer_types, ropes = (FULL_ATTENTION,) * sizes["num_layers"], None
        if architecture == OLMO3:
            layer_types = _layer_types(raw, sizes["num_layers"])
            ropes = read_layer_ropes(raw, theta=_THETA, local_theta=_THETA)
        return cls(
            architecture=architecture,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=ropes[0] if ropes else read_rope(raw, rope_parameters(raw)),
            local_rope=ropes[1] if ropes else None,
            sliding_window=read_window(raw, layer_types),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=False,
            qk_norm=True,
            joint_qk_norm=True,
            attention_gate=False,
            zero_centred_norms=False,
            branch_norms=True,
            layer_types=layer_types,
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=False,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
        )

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest for several ranks, among which no norm of all heads is shared."""
        if size > 1:
            raise InvalidRequest(
                f"tensor_parallel_size {size}: {self.architecture} normalises all heads of its"
                " queries together, which is served on one rank",
                param="tensor_parallel_size",
            )


def _layer_types(raw: Fields, num_layers: int) -> tuple[str, ...]:
    kinds = (FULL_ATTENTION, SLIDING_ATTENTION)
    return read_layer_types(raw, [kinds[(i + 1) % _PERIOD > 0] for i in range(num_layers)])
