"""config.json of EAGLE-3 heads: both readings of layer numbers, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models.eagle3.config import Eagle3Config
from surestep_worker.models.llama.config import LlamaConfig

LAYERS = 36
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
HEAD: dict[str, Any] = MODEL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "draft_vocab_size": 320,
}
IDS = "eagle_aux_hidden_state_layer_ids"


def parse(changes: Mapping[str, Any], layer_ids: tuple[int, ...] | None = None) -> Eagle3Config:
    model = LlamaConfig.parse(ConfigFiles(MODEL, {}))
    return Eagle3Config.parse(ConfigFiles(HEAD | dict(changes), {}), model, layer_ids)


@pytest.mark.parametrize(
    ("changes", "chosen", "other"),
    [
        ({}, (2, 18, 33), None),
        ({IDS: [24, 30, 36]}, (24, 30, 36), None),  # layer 37 does not exist
        ({IDS: [2, 18, 33]}, (2, 18, 33), (3, 19, 34)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33), (1, 17, 32)),
        ({"eagle_config": {IDS: [2, 18, 36]}}, (2, 18, 36), None),
        ({"eagle_config": {IDS: [1, 17, 32]}, IDS: [2, 18, 33]}, (2, 18, 33), (3, 19, 34)),
        ({"eagle3_layers_to_capture": [1, 17, 32]}, (2, 18, 33), (1, 17, 32)),
        ({IDS: [33, 2, 18, 0]}, (0, 2, 18, 33), (1, 3, 19, 34)),
    ],
)
def test_layers(
    changes: dict[str, Any], chosen: tuple[int, ...], other: tuple[int, ...] | None
) -> None:
    captured = parse(changes).captured
    assert (captured.chosen, captured.other) == (chosen, other)


def test_layers_that_are_asked_for_come_first() -> None:
    captured = parse({IDS: [2, 18, 33]}, layer_ids=(5, 6)).captured
    assert (captured.chosen, captured.other) == ((5, 6), None)


def test_the_head_has_rotary_embeddings_and_norms_of_its_own() -> None:
    head = parse(
        {"rope_theta": 500_000.0, "norm_before_fc": True, "eagle_config": {"fc_norm": False}}
    )
    assert (head.decoder.rope.theta, head.decoder.rms_norm_eps) == (500_000.0, 1e-5)
    assert (head.norm_before_fc, head.fc_norm, head.norm_before_residual) == (True, False, False)


def test_the_form_of_speculators() -> None:
    layer = {key: value for key, value in HEAD.items() if key != "architectures"}
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | {"model_type": "qwen3", "head_dim": 32},
        "draft_vocab_size": 500,
        "norm_output": True,
        IDS: [2, 18, 33],
    }
    model = LlamaConfig.parse(ConfigFiles(MODEL, {}))
    head = Eagle3Config.parse(ConfigFiles(whole, {}), model)
    assert (head.decoder.qk_norm, head.decoder.head_dim, head.draft_vocab_size) == (True, 32, 500)
    assert (head.norm_before_residual, head.norm_output) == (True, True)
    assert head.captured.chosen == (2, 18, 33)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "it reads hidden states of 96 elements, those of the model have 64"),
        ({"target_hidden_size": 32}, "hidden states of 32 elements"),
        ({"vocab_size": 999}, "a vocabulary of 999 tokens, that of the model has 1000"),
        ({IDS: [2, 40]}, "cannot read a model of 36 layers after layers [2, 40]"),
        ({IDS: [2, 2]}, "after layers [2, 2]"),
        ({IDS: ["2"]}, "must be whole numbers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"parallel_drafting": True}, "lacks mask_token_id"),
        ({"parallel_drafting": True, "ptd_token_id": 1000}, "ptd_token_id is 1000"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step, a head for each"),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, "Eagle3DeepseekV3ForCausalLM"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(changes)
    assert message in refused.value.message
