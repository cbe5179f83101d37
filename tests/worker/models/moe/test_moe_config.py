"""Which layers of Qwen's sparse models and Mixtral have experts and windows; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import FULL_ATTENTION as FULL
from surestep_worker.configs.model_config import SLIDING_ATTENTION as SLIDING
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.models.moe.config import RoutedDecoderConfig
from torch import Tensor

# As Qwen/Qwen3-30B-A3B-Instruct-2507 is published.
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = QWEN3 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 4,
    "max_window_layers": 3,
}
MIXTRAL = QWEN3 | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
WINDOW = {"sliding_window": 128, "use_sliding_window": True}
MIXED = [SLIDING, FULL, FULL, SLIDING]


def parse(raw: dict[str, Any], **changes: Any) -> RoutedDecoderConfig:
    kept = {key: value for key, value in (raw | changes).items() if value is not ...}
    return RoutedDecoderConfig.parse(ConfigFiles(kept, {}))


def test_the_published_file() -> None:
    config = parse(QWEN3)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_size) == (128, 8, 768)
    assert (config.moe.shared_expert_size, config.moe.normalize) == (0, True)
    assert (config.qk_norm, config.qkv_bias, config.o_bias) == (True, False, False)
    assert (config.dense_layers, config.sliding_window) == (frozenset(), None)
    mixtral = parse(MIXTRAL, norm_topk_prob=False, num_experts=...)
    assert mixtral.moe is not None
    assert (mixtral.moe.expert_size, mixtral.moe.normalize) == (6144, True)


@pytest.mark.parametrize(
    ("raw", "window", "layers"),
    [
        (QWEN3 | WINDOW, 128, (SLIDING,) * 48),
        (QWEN3 | WINDOW | {"use_sliding_window": False}, None, (FULL,) * 48),
        (MIXTRAL | {"sliding_window": 128}, 128, (SLIDING,) * 48),
        (QWEN2 | WINDOW, 128, (SLIDING, FULL, SLIDING, FULL)),
        (QWEN2 | WINDOW | {"max_window_layers": 1}, 128, (SLIDING, FULL, FULL, FULL)),
        (QWEN2 | WINDOW | {"layer_types": MIXED}, 128, tuple(MIXED)),
        (QWEN2 | {"sliding_window": 0}, None, (FULL,) * 4),
    ],
)
def test_which_layers_have_a_window(
    raw: dict[str, Any], window: int | None, layers: tuple[str, ...]
) -> None:
    config = parse(raw)
    assert (config.sliding_window, config.layer_types) == (window, layers)


def test_which_layers_have_experts() -> None:
    config = parse(QWEN2, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.dense_layers == {0, 2, 3}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (QWEN3 | {"num_experts": ...}, "lacks num_experts"),
        (QWEN3 | {"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        (QWEN3 | {"num_experts": 4096, "num_hidden_layers": 100}, "in all are the most"),
        (QWEN3 | {"moe_intermediate_size": ...}, "lacks moe_intermediate_size"),
        (QWEN2 | {"shared_expert_intermediate_size": ...}, "lacks shared_expert_inter"),
        (QWEN2 | {"layer_types": MIXED}, "layers of sliding_attention, without use_sliding"),
        (QWEN2 | WINDOW | {"layer_types": [FULL]}, "1 layer_types for 4 layers"),
    ],
)
def test_refusals(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(raw)


@pytest.mark.parametrize(
    ("ranks", "expert_parallel", "fits"),
    [(4, False, True), (32, True, True), (3, False, False), (5, True, False)],
)
def test_ranks_that_divide_the_model(ranks: int, expert_parallel: bool, fits: bool) -> None:
    if fits:
        parse(QWEN3).check_ranks(ranks, expert_parallel=expert_parallel)
    else:
        with pytest.raises(InvalidRequest, match=f"tensor_parallel_size {ranks} does not divide"):
            parse(QWEN3).check_ranks(ranks, expert_parallel=expert_parallel)


AT = "model.layers.1.block_sparse_moe."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{AT}experts.3.w2.weight"), rf"missing: {AT}experts\.3\.w2\.weight$"),
        (lambda t: t.pop(f"{AT}gate.weight"), rf"missing: {AT}gate\.weight$"),
        (
            lambda t: t.update({f"{AT}experts.4.w1.weight": torch.ones(96, 64)}),
            rf"unexpected: {AT}experts\.4\.w1\.weight$",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(4, 64, 96)}),
            r"unexpected: model\.layers\.1\.mlp\.experts\.down_proj$",
        ),
        (
            lambda t: t.update({f"{AT}experts.0.w3.weight": torch.ones(96, 32)}),
            rf"of another shape: {AT}experts\.0\.w3\.weight \[96, 32\] instead of \[96, 64\]$",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "mixtral", num_local_experts=4)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    where: dict[str, Any] = {"device": "cpu", "kernels": load_kernels("cpu")}
    with pytest.raises(InvalidRequest, match=message):
        load_model(ModelSource(folder), dtype="auto", tp=TensorParallel(), **where)
