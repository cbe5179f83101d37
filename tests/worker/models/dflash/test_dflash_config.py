"""config.json of DFlash drafters: both published forms, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models.dflash.config import DFlashConfig
from surestep_worker.models.llama.config import LlamaConfig

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 36,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LAYER: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}
ABOUT = {"mask_token_id": 999, "target_layer_ids": [1, 9, 17, 25, 33]}
DRAFTER = LAYER | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": ABOUT,
}
SPECULATOR = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER,
    "aux_hidden_state_layer_ids": [2, 10, 34],
    "mask_token_id": 998,
    "block_size": 8,
    "draft_vocab_size": 500,
}
SLIDES = ["sliding_attention"] * 4 + ["full_attention"]


def parse(
    whole: dict[str, Any], layer_ids: tuple[int, ...] | None = None, **changes: Any
) -> DFlashConfig:
    model = LlamaConfig.parse(ConfigFiles(MODEL, {}))
    return DFlashConfig.parse(ConfigFiles(whole | changes, {}), model, layer_ids)


def test_both_forms() -> None:
    config = parse(DRAFTER)
    assert (config.mask_id, config.block_size, config.draft_vocab_size) == (999, 16, 1000)
    assert config.captured.chosen == (2, 10, 18, 26, 34)
    assert (config.decoder.qk_norm, config.decoder.head_dim) == (True, 32)
    config = parse(SPECULATOR)
    assert (config.mask_id, config.block_size, config.draft_vocab_size) == (998, 8, 500)
    assert config.captured.chosen == (2, 10, 34)


@pytest.mark.parametrize(("count", "chosen"), [(1, (19,)), (2, (2, 34)), (5, (2, 10, 18, 26, 34))])
def test_layers_are_spread_where_none_are_named(count: int, chosen: tuple[int, ...]) -> None:
    about = {"mask_token_id": 999}
    assert parse(DRAFTER, dflash_config=about, num_hidden_layers=count).captured.chosen == chosen


def test_layers_that_are_asked_for_come_first() -> None:
    assert parse(DRAFTER, layer_ids=(5, 6)).captured.chosen == (5, 6)


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, [None] * 5, [False] * 5),
        ({"is_causal": True}, [None] * 5, [True] * 5),
        ({"dflash_config": ABOUT | {"causal": True}}, [None] * 5, [True] * 5),
        ({"is_causal": False, "dflash_config": ABOUT | {"causal": True}}, [None] * 5, [False] * 5),
        ({"layer_types": SLIDES, "sliding_window": 8}, [8] * 4 + [None], [True] * 4 + [False]),
        ({"dflash_config": ABOUT | {"use_swa": True, "swa_window_size": 9}}, [9] * 5, [True] * 5),
        ({"sliding_window": 8}, [None] * 5, [False] * 5),
        (
            {"layer_types": SLIDES, "sliding_window": 8, "sliding_window_non_causal": True},
            *([8] * 4 + [None], [False] * 5),
        ),
        (
            {"layer_types": SLIDES, "sliding_window": 8, "is_causal": False},
            *([8] * 4 + [None], [False] * 5),
        ),
        (
            {"layer_types": SLIDES, "dflash_config": ABOUT | {"sliding_window": 7}},
            *([7] * 4 + [None], [True] * 4 + [False]),
        ),
    ],
)
def test_windows_and_directions(
    changes: dict[str, Any], windows: list[int | None], causal: list[bool]
) -> None:
    config = parse(DRAFTER, **changes)
    decoder = config.decoder
    assert [decoder.window_of(kind) or None for kind in decoder.layer_types] == windows
    assert list(config.causal) == causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not served"),
        ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel is not served"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type dspark is not served"),
        ({"model_type": "llama"}, "layers of llama are not served"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is not served"),
        ({"dflash_config": ABOUT | {"markov_rank": 8}}, "markov_rank is not served"),
        ({"dflash_config": ABOUT | {"selector_top_k": 16}}, "selector_top_k is not served"),
        ({"dflash_config": ABOUT | {"projector_type": "domino"}}, 'projector_type "domino" is not'),
        ({"dflash_config": ABOUT | {"attention_mode": "mla"}}, 'attention_mode "mla" is not'),
        ({"draft_ffn_type": "moe"}, 'draft_ffn_type "moe" is not served'),
        ({"output_multiplier": 0.2}, "output_multiplier is not served"),
        ({"sample_from_anchor": True}, "sample_from_anchor true is not served"),
        ({"dflash_config": ABOUT | {"attention_sink_bias": True}}, "attention_sink_bias true"),
        ({"dflash_config": ABOUT | {"attention_value_scale": 0.5}}, "attention_value_scale 0.5"),
        ({"dflash_config": ABOUT | {"attention_value_scale": "1"}}, 'attention_value_scale "1"'),
        ({"dflash_config": ABOUT | {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"dflash_config": {"mask_token_id": 1000}}, "must be from 0 to 999"),
        ({"dflash_config": {}}, "lacks mask_token_id"),
        ({"block_size": None}, "lacks block_size"),
        ({"num_target_layers": 24}, "for another model than one of 36 layers"),
        ({"hidden_size": 96}, "it reads hidden states of 96 elements, those of the model have 64"),
        ({"hidden_size": 96, "target_hidden_size": 64}, "it is 96 wide, the model 64"),
        ({"vocab_size": 999}, "a vocabulary of 999 tokens, that of the model has 1000"),
        ({"dflash_config": ABOUT | {"target_layer_ids": [9, 1]}}, "out of order: [10, 2]"),
        ({"dflash_config": ABOUT | {"target_layer_ids": [1, 36]}}, "after layers [2, 37]"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(DRAFTER, **changes)
    assert message in refused.value.message
    assert refused.value.param in ("speculative_config", "model")


def test_more_drafts_than_a_block_holds() -> None:
    config = parse(DRAFTER)
    config.check_drafts(15)
    with pytest.raises(InvalidRequest, match="its blocks of 16 hold 15 drafts"):
        config.check_drafts(16)
