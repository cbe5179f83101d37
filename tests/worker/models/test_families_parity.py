"""Sparse models, Phi-3, SmolLM3 and Ministral give the logits of transformers, however prompts are
cut."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Pair
from surestep_kernels import load_kernels

NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")
WINDOW = 6
LENGTH = 4 * WINDOW + 1
QWEN3_MOE: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
QWEN2_MOE = QWEN3_MOE | {"family": "qwen2_moe", "shared_expert_intermediate_size": 40}
MIXTRAL: dict[str, Any] = {"family": "mixtral", "num_local_experts": 6, "intermediate": 24}
PHI3: dict[str, Any] = {"family": "phi3"}
WIDE_PHI3 = PHI3 | {"hidden": 192, "heads": 2, "kv_heads": 1}  # heads of 96 elements
SMOLLM3: dict[str, Any] = {"family": "smollm3", "layers": 4}
MINISTRAL: dict[str, Any] = {
    "family": "ministral",
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}
SWITCHED: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def longrope(original: int, frequencies: int = 8, **more: Any) -> dict[str, Any]:
    """Phi-3 with divisors that differ; transformers takes the long ones behind `original`."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 8 for i in range(frequencies)],
        "long_factor": [2.0 + i for i in range(frequencies)],
    }
    return {"rope_parameters": rope | more, "original_max_position_embeddings": original}


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe, fused, tied, odd vocabulary": QWEN3_MOE
    | {"fused": True, "tie": True, "vocab": 383, "norm_topk_prob": True},
    "qwen3-moe, some layers dense, wide heads": QWEN3_MOE
    | {
        "layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "head_dim": 80,
        "kv_heads": 1,
    },
    "qwen3-moe, biases, window": QWEN3_MOE | SWITCHED | {"attention_bias": True},
    "qwen2-moe": QWEN2_MOE,
    "qwen2-moe, fused, some windows, no biases": QWEN2_MOE
    | SWITCHED
    | {"fused": True, "layers": 4, "max_window_layers": 2, "qkv_bias": False},
    "mixtral": MIXTRAL,
    "mixtral, fused, window": MIXTRAL | {"fused": True, "sliding_window": WINDOW},
    "mixtral, one expert a token, llama3": MIXTRAL
    | {"num_experts_per_tok": 1, "rope_parameters": LLAMA3, "tie": True},
    "phi3": PHI3,
    "phi3, odd vocabulary, tied, window": PHI3 | {"tie": True, "vocab": 383, "sliding_window": 5},
    "phi3, short divisors": PHI3 | longrope(512, factor=4.0),
    "phi3, long divisors": PHI3 | longrope(8),
    "phi3, long divisors of wide heads in part": WIDE_PHI3
    | longrope(8, 36, partial_rotary_factor=0.75, attention_factor=1.3),
    "phi3, rotated in part": WIDE_PHI3
    | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "smollm3": SMOLLM3,
    "smollm3, windows where nothing rotates": SMOLLM3
    | SWITCHED
    | {"no_rope_layer_interval": 2, "kv_heads": 1, "rope_parameters": YARN},
    "smollm3, untied, biases, other layers": SMOLLM3
    | {"no_rope_layers": [0, 1, 1, 0, 1], "attention_bias": True, "mlp_bias": True},
    "ministral": MINISTRAL,
    "mistral, as ministral": MINISTRAL | {"family": "mistral", "rope_parameters": LINEAR},
    "ministral3": {
        "family": "ministral3",
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
}


@pytest.fixture(
    scope="module",
    params=[
        *((variant, NATIVE) for variant in VARIANTS),
        *((variant, REFERENCE) for variant in ("qwen3-moe", "phi3, long divisors", "smollm3")),
    ],
    ids=lambda param: f"{param[0]}, {param[1].name}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, kernels = request.param
    folder = tmp_path_factory.mktemp("family")
    return Pair(make_tiny_checkpoint(folder, **VARIANTS[variant]), kernels)


@pytest.mark.rotates(3)
def test_every_cut_of_a_prompt(pair: Pair) -> None:
    pair.assert_no_cut_matters(LENGTH, bit=pair.kernels is not REFERENCE)


def test_windows_of_drafts_and_rows_of_a_batch(pair: Pair) -> None:
    pair.assert_windows_leave_no_trace(LENGTH)
    for ids, logits in pair.together():
        pair.assert_near(logits, pair.expected(ids))
