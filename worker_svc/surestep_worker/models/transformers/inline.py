"""Modules of transformers that attend, or compute experts, by code of their own.

Such a class asks no implementation for attention. So its forward pass stands here once more: its
own products, our attention. It has its own forward pass while it is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from .attention import BACKEND, attend
from .experts import STACKS, run_experts

SLOPES = "surestep_slopes"  # attribute of a module: its slopes of ALiBi


def attend_through_pages(model: Any) -> None:
    """Put forward passes of ours in the place of those of modules that attend themselves."""
    for module in model.modules():
        kind = type(module)  # of transformers.models.FAMILY.modeling_FAMILY
        name = f"{kind.__module__.split('.')[-2]}.{kind.__name__}"
        if name in _PRODUCTS:
            module.forward = partial(_PRODUCTS[name], module)
        elif name in _OWN:
            module.forward = _Choice(_OWN[name], module, model.config)
        if name in _SLOPES:
            module.register_buffer(SLOPES, _SLOPES[name](module), persistent=False)
        vars(module).update(_FACTS.get(name, {}))


class _Choice:
    """Forward pass of a module: its own for its own attention, otherwise ours."""

    def __init__(self, own: Callable[..., Any], module: nn.Module, config: Any) -> None:
        self._own, self._module, self._config = own, module, config
        self._theirs = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._config._attn_implementation == BACKEND:
            return self._own(self._module, *args, **kwargs)
        return self._theirs(*args, **kwargs)


def _fused(module: Any, x: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [1, H, T, D] of a projection whose rows are, by KV head,
    those of its queries, its key and its value."""
    made = module.query_key_value(x).view(*x.shape[:2], num_kv_heads, -1, module.head_dim)
    q, k, v = made[..., :-2, :].flatten(2, 3), made[..., -2, :], made[..., -1, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """Return [1, H, T, D] of [1, T, H * D]."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def _attended(
    module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **facts: Any
) -> Tensor:
    """Return attention [1, T, H * D] of [1, H, T, D]."""
    out, _ = attend(module, q, k, v, None, scale, **facts)
    return out.flatten(2)


def _falcon(
    self: Any,
    hidden_states: Tensor,
    *,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **more: Any,
) -> tuple[Tensor, None]:
    if alibi is not None:  # theirs is rounded to bfloat16, product by product
        raise InvalidRequest("Falcon with ALiBi is not served", param="model")
    q, k, v = _fused(self, hidden_states, self.num_kv_heads)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    return self.dense(_attended(self, q, k, v)), None


def _projected(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [1, H, T, D] of three projections."""
    q, k, v = (_heads(it(x), self.head_dim) for it in (self.q_proj, self.k_proj, self.v_proj))
    return q, k, v


def _xglm(self: Any, hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
    q, k, v = _projected(self, hidden_states)
    return self.out_proj(_attended(self, q, k, v, self.scaling)), None


def _openai(self: Any, x: Tensor, *more: Any, **further: Any) -> list[Tensor]:
    q, k, v = (_heads(it, x.shape[2] // self.n_head) for it in self.c_attn(x).chunk(3, dim=2))
    return [self.c_proj(_attended(self, q, k, v, None if self.scale else 1.0))]


def _gpt_neo(self: Any, hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
    q, k, v = _projected(self, hidden_states)
    window = self.config.window_size if self.attention_type == "local" else None
    return self.out_proj(_attended(self, q, k, v, 1.0, sliding_window=window)), None


def _bloom(self: Any, hidden_states: Tensor, residual: Tensor, **more: Any) -> tuple[Tensor, None]:
    q, k, v = _fused(self, hidden_states, self.num_heads)
    out = _attended(self, q, k, v, self.inv_norm_factor, slopes=getattr(self, SLOPES))
    return residual + self.dense(out), None


def _bloom_model(self: Any, input_ids: Tensor, **more: Any) -> Output:
    x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
    for block in self.h:
        x, _ = block(x, alibi=None, attention_mask=None)
    return Output(last_hidden_state=self.ln_f(x))


def _mpt(self: Any, hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
    made = self.Wqkv(hidden_states)
    if self.clip_qkv:
        made = made.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = (_heads(it, self.head_dim) for it in made.chunk(3, dim=2))
    out = _attended(self, q, k, v, self.softmax_scale, slopes=getattr(self, SLOPES))
    return self.out_proj(out), None


def _mpt_model(self: Any, input_ids: Tensor, **more: Any) -> Output:
    x = self.wte(input_ids)
    for block in self.blocks:
        x, _ = block(x, position_bias=None, attention_mask=None)
    return Output(last_hidden_state=self.norm_f(x))


def _llama4_moe(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    if self.top_k != 1:
        raise InvalidRequest(
            "Llama 4 with several experts for a token is not served", param="model"
        )
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits = nn.functional.linear(rows, self.router.weight)
    best, expert = logits.topk(1, dim=1)
    scaled = rows * best.float().sigmoid().to(rows.dtype)  # not what comes of them
    routed = run_experts(self.experts, scaled, expert, torch.ones_like(best))
    return self.shared_expert(rows) + routed, logits


def _dbrx_experts(self: Any, hidden_states: Tensor, *routed: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, self.hidden_size)
    return run_experts(self, rows, *routed).view(hidden_states.shape)


_EXPERTS = {  # which other classes of experts tell themselves
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
_FACTS: Mapping[str, Mapping[str, Any]] = {
    "dbrx.DbrxExperts": _EXPERTS | {STACKS: (("mlp.w1", "mlp.v1"), ("mlp.w2",))},
    "llama4.Llama4TextAttention": {
        "attn_temperature_tuning": False
    },  # of longer sequences, see `config`
    "llama4.Llama4TextExperts": _EXPERTS | {"is_transposed": True},
}
_PRODUCTS: Mapping[str, Callable[..., Any]] = {  # which theirs writes in a way of its own
    "dbrx.DbrxExperts": _dbrx_experts,
    "falcon.FalconLinear": nn.Linear.forward,
    "llama4.Llama4TextMoe": _llama4_moe,
}
_SLOPES: Mapping[str, Callable[[Any], Tensor]] = {  # of ALiBi, by head
    "bloom.BloomAttention": lambda it: _get_alibi_slopes(it.num_heads, torch.device("cpu")),
    "mpt.MptAttention": lambda it: -build_mpt_alibi_tensor(it.n_heads, 2)[:, 0, 0],
}
_OWN: Mapping[str, Callable[..., Any]] = {
    "bloom.BloomAttention": _bloom,
    "bloom.BloomModel": _bloom_model,
    "falcon.FalconAttention": _falcon,
    "gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "mpt.MptAttention": _mpt,
    "mpt.MptModel": _mpt_model,
    "openai.Attention": _openai,
    "xglm.XGLMAttention": _xglm,
}
