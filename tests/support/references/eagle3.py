"""EAGLE-3 draft heads by their definition, on the layers of transformers. Can be trained.

    x_i = cat(a_j[i] for the captured layers j)      # normed as a whole, or one by one
    f_i = fc x_i
    e = input_layernorm(embed(t_{i+1}));  h = hidden_norm(f_i)
    residual = h or f_i;  residual += attention(cat(e, h));  residual += mlp(norm(residual))
    out = norm(residual);  logits = lm_head(out);  f of the next draft = residual or out

Source: Li et al., 2025 (arXiv 2503.01840), and the heads as SafeAILab and speculators publish them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


class Eagle3Reference(nn.Module):
    """One head. Names of parameters are those of published checkpoints."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model_width: int,
        num_captured: int,
        *,
        kind: str = "llama",
        draft_vocab: int,
        window: int | None = None,
        mask_id: int | None = None,
        **flags: bool,
    ) -> None:
        """`config` are fields of transformers' configuration of a layer; with a `window` a row sees
        that many, itself included."""
        super().__init__()
        made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**config)
        made._attn_implementation = "eager"
        self.window, self.mask_id = window, mask_id
        self.config, self.flags = made, {name: flags.get(name, False) for name in FLAGS}
        width, eps, read = made.hidden_size, made.rms_norm_eps, num_captured * model_width
        decoder = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}[kind]
        self.layers = nn.ModuleList(
            decoder(cast(Any, made), i) for i in range(made.num_hidden_layers)
        )
        first = cast(Any, self.layers[0])
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(width, eps)
        self.fc = nn.Linear(read, width, bias=False)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocab, bias=False)
        if self.flags["norm_before_fc"]:
            self.input_norm = LlamaRMSNorm(read, eps)
        if self.flags["fc_norm"]:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(model_width, eps) for _ in range(num_captured)
            )
        if mask_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, read))
        self.rotary = LlamaRotaryEmbedding(cast(Any, made))

    def read(self, captured: Sequence[Tensor]) -> Tensor:
        """f [.., T, H] of the model's residual stream [.., T, Ht] after each captured layer."""
        if self.flags["fc_norm"]:
            captured = [norm(x) for norm, x in zip(self.fc_norm, captured, strict=True)]
        x = torch.cat(list(captured), dim=-1)
        return cast(Tensor, self.fc(self.input_norm(x) if self.flags["norm_before_fc"] else x))

    def forward(self, f: Tensor, next_embedding: Tensor) -> Tensor:
        """Feedback [B, T, H] of rows 0..T-1, each over all before it."""
        first, length = cast(Any, self.layers[0]), f.shape[1]
        e, h = first.input_layernorm(next_embedding), first.hidden_norm(f)
        residual = h if self.flags["norm_before_residual"] else f
        positions = torch.arange(length)[None]
        turned = self.rotary(f, positions)
        apart = positions.T - positions
        hidden = (apart < 0) | (apart >= (self.window or length))
        mask = torch.zeros(length, length).masked_fill(hidden, -torch.inf)[None, None]
        x = torch.cat((e, h), dim=-1)
        for i, layer in enumerate(cast(Any, self.layers)):
            x = x if i == 0 else layer.input_layernorm(residual)
            residual = residual + layer.self_attn(x, turned, mask)[0]
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return cast(Tensor, self.norm(residual) if self.flags["norm_output"] else residual)

    def logits(self, feedback: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        out = feedback if self.flags["norm_output"] else self.norm(feedback)
        return cast(Tensor, self.lm_head(out))

    def draft(
        self,
        tokens: Tensor,
        captured: Sequence[Tensor],
        steps: int,
        embedding: Tensor,
        token_ids: Tensor | None = None,
    ) -> list[int]:
        """Greedy drafts after `tokens` [n], of which the model has read all but the last.

        captured: [n - 1, Ht] each. `token_ids` are those of the draft vocabulary.
        """
        rows, drafts = self.read(captured), list[int]()
        if self.mask_id is not None:  # P-EAGLE: all at once
            unknown = self.read(self.mask_hidden.chunk(len(captured), dim=1))
            rows = torch.cat([rows, *[unknown] * (steps - 1)])
            known = torch.cat([tokens[1:], torch.tensor([self.mask_id] * (steps - 1)).long()])
            best = self.logits(self(rows[None], embedding[known][None])[0, -steps:]).argmax(dim=1)
            return (best if token_ids is None else token_ids[best]).tolist()
        for _ in range(steps):
            known = torch.cat([tokens[1:], torch.tensor(drafts, dtype=tokens.dtype)])
            feedback = self(rows[None], embedding[known][None])[0]
            best = self.logits(feedback[-1]).argmax()
            drafts.append(int(best if token_ids is None else token_ids[best]))
            rows = torch.cat([rows, feedback[-1:]])
        return drafts


def captured_states(model: Any, tokens: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The residual stream [B, T, H] of a transformers model after so many layers."""
    streams = list[Tensor]()
    decoder = getattr(model, "model", model)
    decoder = getattr(decoder, "language_model", decoder)
    hooks = [
        decoder.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0])),
        *(
            layer.register_forward_hook(
                lambda _, args, out: streams.append(out[0] if isinstance(out, tuple) else out)
            )
            for layer in decoder.layers
        ),
    ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [streams[j] for j in layers]
