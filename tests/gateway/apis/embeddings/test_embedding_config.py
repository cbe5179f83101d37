"""How vectors are made: by what the model's folder says, and by what the operator says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.checkpoints.embedders import write_modules
from surestep_common.errors import InvalidRequest
from surestep_common.model_files import OVERRIDES_OF_GATEWAY
from surestep_gateway.apis.embeddings.config import EmbeddingConfig
from surestep_gateway.settings.api_settings import HfOverrides, PoolerConfig
from surestep_gateway.settings.config import GatewaySettings
from surestep_proto.sampling_pb2 import LAST_TOKEN, MEAN


def load(folder: Path, pooler: Any = None, overrides: Any = None) -> EmbeddingConfig:
    return EmbeddingConfig.load(
        folder,
        PoolerConfig.model_validate(pooler or {}),
        HfOverrides.model_validate(overrides or {}),
    )


def test_a_model_that_writes_text_pools_its_last_token(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.pooling, config.normalize, config.is_matryoshka) == (LAST_TOKEN, True, False)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, LAST_TOKEN),
        ({"pooling_mode_mean_tokens": True}, MEAN),
        ({"pooling_mode": "lasttoken"}, LAST_TOKEN),
        ({"pooling_mode": "mean"}, MEAN),
    ],
)
@pytest.mark.parametrize("normalized", [True, False])
def test_the_folder_says(tmp_path: Path, mode: Any, pooling: int, normalized: bool) -> None:
    write_modules(tmp_path, normalized=normalized, **mode)
    config = load(tmp_path)
    assert (config.pooling, config.normalize) == (pooling, normalized)
    other = load(tmp_path, {"seq_pooling_type": "MEAN", "use_activation": not normalized})
    assert (other.pooling, other.normalize) == (MEAN, not normalized)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ({"pooling_mode_cls_token": True}, "1_Pooling/config.json: pooling by cls_token"),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "pooling by lasttoken and mean_tokens",
        ),
        ({}, "pooling by nothing"),
        ({"pooling_mode": "weightedmean"}, "pooling by weightedmean"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, mode: Any, message: str) -> None:
    write_modules(tmp_path, **mode)
    with pytest.raises(InvalidRequest, match=message):
        load(tmp_path)
    assert load(tmp_path, {"pooling_type": "LAST"}).pooling == LAST_TOKEN


def test_other_modules_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Dense"], pooling_mode_lasttoken=True)
    with pytest.raises(InvalidRequest, match="modules of type Dense are not supported"):
        load(tmp_path, {"pooling_type": "LAST"})


@pytest.mark.parametrize(
    "content", ["{", "5", "{}", "[5]", '[{"type": 3}]', '[{"type": "x.Pooling", "path": 1}]']
)
def test_a_broken_list_of_modules_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"modules\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        ({}, 4, "must be 8: the model was not trained"),
        ({"is_matryoshka": True}, 9, "at most 8, got 9"),
        ({"matryoshka_dimensions": [2, 4]}, 3, r"one of \[2, 4, 8\], got 3"),
        ({}, 8, None),
        ({"is_matryoshka": True}, 1, None),
        ({"matryoshka_dimensions": [2, 4]}, 4, None),
        ({"matryoshka_dimensions": [2, 4]}, 8, None),
    ],
)
@pytest.mark.parametrize("overridden", [False, True])
def test_dimensions(
    tmp_path: Path, config: Any, wanted: int, message: str | None, overridden: bool
) -> None:
    if not overridden:
        (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path, overrides=config if overridden else None)
    if message is None:
        loaded.check(wanted, 8)
        return
    with pytest.raises(InvalidRequest, match=message):
        loaded.check(wanted, 8)


def test_default_dimensions_need_a_model_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="trained for them"):
        load(tmp_path, {"dimensions": 4})
    assert load(tmp_path, {"dimensions": 4}, {"is_matryoshka": True}).default_dimensions == 4
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": "many"}')
    with pytest.raises(InvalidRequest, match="matryoshka_dimensions"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"pooler_config": {"pooling_type": "CLS"}}, "pooling_type: Input should be 'LAST'"),
        ({"pooler_config": {"max_embed_len": 1}}, "max_embed_len is not supported; keys are"),
        ({"hf_overrides": {"classifier_from_token": "yes"}}, "classifier_from_token: Input should"),
        ({"hf_overrides": {"is_matryoshka": "yes, please"}}, "is_matryoshka: Input should be"),
    ],
)
def test_unknown_settings_end_the_start(tmp_path: Path, setting: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        GatewaySettings.model_validate(
            {"model": tmp_path, "scheduler_url": ["127.0.0.1:1"]} | setting
        )


@pytest.mark.parametrize(
    ("name", "content", "warning"),
    [
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "'query' is not"),
        ("sentence_bert_config.json", {"max_seq_length": 512}, "max_seq_length 512 is no bound"),
    ],
)
def test_what_sentence_transformers_would_do_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: Any, warning: str
) -> None:
    (tmp_path / name).write_text("{}")
    load(tmp_path)
    assert not caplog.messages
    (tmp_path / name).write_text(json.dumps(content))
    load(tmp_path)
    assert warning in caplog.text


def test_the_workers_leave_these_overrides_to_the_gateway() -> None:
    assert HfOverrides.model_fields.keys() == OVERRIDES_OF_GATEWAY
