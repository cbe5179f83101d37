"""What a hybrid's config.json says, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.hybrid import make_tiny_hybrid
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models.hybrid.config import HybridConfig


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny_hybrid(tmp_path_factory.mktemp("config"), "qwen3_next")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def parse(tmp_path: Path, raw: dict[str, Any], **changes: Any) -> HybridConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    return HybridConfig.parse(ConfigFiles.read(tmp_path))


def test_layers_and_sizes(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = parse(tmp_path, raw)
    assert config.layer_types == (*["linear_attention"] * 3, "full_attention")
    assert (config.rotary_dim, config.head_dim) == (8, 16)
    assert config.delta.channels == 2 * 2 * 8 + 4 * 16
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k) == (6, 2)


def test_layer_types_follow_from_the_interval(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = parse(tmp_path, raw, layer_types=None, full_attention_interval=2)
    assert config.layer_types == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
        ({"num_nextn_predict_layers": 2}, "more than one layer"),
        ({"linear_num_value_heads": 3}, "no multiple of the key heads"),
        ({"linear_conv_kernel_dim": None}, "lacks linear_conv_kernel_dim"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"architectures": ["Qwen4ForCausalLM"]}, "unknown architecture 'Qwen4ForCausalLM'"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    merged = {**raw, "mtp_num_hidden_layers": None, **changes}
    if merged["mtp_num_hidden_layers"] is None:
        del merged["mtp_num_hidden_layers"]
    with pytest.raises(InvalidRequest, match=message):
        parse(tmp_path, merged)


@pytest.mark.parametrize(
    ("size", "whole", "message"),
    [
        (2, False, None),
        (2, True, None),
        (3, False, "does not divide 2 linear key heads, 4 linear value heads, 4 heads"),
        (4, True, "does not divide 2 linear key heads"),
    ],
)
def test_ranks_that_do_not_divide(
    tmp_path: Path, raw: dict[str, Any], size: int, whole: bool, message: str | None
) -> None:
    config = parse(tmp_path, raw)
    if message is None:
        config.check_ranks(size, expert_parallel=whole)
    else:
        with pytest.raises(InvalidRequest, match=message):
            config.check_ranks(size, expert_parallel=whole)


def test_heads_that_the_gate_cannot_take(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Its kernel takes eight elements at once, and would end the process."""
    config = parse(tmp_path, raw, head_dim=4)
    config.check_ranks(2)
    with pytest.raises(InvalidRequest, match="1 heads of 4 elements on each rank"):
        replace(config, num_heads=1, num_kv_heads=1).check_ranks(1)


def test_experts_that_do_not_divide(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = parse(tmp_path, raw)
    with pytest.raises(InvalidRequest, match=r"does not divide .*, 6 experts"):
        config.check_ranks(4, expert_parallel=True)
    with pytest.raises(InvalidRequest, match=r"does not divide .*, 24 columns of an expert"):
        config.check_ranks(5)
