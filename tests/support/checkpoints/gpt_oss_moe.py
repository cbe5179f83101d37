"""A checkpoint of one layer of gpt-oss's experts, plain or in MXFP4, and what it stands for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from surestep_worker.checkpoint.formats import Mxfp4Blocks
from surestep_worker.configs.layer_sizes import RoutedConfig
from surestep_worker.configs.model_config import FULL_ATTENTION
from surestep_worker.configs.rope import RopeConfig
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

EXPERTS, TOP_K, WIDTH, INNER, LIMIT = 6, 3, 64, 96, 1.5
PROJECTIONS = {"gate_up_proj": (2 * INNER, WIDTH), "down_proj": (WIDTH, INNER)}  # outputs, inputs


def moe_config(*, mxfp4: bool, inner: int = INNER) -> RoutedConfig:
    """Of a model with such a layer; the rest of it is never looked at."""
    return RoutedConfig(
        architecture="GptOssForCausalLM",
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=inner,
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        max_position=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        sliding_window=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=False,
        attention_gate=False,
        zero_centred_norms=False,
        layer_types=(FULL_ATTENTION,),
        rotary_dim=8,
        tie_word_embeddings=False,
        is_backbone=False,
        eos_token_ids=(2,),
        checkpoint_dtype="float32",
        quantization=Mxfp4Blocks(("model.layers.*.mlp.router",)) if mxfp4 else None,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        swiglu_limit=LIMIT,
    )


def random_mxfp4(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Blocks u8[E, N, K / 32, 16] and scales u8[E, N, K / 32] of weights around 0.1."""
    shape = experts, outputs, inputs // 32
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(119, 125, shape, dtype=torch.uint8)


def make_moe(folder: Path, *, mxfp4: bool) -> GptOssMLP:
    """Write the layer's tensors; returns transformers' layer with the same weights, in fp32.

    Gates and ups go beyond the limit.
    """
    config = GptOssConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        swiglu_limit=LIMIT,
    )
    config._experts_implementation = "eager"
    layer = GptOssMLP(config)
    stored = dict[str, Tensor]()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(0, 1.0 if name.endswith("bias") else 0.2)
            stored[f"mlp.{name}"] = parameter.detach().clone()
        for name, (outputs, inputs) in PROJECTIONS.items() if mxfp4 else ():
            blocks, scales = random_mxfp4(EXPERTS, outputs, inputs)
            meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.experts, name).copy_(meant)
            del stored[f"mlp.experts.{name}"]
            stored |= {f"mlp.experts.{name}_blocks": blocks, f"mlp.experts.{name}_scales": scales}
    save_file(stored, folder / "model.safetensors")
    return layer
