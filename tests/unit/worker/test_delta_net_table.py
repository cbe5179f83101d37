"""Which projections of a gated delta layer are merged when a checkpoint is read."""

from __future__ import annotations

import pytest
from make_shaped_checkpoint import SHAPES
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.hybrid import HybridConfig
from surestep_worker.layers.gated_delta_net import delta_net_table
from surestep_worker.layers.linear import Sharding
from surestep_worker.tp import TensorParallel

LARGE, SMALL = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")


def names(*quantised: str) -> set[str]:
    scales = {f"at.{module}.weight_scale_inv" for module in quantised}
    return {f"at.{module}.weight" for module in (*LARGE, *SMALL)} | scales


@pytest.mark.parametrize("quantised", [(), (*LARGE, *SMALL)], ids=["plain", "quantised"])
def test_what_is_kept_in_one_form_is_one_projection(quantised: tuple[str, ...]) -> None:
    """Queries, keys, values and gates, then betas and decays."""
    config = make_config()
    table = delta_net_table("", "at.", config, Sharding(TensorParallel()), names(*quantised))
    assert "ba.weight" not in table
    delta = config.delta
    rows = delta.channels + delta.num_v_heads * (delta.v_dim + 2)
    assert table["qkvz.weight"].shape == (rows, config.hidden_size)
    sources = [source.name for source in table["qkvz.weight"].sources]
    assert sources[-3:] == ["at.in_proj_z.weight", "at.in_proj_b.weight", "at.in_proj_a.weight"]


def test_a_plain_part_beside_a_quantised_one_is_a_projection_of_its_own() -> None:
    config = make_config()
    table = delta_net_table("", "at.", config, Sharding(TensorParallel()), names(*LARGE))
    assert table["ba.weight"].shape == (2 * config.delta.num_v_heads, config.hidden_size)
    names_read = {source.name for source in table["qkvz.weight"].sources}
    assert names_read == {f"at.{module}.weight" for module in LARGE}


def make_config() -> HybridConfig:
    raw = {"architectures": ["Qwen3_5ForCausalLM"]} | SHAPES["qwen3.5-4b"].sizes
    return HybridConfig.parse(ConfigFiles(raw, {}))
