"""Attention of transformers' decoders in forms of its own: ALiBi, shared keys, chunks, text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.checkpoints.any_architecture import tiny_config
from support.parity.architectures import compare, saved
from surestep_common.errors import InvalidRequest
from surestep_worker.models import ModelSource
from surestep_worker.models.transformers.attention import ALIBI_POSITIONS, with_positions
from surestep_worker.models.transformers.config import TransformersConfig
from transformers import AutoConfig

_UNSHARED = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1} | {
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def config_of(folder: Path, architecture: str, **values: Any) -> TransformersConfig:
    """Return what is read of a tiny checkpoint's configuration."""
    config = tiny_config(architecture)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    made = ModelSource(folder, implementation="transformers").config
    assert isinstance(made, TransformersConfig)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_behind_the_elements_of_a_key_are_a_bias(dtype: torch.dtype) -> None:
    """Products of bfloat16 are exact in float32, so what is added is right to float32's bits."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 5, 8).to(dtype), torch.randn(1, 3, 5, 8).to(dtype)
    slopes = torch.tensor([2.0**-0.5, 2.0**-3, 2.0**-7.9])
    positions = torch.tensor([0, 1, 255, 256, ALIBI_POSITIONS - 1])
    longer, keys = with_positions(q, k, slopes, positions)
    made = longer.double() @ keys.double().mT
    wanted = q.double() @ k.double().mT + slopes.double()[:, None, None] * positions
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-4)


def test_layers_that_share_keys_have_one_layer_of_the_cache(tmp_path: Path) -> None:
    """Gemma 4's last layers read what earlier ones of their kind keep."""
    config = config_of(tmp_path, "Gemma4ForCausalLM")
    assert [call.reads for call in config.attention] == [0, 1, 0, 1]
    assert [call.window for call in config.keeping] == [8, 0]
    assert config.num_layers == 4


def test_a_module_that_attends_twice_has_two_layers_of_the_cache(tmp_path: Path) -> None:
    config = config_of(tmp_path, "DiffLlamaForCausalLM")
    assert len(config.keeping) == 2 * config.num_layers


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Gemma4ForCausalLM", _UNSHARED | {"attention_k_eq_v": True, "global_head_dim": 32}),
        (
            "Gemma4ForCausalLM",
            _UNSHARED
            | {"enable_moe_block": True, "num_experts": 4}
            | {"top_k_experts": 2, "moe_intermediate_size": 32},
        ),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("FalconForCausalLM", {"multi_query": False}),
        ("BloomForCausalLM", {"n_head": 6, "hidden_size": 96}),  # slopes of no power of two
        ("MptForCausalLM", {"n_heads": 6, "d_model": 96}),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "rope"}),
    ],
)
def test_the_sizes_of_a_family_that_people_have_are_served(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    assert compare(tmp_path, saved(architecture, tmp_path, **fields)) == ""


def test_a_key_of_many_queries_is_kept_more_than_once(tmp_path: Path) -> None:
    """Falcon 7B has 71 queries to a key, of which kernels take 36."""
    many = {"num_attention_heads": 71, "hidden_size": 71 * 8}
    assert compare(tmp_path, saved("FalconForCausalLM", tmp_path, **many)) == ""
    config = ModelSource(tmp_path).config
    assert (config.num_heads, config.num_kv_heads) == (72, 2)


@pytest.mark.parametrize(
    ("architecture", "values", "positions"),
    [
        ("Llama4ForCausalLM", {"attention_chunk_size": 24}, 24),
        ("Llama4ForCausalLM", {"floor_scale": 16}, 15),
        ("Llama4ForCausalLM", {"floor_scale": 16, "attn_temperature_tuning": False}, 64),
        ("BloomForCausalLM", {}, 2048),
        ("MptForCausalLM", {"max_seq_len": 1 << 20}, ALIBI_POSITIONS),
    ],
)
def test_sequences_end_where_attention_would_change(
    tmp_path: Path, architecture: str, values: dict[str, Any], positions: int
) -> None:
    config = config_of(tmp_path, architecture, **values)
    assert config.max_position == positions
    with pytest.raises(InvalidRequest, match=f"the model has {positions} positions"):
        config.check_length(positions + 1)


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        ("Mistral3ForConditionalGeneration", "MistralForCausalLM"),
        ("LlavaForConditionalGeneration", "LlamaForCausalLM"),
    ],
)
def test_the_text_of_a_model_that_sees_is_served(
    tmp_path: Path, architecture: str, text: str
) -> None:
    kind = getattr(transformers, architecture)
    config = kind.config_class(text_config=tiny_config(text).to_dict(), vision_config=_tower(kind))
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path)
    # The whole of Llama 4 fails without an image.
    theirs = model.language_model if text == "Llama4ForCausalLM" else model
    assert compare(tmp_path, theirs) == ""


def _tower(kind: Any) -> dict[str, Any]:
    """Return a tiny tower."""
    tower = kind.config_class.sub_configs["vision_config"]
    if tower is AutoConfig:
        tower = type(kind.config_class().vision_config)
    made: dict[str, Any] = tower(**_TOWER).to_dict()
    return made
