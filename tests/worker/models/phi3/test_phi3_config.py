"""Which rotary tables Phi-3 and Phi-4 have, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.models.phi3.config import Phi3Config
from transformers.models.phi3.configuration_phi3 import Phi3Config as TheirConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}
# As microsoft/Phi-4-mini-instruct is published, but for its divisors.
PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LONGROPE,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}


def parse(**changes: Any) -> Phi3Config:
    raw = {key: value for key, value in (PHI_4_MINI | changes).items() if value is not ...}
    return Phi3Config.parse(ConfigFiles(raw, {}))


def test_the_published_file() -> None:
    config = parse()
    assert (config.head_dim, config.rotary_dim, config.sliding_window) == (128, 96, 262144)
    assert config.rope.longrope is not None
    factor = config.rope.longrope.attention_factor
    assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert parse(sliding_window=None).layer_types == ("full_attention",) * 32


@pytest.mark.parametrize("served", [4096, 4097])
@pytest.mark.parametrize("more", [{}, {"factor": 4.0}, {"factor": 0.5}, {"attention_factor": 0.7}])
def test_the_served_length_chooses_the_divisors(served: int, more: dict[str, Any]) -> None:
    """The table is transformers' for a sequence that fills it, from its first position on."""
    scaling = LONGROPE | more
    table = rotary_table(parse(rope_scaling=scaling).rope, 96, served, "cpu")
    reference = Phi3RotaryEmbedding(TheirConfig(**PHI_4_MINI | {"rope_scaling": {**scaling}}))
    cos, sin = reference(torch.zeros(1), torch.arange(served)[None])
    expected = torch.cat((cos[0, :, :48], sin[0, :, :48]), dim=-1)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-3)
    other = rotary_table(parse(rope_scaling=scaling).rope, 96, 8193 - served, "cpu")
    assert not torch.allclose(table[:4000], other[:4000], atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": LONGROPE | {"type": "yarn", "factor": 2.0}}, "'yarn' of Phi-3"),
        ({"rope_scaling": LONGROPE | {"type": "linear"}}, "'linear' of Phi-3"),
        ({"rope_scaling": {"type": "longrope"}}, "0 short_factor and 0 long_factor for 48"),
        ({"partial_rotary_factor": 1.0}, "48 short_factor and 48 long_factor for 64"),
        ({"rope_scaling": LONGROPE | {"long_factor": [0.0] * 48}}, "numbers above 0"),
        ({"partial_rotary_factor": 0.01}, "1 of 128 elements of a head cannot be rotated"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**changes)
