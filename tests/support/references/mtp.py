"""Plain torch reference of the multi-token prediction head of Qwen3-Next and Qwen3.5.

One head drafts any number of tokens by reuse. Row i of the target has read tokens 0..i; its final
hidden state, after the model's last norm, is `hidden[i]`. Draft step 1 joins it with token i+1,
step s joins the head's own output of step s-1 (after `mtp.norm`) with token i+s:

    x = fc(cat[norm_e(embed(tokens[i+s])), norm_h(h)])       at rotary position i+s-1
    h = norm(decoder_layer(x))                               predicts token i+s+1

Attention of step s sees the step-1 rows 0..i, which rest on the target's hidden states, and the
chain's own rows of steps 2..s. Every norm multiplies by 1 + weight.
Source: the mtp modules of Qwen3-Next and Qwen3.5 as vLLM publishes them; the decoder layer is that
of transformers' qwen3_5, which tests/worker/layers/test_mtp_reference.py compares with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding as embed
from torch.nn.functional import linear, silu

LAYER = "mtp.layers.0."


class _Rows(NamedTuple):
    """One draft step of all chains; tensors are [batch, heads, rows, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor  # [batch, rows, heads * head_dim]


class MtpReference:
    """The head of one checkpoint. `config` is the text part of its config.json."""

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], embedding: Tensor
    ) -> None:
        """`weights` are the `mtp.*` tensors, `embedding` [vocab, hidden] is shared and tied."""
        self._weights = weights
        self._embedding = embedding
        self._eps = float(config["rms_norm_eps"])
        self._head_dim = int(config["head_dim"])
        rope = config["rope_parameters"]
        rotary_dim = int(self._head_dim * rope["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
        self._frequencies = 1.0 / rope["rope_theta"] ** exponents

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to [..., vocab]: the target's own output head."""
        return hidden @ self._embedding.T

    def chains(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Outputs of steps 1..`steps` for all chains at once, each [batch, rows, hidden].

        tokens [batch, length], hidden [batch, length, hidden]. rows = length - steps: a chain that
        starts at row i reads tokens i+1..i+steps. Draft s of chain i is the argmax of
        `logits(result[s - 1])[:, i]`.
        """
        rows = tokens.shape[1] - steps
        assert rows > 0, "longer chains than text"
        done: list[_Rows] = []
        outputs = []
        recycled = hidden[:, :rows]
        for step in range(1, steps + 1):
            x = self._joined(tokens[:, step : step + rows], recycled)
            done.append(self._project(x, torch.arange(rows) + step - 1))
            x = x + self._attention(done)
            x = x + self._mlp(self._norm(x, LAYER + "post_attention_layernorm.weight"))
            recycled = self._norm(x, "mtp.norm.weight")
            outputs.append(recycled)
        return outputs

    def draft(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[int]:
        """Greedy drafts after `tokens` [n], of which the target has read all but the last.

        hidden [n - 1, hidden].
        """
        drafts: list[int] = []
        for step in range(1, steps + 1):
            known = torch.cat([tokens, torch.tensor(drafts, dtype=tokens.dtype)])[None]
            outputs = self.chains(known, hidden[None], step)
            drafts.append(int(self.logits(outputs[-1][0, -1]).argmax()))
        return drafts

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = embed(tokens, self._embedding)
        both = [
            self._norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
            self._norm(hidden, "mtp.pre_fc_norm_hidden.weight"),
        ]
        return self._linear(torch.cat(both, dim=-1), "mtp.fc.weight")

    def _project(self, x: Tensor, positions: Tensor) -> _Rows:
        """Gated queries, keys and values, normed per head and rotated."""
        x = self._norm(x, LAYER + "input_layernorm.weight")
        query, gate = self._heads(x, "q_proj").chunk(2, dim=-1)
        query = self._norm(query, LAYER + "self_attn.q_norm.weight")
        key = self._norm(self._heads(x, "k_proj"), LAYER + "self_attn.k_norm.weight")
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, self._heads(x, "v_proj")))
        return _Rows(query, key, value, gate.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """[batch, heads, rows, ...]; a query head is followed by its gate."""
        width = self._head_dim * (2 if name == "q_proj" else 1)
        out = self._linear(x, f"{LAYER}self_attn.{name}.weight")
        return out.view(*out.shape[:-1], -1, width).transpose(1, 2)

    def _attention(self, done: list[_Rows]) -> Tensor:
        """The newest step's rows over the step-1 rows up to their own and over their own chain."""
        first, newest = done[0], done[-1]
        query = newest.query * self._head_dim**-0.5
        causal = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril()
        shared = (query @ first.key.transpose(-1, -2)).masked_fill(~causal, -torch.inf)
        own = [(query * rows.key).sum(-1, keepdim=True) for rows in done[1:]]
        weights = torch.cat([shared, *own], dim=-1).softmax(dim=-1)
        out = weights[..., : query.shape[-2]] @ first.value
        for index, rows in enumerate(done[1:], start=query.shape[-2]):
            out = out + weights[..., index : index + 1] * rows.value
        gated = out.transpose(1, 2).flatten(2) * newest.gate.sigmoid()
        return self._linear(gated, LAYER + "self_attn.o_proj.weight")

    def _mlp(self, x: Tensor) -> Tensor:
        gate = silu(self._linear(x, LAYER + "mlp.gate_proj.weight"))
        up = self._linear(x, LAYER + "mlp.up_proj.weight")
        return self._linear(gate * up, LAYER + "mlp.down_proj.weight")

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first dimensions of a head, halves form; the rest passes."""
        angles = positions[:, None] * self._frequencies
        rotary, rest = x.split([2 * angles.shape[1], x.shape[-1] - 2 * angles.shape[1]], dim=-1)
        left, right = rotary.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return x * scale * (1.0 + self._weights[name])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[name])
