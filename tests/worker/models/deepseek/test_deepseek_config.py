"""What the config.json of DeepSeek-V3, V3.2, GLM-5 and GLM-4.5 says, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.deepseek import make_tiny_deepseek
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.store_kv import FP8, INT8
from surestep_kernels.table import REFERENCE
from surestep_worker.cache.kv_cache import LatentWidths
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models import ModelSource, attention_case
from surestep_worker.models.deepseek.config import DeepseekConfig

# As zai-org/GLM-5.1 is published.
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
# Where deepseek-ai/DeepSeek-V3.2 differs.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "eos_token_id": 1,
    "head_dim": ...,
    "hidden_size": 7168,
    "index_n_heads": 64,
    "indexer_rope_interleave": ...,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_interleave": ...,
    "rope_parameters": ...,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def parse(**changes: Any) -> DeepseekConfig:
    raw = {key: value for key, value in (GLM | changes).items() if value is not ...}
    return DeepseekConfig.parse(ConfigFiles(raw, {}))


def test_glm_as_published() -> None:
    config = parse()
    assert config.latent is not None
    assert config.indexer is not None
    assert config.moe is not None
    assert config.latent.scale == 1 / 16
    assert (config.latent.interleaved, config.indexer.interleaved) == (True, True)
    assert all(config.indexer.full)
    assert config.dense_layers == {0, 1, 2}
    assert (config.moe.shared_expert_size, config.rotary_dim) == (2048, 64)
    assert config.latent_widths(79) == (LatentWidths(576, 128),) * 79
    assert config.eos_token_ids == (154820, 154827, 154829)
    config.check_ranks(8, expert_parallel=True)


def test_deepseek_as_published() -> None:
    config = parse(**DEEPSEEK)
    assert config.latent is not None
    assert config.indexer is not None
    assert (config.latent.interleaved, config.indexer.interleaved) == (True, False)
    mscale = 1.3688879454113936  # 0.1 ln 40 + 1
    assert config.latent.scale == pytest.approx(192**-0.5 * mscale**2)
    assert config.rope.yarn is not None
    assert config.rope.yarn.attention_factor == 1.0
    v3 = parse(**DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert v3.indexer is None
    assert v3.latent_widths(2) == (LatentWidths(576, 0),) * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
        {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3},
    ],
)
def test_layers_that_share_a_choice(changes: dict[str, Any]) -> None:
    """As those of GLM-5.2: 0, 1, 2, 6, 10, .. choose; the MTP layer behind the others does too."""
    config = parse(**changes)
    own = [i for i in range(79) if config.has_indexer(i)]
    assert own == [0, 1, *range(2, 78, 4), 78]
    widths = config.latent_widths(79)
    assert [i for i, width in enumerate(widths) if width.index_key] == own


def test_latent_heads_need_not_divide_the_width() -> None:
    """No part of them has the size that the quotient would give."""
    config = parse(head_dim=..., hidden_size=72, num_attention_heads=8, num_key_value_heads=3)
    assert (config.head_dim, config.num_kv_heads) == (64, 8)


def test_glm_4() -> None:
    sizes = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
    config = parse(
        architectures=["Glm4MoeForCausalLM"],
        attention_bias=True,
        partial_rotary_factor=0.5,
        first_k_dense_replace=...,
        use_qk_norm=True,
        **sizes,
    )
    assert config.latent is None
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, True)
    assert (config.rotary_dim, config.dense_layers) == (64, frozenset({0}))
    assert config.latent_widths(46) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias with latent attention is not served"),
        ({"scoring_func": "softmax"}, "not chosen by sigmoid scores"),
        ({"topk_method": "group_limited_greedy"}, "not chosen by sigmoid scores"),
        ({"n_group": 3}, "8 of 256 experts in 1 of 3 groups"),
        ({"n_group": 64}, "8 of 256 experts in 1 of 64 groups"),
        ({"moe_layer_freq": 2}, "moe_layer_freq other than 1"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"indexer_types": ["shared"] * 78}, "indexer_types"),
        ({"index_topk_pattern": "FX" * 39}, "indexer_types"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "indexer_types"),
        ({"q_lora_rank": None}, "an indexer without q_lora_rank"),
        ({"index_head_dim": 32}, "index_head_dim 32 is too small"),
        ({"index_n_heads": 129}, "index_n_heads is 129"),
        ({"kv_lora_rank": 961}, "kv_lora_rank is 961"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_nextn_predict_layers": 2}, "MTP heads of more than one layer"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**changes)


def test_ranks_that_do_not_divide_the_model() -> None:
    with pytest.raises(InvalidRequest, match="3 does not divide 64 heads"):
        parse().check_ranks(3)


def test_what_kernels_are_asked_for(tmp_path: Path) -> None:
    """Latents of any width and for any number of heads, also in FP8; backends do not matter."""
    case = attention_case(ModelSource(make_tiny_deepseek(tmp_path)), "cpu", "auto", 16)
    assert case.latent
    for wanted in (case, replace(case, head_dim=576, group=128), replace(case, cache_dtype=FP8)):
        kernels = load_kernels("cpu", case=wanted)
        assert kernels.latent is not REFERENCE.latent
    with pytest.raises(InvalidRequest, match="needs attention_backend torch"):
        load_kernels("cpu", case=replace(case, head_dim=576, latent=False))
    with pytest.raises(InvalidRequest, match="this model caches latents: auto or fp8"):
        load_kernels("cpu", case=replace(case, cache_dtype=INT8))
