from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.adapters import make_adapter
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest, ModelNotFound
from surestep_worker.adapters.folder import CONFIG, TENSORS, read_folder

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(model, tmp_path / "adapter", rank=4, alpha=6)


def rewrite(adapter: Path, **changes: Any) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def digest(adapter: Path) -> str:
    found = read_folder(adapter)
    return found.digest(found.read().data)


def test_what_peft_has_written_is_read(adapter: Path) -> None:
    found = read_folder(adapter)
    assert len(found.modules) == 7
    assert found.modules[Q].a.shape == (4, 64)
    assert found.scaling.of(Q, 4) == 6 / 4
    assert digest(adapter) == digest(adapter)


def test_ranks_and_factors_of_single_modules(model: Path, tmp_path: Path) -> None:
    patterns: Any = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*\.q_proj": 10}}
    adapter = make_adapter(model, tmp_path / "a", rank=4, alpha=6, use_rslora=True, **patterns)
    modules, scaling, _ = read_folder(adapter)
    assert modules[Q].a.shape[0] == 2
    assert scaling.of(Q, 2) == 10 / math.sqrt(2)
    assert scaling.of("model.layers.0.mlp.up_proj", 4) == 6 / math.sqrt(4)


def test_the_digest_is_of_numbers_and_factors(adapter: Path) -> None:
    before = digest(adapter)
    rewrite(adapter, lora_alpha=7)
    other = digest(adapter)
    tensors = load_file(adapter / TENSORS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, adapter / TENSORS)
    assert len({before, other, digest(adapter)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alpha_pattern": {"(a+)+": 3}}, "no expressions"),
        ({"alpha_pattern": [3]}, "no expressions"),
        ({"alpha_pattern": {"q_proj": "x"}}, "q_proj"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"of_next_year": {"x": 1}}, "of_next_year"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    adapter: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(adapter, **changes)
    with pytest.raises(InvalidRequest, match=message):
        read_folder(adapter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "lora_only"}, "bias = lora_only"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"targets": ["embed_tokens"]}, "not served: .*embed_tokens.lora_embedding_A"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"init_lora_weights": "olora"}, "changes the model's own weights"),
    ],
)
def test_what_peft_makes_and_is_not_served_is_refused_by_name(
    model: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", **config)
    with pytest.raises(InvalidRequest, match=message):
        read_folder(adapter)


def test_tensors_that_are_no_halves_are_refused_by_name(adapter: Path) -> None:
    path = adapter / TENSORS
    whole = load_file(path)
    first = next(iter(whole))
    for changes in (
        {"base_model.model.lm_head.weight": torch.zeros(2, 2)},
        {f"base_model.model.{Q}.lora_magnitude_vector": torch.zeros(2)},
        {first: torch.zeros(2, 2, dtype=torch.int8)},
        {first: torch.zeros(3, whole[first].shape[1])},
        {first: whole[first][:0], first.replace("lora_A", "lora_B"): torch.zeros(64, 0)},
    ):
        save_file(whole | changes, path)
        with pytest.raises(InvalidRequest, match="not served: "):
            read_folder(adapter)
    save_file({name: whole[name] for name in whole if name != first}, path)
    with pytest.raises(InvalidRequest, match="not served: "):
        read_folder(adapter)


def test_a_file_that_ends_before_it_is_read_is_refused(adapter: Path) -> None:
    found = read_folder(adapter)
    os.truncate(adapter / TENSORS, 500)
    with pytest.raises(InvalidRequest, match="was cut off"):
        found.read()
    (adapter / TENSORS).unlink()
    with pytest.raises(InvalidRequest, match="No such file"):
        found.read()


def test_files_that_cannot_be_read_are_refused(adapter: Path) -> None:
    with pytest.raises(InvalidRequest, match="no absolute path"):
        read_folder(Path("adapter"))
    (adapter / CONFIG).write_text("[1]")
    with pytest.raises(InvalidRequest, match="no JSON object"):
        read_folder(adapter)
    (adapter / CONFIG).unlink()
    with pytest.raises(ModelNotFound, match="No such file"):
        read_folder(adapter)
    os.mkfifo(adapter / CONFIG)
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_folder(adapter)
