"""What the config.json of gpt-oss says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from surestep_common.errors import InvalidRequest
from surestep_kernels.paged_attention.backends import choose_attention
from surestep_worker.checkpoint.formats import Mxfp4Blocks
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.models import ModelSource, attention_case
from surestep_worker.models.gpt_oss.config import GptOssConfig

# As openai/gpt-oss-120b is published.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> GptOssConfig:
    raw = {key: value for key, value in (PUBLISHED | changes).items() if value is not ...}
    return GptOssConfig.parse(ConfigFiles(raw, generation or {}))


def test_the_published_file() -> None:
    config = parse({"eos_token_id": [200002, 199999, 200012]})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (64, 8, 64)
    assert (config.num_local_experts, config.num_experts_per_tok) == (128, 4)
    assert (config.qkv_bias, config.o_bias, config.attention_sinks) == (True, True, True)
    assert (config.sliding_window, config.swiglu_limit) == (128, 7.0)
    assert config.layer_types[:2] == ("sliding_attention", "full_attention")
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert isinstance(config.quantization, Mxfp4Blocks)


def test_rotary_frequencies_of_the_published_file() -> None:
    """Those faster than the 9th are kept, those slower than the 17th divided by 32."""
    table = rotary_table(parse().rope, 64, 2, "cpu")
    attention_factor = 1.3465735902799727  # 0.1 ln 32 + 1
    angles = torch.atan2(table[1, 32:], table[1, :32])
    plain = 150000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert torch.allclose(table[0, :32], torch.full((32,), attention_factor))
    assert torch.allclose(angles[:9], plain[:9], rtol=1e-5)
    assert torch.allclose(angles[18:], plain[18:] / 32, rtol=1e-4)
    ramp = (12 - 8.0927776) / (17.3980225 - 8.0927776)
    assert torch.allclose(angles[12], plain[12] * (1 - ramp + ramp / 32), rtol=1e-5)


def test_layers_take_turns_unless_the_file_says_otherwise() -> None:
    assert parse(layer_types=...).layer_types == ("sliding_attention", "full_attention") * 18
    whole = parse(layer_types=["full_attention"] * 36, sliding_window=...)
    assert whole.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": ...}, "lacks rope_scaling"),
        ({"rope_theta": ...}, "lacks rope_theta"),
        ({"sliding_window": ...}, "lacks sliding_window"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 36 layers"),
        (
            {"num_local_experts": 1 << 12, "num_hidden_layers": 100, "layer_types": ...},
            "in all are the most",
        ),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"quantization_config": {"quant_method": "quark"}}, r"weights \(quark\)"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("ranks", "expert_parallel", "fits"),
    [(8, False, True), (8, True, True), (64, False, True), (3, False, False), (5, True, False)],
)
def test_ranks_that_divide_the_model(ranks: int, expert_parallel: bool, fits: bool) -> None:
    """Heads evenly, the 90 blocks of an expert's columns as evenly as they go."""
    if fits:
        parse().check_ranks(ranks, expert_parallel=expert_parallel)
    else:
        with pytest.raises(InvalidRequest, match=f"tensor_parallel_size {ranks} does not divide"):
            parse().check_ranks(ranks, expert_parallel=expert_parallel)


def test_attention_backends_are_asked_for_windows_and_sinks(tmp_path: Path) -> None:
    case = attention_case(ModelSource(make_tiny_gpt_oss(tmp_path)), "cpu", "auto", 16)
    assert (case.window, case.sinks, case.group, case.head_dim) == (True, True, 2, 16)
    with pytest.raises(InvalidRequest, match="no torch_varlen: it needs a CUDA device"):
        choose_attention("torch_varlen", case)


def test_a_file_of_transformers_5(tmp_path: Path) -> None:
    raw = json.loads((make_tiny_gpt_oss(tmp_path) / "config.json").read_text())
    assert "rope_parameters" in raw
    config = GptOssConfig.parse(ConfigFiles(raw, {}))
    assert config.rope.yarn is not None
    assert not config.rope.yarn.truncate
    assert config.rope.theta == 10_000.0
