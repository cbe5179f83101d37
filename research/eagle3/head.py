"""An EAGLE-3 head that can be trained (Li et al., 2025, arXiv 2503.01840).

Names of parameters are those of published checkpoints. What the worker computes from them stands in
surestep_worker.models.eagle3: with `fc_norm` and `norm_before_residual`.

    f_i = fc cat(norm_j a_j[i])                  # a_j: the model's residual stream after j layers
    e, h = input_layernorm(embed(t_{i+1})), hidden_norm(f_i)
    residual = h;  residual += attention(cat(e, h));  residual += mlp(norm(residual))
    logits = lm_head(norm(residual)); f_{i+1} of the next draft = residual
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head; it is as wide as its model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_captured: int


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), (len(self.weight),), self.weight, self._eps)


class _Attention(nn.Module):
    """Attention of a row for every position, and of later rows of a draft over earlier ones."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._dim, self._group = shape.head_dim, shape.num_heads // shape.num_kv_heads
        self._parts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        for name, heads in zip("qkv", self._parts, strict=True):
            made = nn.Linear(2 * shape.hidden_size, heads * shape.head_dim, bias=False)
            setattr(self, f"{name}_proj", made)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def heads(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, dim] of x [B, T, 2H]."""
        weights = torch.cat([getattr(self, f"{n}_proj").weight for n in "qkv"])
        made = linear(x, weights).unflatten(-1, (-1, self._dim)).transpose(1, 2)
        q, k, v = made.split(self._parts, dim=1)
        k, v = (y.repeat_interleave(self._group, dim=1) for y in (_turned(k, turn), v))
        return _turned(q, turn), k, v

    def forward(self, q: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend q of draft step k; `rows` are keys and values of steps 0..k.

        Row i of step k sees rows up to i - k of step 0, and of step j > 0 the row i - k + j, which
        lead to it.
        """
        step, length = len(rows) - 1, q.shape[2]
        scale = self._dim**-0.5
        behind = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
        scores = (q @ rows[0][0].mT).float() * scale
        scores = scores.masked_fill(~behind, -torch.inf)
        later = [(_shift(k, step - j), _shift(v, step - j)) for j, (k, v) in enumerate(rows) if j]
        ones = [(q * k).sum(-1, keepdim=True) * scale for k, _ in later]
        weights = torch.cat([scores, *ones], dim=-1).softmax(-1)
        out = (weights[..., :length] @ rows[0][1]).float()
        for j, (_, v) in enumerate(later):
            out = out + weights[..., length + j, None] * v
        made: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return made


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm = _Norm(width, eps), _Norm(width, eps)
        self.post_attention_layernorm = _Norm(width, eps)
        self.self_attn = _Attention(shape)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(width, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, width, bias=False),
            }
        )

    def forward(
        self,
        e: Tensor,
        f: Tensor,
        rows: list[tuple[Tensor, Tensor]],
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        h, mlp = self.hidden_norm(f), self.mlp
        q, k, v = self.self_attn.heads(torch.cat((e, h), dim=-1), turn)
        rows.append((k, v))
        residual = h + self.self_attn(q, rows).float()
        x = self.post_attention_layernorm(residual)
        made: Tensor = mlp["down_proj"](silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        total: Tensor = residual + made.float()
        return total


class Eagle3Head(nn.Module):
    """The trained part of a head. The embedding and the rows of the output head are the model's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc_norm = nn.ModuleList(_Norm(width, eps) for _ in range(shape.num_captured))
        self.fc = nn.Linear(shape.num_captured * width, width, bias=False)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = _Norm(width, eps)

    def unroll(self, captured: Tensor, next_embedding: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield normed outputs [B, T, H] of draft steps 0, 1, ..: row i is to tell token i + 2.

        Row i of step k continues row i - 1 of step k - 1; there is none for i < k. Tokens are the
        true ones: this is how the head drafts where all its drafts before were right.

        captured: [B, T, n * H]; next_embedding: [B, T, H] of token i + 1.
        """
        layer: Any = self.layers[0]
        states = captured.unflatten(-1, (self.shape.num_captured, -1)).unbind(-2)
        f = self.fc(torch.cat([n(x) for n, x in zip(self.fc_norm, states, strict=True)], dim=-1))
        e = layer.input_layernorm(next_embedding)
        turn = rotations(captured.shape[1], self.shape, captured.device)
        rows = list[tuple[Tensor, Tensor]]()
        for _ in range(steps):
            residual = layer(e, f, rows, turn)
            yield self.norm(residual)
            f = _shift(residual[:, None], 1)[:, 0]


def rotations(length: int, shape: HeadShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim] of positions 0..T-1."""
    dim = shape.head_dim
    speeds = shape.rope_theta ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.outer(torch.arange(length, device=device), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


def _shift(x: Tensor, by: int) -> Tensor:
    """Rows [B, heads, T, dim] moved to later positions; the first ones repeat."""
    if by == 0:
        return x
    return torch.cat((x[:, :, :1].expand(-1, -1, by, -1), x[:, :, :-by]), dim=2)


def initial_head(
    shape: HeadShape, weights: Mapping[str, Tensor], last_layer: int, size: float
) -> Eagle3Head:
    """A head that begins as its model's last layer does, behind the last captured state.

    What it reads of the embedding begins at random. Its residual stream is normed: `size` is the
    root mean square of the model's. The model's gains are multiplied into the weights that follow
    them, so that all matrices are of one magnitude and can learn alike. `weights` are the model's,
    in float32.
    """
    head, width, at = Eagle3Head(shape), shape.hidden_size, f"model.layers.{last_layer}."
    state = head.state_dict()
    with torch.no_grad():
        state["fc.weight"].zero_()[:, -width:] = torch.eye(width)
        state["norm.weight"].copy_(weights["model.norm.weight"])
        gain = weights[f"{at}post_attention_layernorm.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            own = state[f"layers.0.mlp.{name}.weight"]
            given = weights[f"{at}mlp.{name}.weight"]
            if own.shape == given.shape:
                own.copy_(given / size if name == "down_proj" else given * gain)
        _copy_heads(state, weights, at, shape, size)
    return head


def _copy_heads(
    state: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    at: str,
    shape: HeadShape,
    size: float,
) -> None:
    """Queries, and the keys and values that belong to them, of as many heads as there are."""
    width, dim, of = shape.hidden_size, shape.head_dim, "layers.0.self_attn."
    given = {n: weights[f"{at}self_attn.{n}_proj.weight"] for n in "qkvo"}
    gain = weights[f"{at}input_layernorm.weight"]
    num_queries = len(given["q"]) // dim
    queries = torch.arange(shape.num_heads) % num_queries  # of the model, one for each of ours
    for name in "qkv":
        own, rows = state[f"{of}{name}_proj.weight"], given[name].view(-1, dim, width)
        chosen = queries[:: shape.num_heads * dim // len(own)] // (num_queries // len(rows))
        own[:, width:] = rows[chosen].flatten(0, 1) * gain
        own[:, :width].normal_(0.0, width**-0.5)
    columns = given["o"].view(width, -1, dim)[:, queries]
    state[f"{of}o_proj.weight"].copy_(columns.flatten(1) / size)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings f32[.., H] of tokens."""
    return embedding(tokens, table).float()
