"""Which projections of a hybrid's layers are merged when a checkpoint is read."""

from __future__ import annotations

import pytest
from make_shaped_checkpoint import SHAPES
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.gated_delta_net import delta_net_table
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.moe import moe_table
from surestep_worker.models.hybrid.config import HybridConfig

ROUTER, GATE, EXPERTS = "at.gate", "at.shared_expert_gate", 8
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


@pytest.mark.parametrize("quantised", [(), (ROUTER, GATE)], ids=["plain", "quantised"])
def test_the_gate_is_the_last_output_of_the_router(quantised: tuple[str, ...]) -> None:
    table = make_moe_table(quantised)
    assert "shared_gate.weight" not in table
    assert table["router.weight"].shape == (EXPERTS + 1, 2560)
    sources = [source.name for source in table["router.weight"].sources]
    assert sources == [f"{ROUTER}.weight", f"{GATE}.weight"]


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_a_plain_gate_beside_a_quantised_router_is_a_projection_of_its_own(scale: str) -> None:
    table = make_moe_table((ROUTER,), scale)
    assert table["router.weight"].shape == (EXPERTS, 2560)
    assert table["shared_gate.weight"].shape == (1, 2560)


def make_moe_table(
    quantised: tuple[str, ...], scale: str = "weight_scale_inv"
) -> dict[str, Parameter]:
    names = {f"{module}.weight" for module in (ROUTER, GATE)}
    names |= {f"{module}.{scale}" for module in quantised}
    raw = {"architectures": ["Qwen3_5MoeForCausalLM"]} | SHAPES["qwen3.5-4b"].sizes
    raw |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = HybridConfig.parse(ConfigFiles(raw | {"shared_expert_intermediate_size": 64}, {}))
    return moe_table("", "at.", config, Sharding(TensorParallel()), names)
