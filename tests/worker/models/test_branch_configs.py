"""What the config.json of Gemma, OLMo and Granite says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models import FAMILIES, ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def parse(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    raw = SIZES | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    config: ModelConfig = FAMILIES[architecture].parse(ConfigFiles.read(folder))
    return config


@pytest.mark.parametrize(
    ("architecture", "changes", "sliding"),
    [
        ("GemmaForCausalLM", {}, []),
        ("Gemma2ForCausalLM", {}, [0, 2, 4]),
        ("Gemma3ForCausalLM", {}, [0, 1, 2, 3, 4]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, [0, 1, 3, 4]),
        ("Gemma3ForCausalLM", {"layer_types": [FULL] * 5 + [SLIDING]}, [5]),
        ("Olmo2ForCausalLM", {}, []),
        ("Olmo3ForCausalLM", {}, [0, 1, 2, 4, 5]),
    ],
)
def test_layers_with_a_window(
    tmp_path: Path, architecture: str, changes: dict[str, Any], sliding: list[int]
) -> None:
    config = parse(tmp_path, architecture, **changes)
    assert [i for i, kind in enumerate(config.layer_types) if kind == SLIDING] == sliding
    assert config.sliding_window == (4096 if sliding else None)


def test_ropes_of_files_before_transformers_5(tmp_path: Path) -> None:
    old: dict[str, Any] = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = parse(tmp_path, "Gemma3ForCausalLM", **old)
    assert (config.rope.theta, config.rope.linear_factor) == (5e5, 8.0)
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.linear_factor) == (2e3, 1.0)


def test_what_published_files_of_models_with_images_leave_out(tmp_path: Path) -> None:
    """As that of Gemma 3 with 4 billion parameters."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    config = parse(tmp_path, "Gemma3ForConditionalGeneration", **whole)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position, config.sliding_window) == (262208, 131072, 1024)
    assert config.layer_types == tuple(FULL if i % 6 == 5 else SLIDING for i in range(34))
    assert (config.eos_token_ids, config.checkpoint_dtype) == ((1, 106), "bfloat16")
    assert config.tie_word_embeddings
    assert config.attention_scale == 1 / 16
    assert (config.rope.theta, config.rope.linear_factor) == (1e6, 8.0)


def test_embeddings_are_scaled_as_they_were_in_training(tmp_path: Path) -> None:
    config = parse(tmp_path, "Gemma3ForCausalLM", hidden_size=640)
    assert config.embedding_scale(torch.bfloat16) == 25.25
    assert config.embedding_scale(torch.float32) == pytest.approx(640**0.5)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act silu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation gelu"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "softcapping of Gemma 3"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "both directions"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma3ForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4}}, "must name full_attention"),
        ("Gemma3ForConditionalGeneration", {}, "lacks text_config"),
        ("Olmo2ForCausalLM", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("Olmo3ForCausalLM", {"layer_types": [FULL]}, "1 layer_types for 6 layers"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("GraniteForCausalLM", {"residual_multiplier": "1"}, "residual_multiplier is '1'"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(tmp_path, architecture, **changes)


def test_norms_of_all_heads_are_for_one_rank(tmp_path: Path) -> None:
    config = parse(tmp_path, "Olmo2ForCausalLM")
    config.check_ranks(1)
    with pytest.raises(InvalidRequest, match="normalises all heads of its queries together"):
        config.check_ranks(2)
