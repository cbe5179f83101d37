from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.published import FILES, PUBLISHED, published_tokenizer
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles, overridden
from surestep_worker.config import WorkerSettings
from surestep_worker.configs.model_config import FULL_ATTENTION as FULL
from surestep_worker.configs.model_config import SLIDING_ATTENTION as SLIDING
from surestep_worker.configs.model_config import resolve_dtype
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.models import FAMILIES, ModelConfig
from surestep_worker.models.deepseek.config import DEEPSEEK_ARCHITECTURES
from surestep_worker.models.gemma.config import GEMMA_ARCHITECTURES
from surestep_worker.models.hybrid.config import HYBRID_ARCHITECTURES
from surestep_worker.models.llama.config import BACKBONES, LLAMA_ARCHITECTURES
from surestep_worker.models.llama.config import LlamaConfig as Config
from surestep_worker.models.moe.config import MOE_ARCHITECTURES
from tokenizers import Tokenizer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
MINISTRAL3: dict[str, Any] = {"architectures": ["Ministral3ForCausalLM"]}
SMOLLM3: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, as gpt-oss has it": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn, its factor of attention given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    },
    "yarn, as DeepSeek has it": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


def read(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return Config.parse(ConfigFiles.read(path))


def test_every_known_architecture_is_registered() -> None:
    dense = {*LLAMA_ARCHITECTURES, *BACKBONES, *GEMMA_ARCHITECTURES, "Phi3ForCausalLM"}
    dense |= {"Olmo2ForCausalLM", "Olmo3ForCausalLM", "GraniteForCausalLM"}
    sparse = {*MOE_ARCHITECTURES, *DEEPSEEK_ARCHITECTURES, "GptOssForCausalLM"}
    assert FAMILIES.keys() == dense | sparse | {*HYBRID_ARCHITECTURES}


def test_fields_and_their_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=...)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert config.rope.theta == 50_000.0
    assert config.eos_token_ids == (2,)
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (False,) * 3
    assert config.max_position == 512
    assert config.layer_types == (FULL, FULL)


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, False),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, True),
    ],
)
def test_traits_with_attention_bias_set(
    tmp_path: Path, architecture: str, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> None:
    config = read(tmp_path, architectures=[architecture], attention_bias=True)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (qkv_bias, o_bias, qk_norm)


def test_eos_of_generation_config_wins(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert read(tmp_path, {"temperature": 0.6}).eos_token_ids == (2,)
    assert read(tmp_path, {"temperature": 0.6}, eos_token_id=...).eos_token_ids == ()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.rotates(1)
def test_the_tokenizers_end_counts_beside_the_others(tmp_path: Path, name: str) -> None:
    """As of a fine-tune whose config.json is that of its base."""
    folder, eos = published_tokenizer(name), PUBLISHED[name].eos
    for file in FILES:
        shutil.copy(folder / file, tmp_path)
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(eos)
    vocabulary: dict[str, Any] = {"vocab_size": PUBLISHED[name].vocab_size}
    assert read(tmp_path, **vocabulary).eos_token_ids == (2, end)
    assert read(tmp_path, {"eos_token_id": [5, end]}, **vocabulary).eos_token_ids == (5, end)
    assert read(tmp_path, {"eos_token_id": 5}, **vocabulary).eos_token_ids == (5, end)
    assert read(tmp_path, {}, vocab_size=end, eos_token_id=...).eos_token_ids == ()


@pytest.mark.parametrize(
    "about",
    [
        {"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"7": {"content": "<e>"}}},
        {"eos_token": "<e>", "added_tokens_decoder": {"x": {"content": "<e>"}}},
        {"eos_token": "<e>", "added_tokens_decoder": [7]},
        {"eos_token": "<e>"},
    ],
)
def test_places_of_the_tokenizers_end(tmp_path: Path, about: dict[str, Any]) -> None:
    added = [3, {}, {"content": "<e>", "id": 7}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert read(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token": 7}', '{"eos_token": "<e>"}'])
def test_a_tokenizer_that_names_no_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<e>", "id": "7"}]}')
    assert read(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "known: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ...}, "names no architecture"),
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"weights \(bitsandbytes\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": -1}}, "mscale is -1"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1}, "rope_theta must be above 1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "1 no_rope_layers for 2 layers"),
        (SMOLLM3 | {"no_rope_layers": [1, 2]}, "no_rope_layers is"),
        (MINISTRAL3, "lacks rope_parameters"),
        (
            MISTRAL | {"sliding_window": None, "layer_types": [SLIDING, FULL]},
            "layers of sliding_attention, without a sliding_window",
        ),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path, **changes)


def test_no_config_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*No such file"):
        Config.parse(ConfigFiles.read(tmp_path))
    for text, message in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidRequest, match=message):
            Config.parse(ConfigFiles.read(tmp_path))


def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path)
    config.check_length(512)
    with pytest.raises(InvalidRequest, match="has 512 positions; use 512 at most"):
        config.check_length(513)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1}
SWITCHED: dict[str, Any] = QWEN2 | {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        (MISTRAL | {"sliding_window": 128}, 128, "SS"),
        (MISTRAL | {"sliding_window": None}, None, "FF"),
        (QWEN2 | {"sliding_window": 128}, None, "FF"),
        (SWITCHED | {"sliding_window": 128}, 128, "FS"),
        (SWITCHED | {"sliding_window": 128, "max_window_layers": 0}, 128, "SS"),
        (SWITCHED | {"sliding_window": 128, "max_window_layers": 28}, 128, "FF"),
        (SWITCHED | {"sliding_window": 7, "layer_types": [SLIDING, FULL]}, 7, "SF"),
        (MISTRAL | {"sliding_window": 7, "layer_types": [SLIDING, FULL]}, 7, "SF"),
        (SMOLLM3 | {"sliding_window": 7, "no_rope_layers": [1, 0]}, None, "FF"),
    ],
)
def test_which_layers_have_a_window(
    tmp_path: Path, changes: dict[str, Any], window: int | None, layers: str
) -> None:
    config = read(tmp_path, **changes)
    assert config.sliding_window == window
    assert config.layer_types == tuple({"F": FULL, "S": SLIDING}[kind] for kind in layers)


@pytest.mark.parametrize(("beta", "positions"), [(0.1, 64), (0.0, 512), (None, 512)])
def test_positions_whose_queries_would_be_scaled_are_not_served(
    tmp_path: Path, beta: float | None, positions: int
) -> None:
    rope = {"rope_type": "yarn", **SCALINGS["yarn"], "llama_4_scaling_beta": beta}
    assert read(tmp_path, **MINISTRAL3, rope_parameters=rope).max_position == positions


@pytest.mark.parametrize(
    ("types", "message"),
    [([FULL], "1 layer_types for 2 layers"), ([FULL, "chunked_attention"], "chunked_attention")],
)
def test_layer_types_that_are_not_served(tmp_path: Path, types: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path, **{**SWITCHED, "sliding_window": 7, "layer_types": types})


@pytest.mark.parametrize(
    ("size", "fits"), [(1, True), (2, True), (4, True), (3, False), (8, False)]
)
def test_ranks_that_divide_the_model(tmp_path: Path, size: int, fits: bool) -> None:
    config = read(tmp_path)
    if fits:
        config.check_ranks(size)
    else:
        with pytest.raises(InvalidRequest, match=f"tensor_parallel_size {size} does not divide"):
            config.check_ranks(size)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "dtype"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("auto", "float16", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("float16", "float32", torch.bfloat16),
    ],
)
def test_dtype(tmp_path: Path, asked: str, checkpoint: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(asked, read(tmp_path, torch_dtype=checkpoint)) is dtype


def test_dtype_that_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown dtype 'float64'; known: float32, bfloat16"):
        resolve_dtype("float64", read(tmp_path))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_table_equals_transformers(tmp_path: Path, kind: str, key: str) -> None:
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    if key == "rope_parameters":
        scaling["rope_theta"] = LLAMA["rope_theta"]
    config = read(tmp_path, **{key: scaling})
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters={"rope_theta": LLAMA["rope_theta"], **scaling},
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(512)[None])
    expected = torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=-1)
    table = rotary_table(config.rope, config.head_dim, 512, "cpu")
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected, rtol=0, atol=5e-5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", **SCALINGS["llama3"]}
WRITTEN = {"rope_theta": 50_000.0, **YARN}


@pytest.mark.parametrize(
    ("file", "overrides", "meant"),
    [
        ({}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({}, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}},
            {"rope_scaling": YARN},
            {"rope_parameters": WRITTEN},
        ),
        (
            {"rope_parameters": WRITTEN},
            {"rope_theta": 9.0},
            {"rope_parameters": WRITTEN | {"rope_theta": 9.0}},
        ),
        ({"rope_scaling": YARN}, {"rope_scaling": None}, {}),
        ({}, {"max_position_embeddings": 99}, {"max_position_embeddings": 99}),
    ],
)
def test_values_in_place_of_the_files(
    tmp_path: Path, file: dict[str, Any], overrides: dict[str, Any], meant: dict[str, Any]
) -> None:
    expected = read(tmp_path, **meant)
    read(tmp_path, **file)
    files = ConfigFiles.read(tmp_path, WorkerSettings(hf_overrides=overrides).replacements)
    assert Config.parse(files) == expected


def test_yarn_stretches_what_the_file_names(tmp_path: Path) -> None:
    """As for Qwen3, whose `max_position_embeddings` stays as it is when YaRN is added."""
    assert read(tmp_path, rope_scaling=YARN).max_position == 2048
    assert read(tmp_path, rope_scaling=YARN, max_position_embeddings=4096).max_position == 4096


def test_values_of_a_wrapped_model(tmp_path: Path) -> None:
    config = {"model_type": "wrapped", "text_config": {"rope_theta": 1.0, "rope_scaling": None}}
    found = overridden(config, {"rope_scaling": YARN, "text_config": {"rope_theta": 2.0}})
    assert found["text_config"] == {"rope_theta": 2.0, "rope_parameters": YARN} | {
        "rope_scaling": None
    }


def test_a_value_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no 'rope_scalling'") as refused:
        overridden(LLAMA, {"rope_scalling": YARN})
    assert refused.value.param == "hf_overrides"
    with pytest.raises(InvalidRequest, match="is no object"):
        overridden(LLAMA, {"rope_scaling": 4})
    embeddings = {"is_matryoshka": True, "matryoshka_dimensions": [8]}  # which the gateway reads
    assert WorkerSettings(hf_overrides=embeddings).replacements.config == {}
    judge = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    named = judge | {"architectures": ["Qwen3ForSequenceClassification"]}  # vLLM's name for it
    assert WorkerSettings(hf_overrides=named).replacements.config == {}
