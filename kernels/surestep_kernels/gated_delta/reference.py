"""The gated delta rule (Yang et al., 2024), token by token over ragged rows.

    S = decay S;  delta = beta (v - S^T k);  S = S + k delta^T;  o = S^T q

with q and k normalised to length 1, q scaled by dk^-1/2, beta = sigmoid(b) and
decay = exp(-exp(A_log) softplus(a + dt_bias)). S is f32 and so is all arithmetic. The record of a
token is (k, delta, decay); folding it repeats the update of S without the products behind delta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from surestep_kernels.recurrent_rows import DeltaState, RecurrentRows

_EPS = 1e-6


def gated_delta_reference(
    qkv: Tensor,
    beta_and_decay: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    delta: DeltaState,
    rows: RecurrentRows,
) -> Tensor:
    """Run qkv [T, 2 Hk dk + Hv dv] through the rule; returns [T, Hv, dv] in its dtype.

    beta_and_decay [T, 2 Hv] holds b, then a; a_log and dt_bias are f32[Hv]. `delta` advances as
    described in recurrent.py.
    """
    # torch rounds vectors and their remainders differently; single tokens are all alike.
    inputs = [
        _prepare(x, ba, a_log, dt_bias, delta)
        for x, ba in zip(qkv.float(), beta_and_decay.float(), strict=True)
    ]
    _, v_heads, _, v_dim = delta.state.shape
    out = delta.state.new_empty(len(qkv), v_heads, v_dim)
    for r in range(len(rows.slots)):
        slot, pending = int(rows.slots[r]), int(rows.pending[r])
        first, end = int(rows.cu_rows[r]), int(rows.cu_rows[r + 1])
        if first == end:
            continue
        copy_at, line = int(rows.snapshot_after[r]), int(rows.snapshot_line[r])
        state = delta.state[slot].clone() if rows.start[r] else torch.zeros_like(delta.state[slot])
        for t in range(pending):
            record = delta.keys[slot, t], delta.deltas[slot, t], delta.decays[slot, t]
            state = _fold(state, *record)
            if t + 1 == copy_at:
                delta.snapshots[line] = state
        if rows.window[r]:
            delta.state[slot] = state
        for t in range(first, end):
            q, k, v, beta, decay = inputs[t]
            change = (v - _product(state * decay[:, None, None], k)) * beta[:, None]
            state = _fold(state, k, change, decay)
            out[t] = _product(state, q)
            if rows.window[r]:
                delta.keys[slot, t - first] = k
                delta.deltas[slot, t - first] = change
                delta.decays[slot, t - first] = decay
            elif pending + t - first + 1 == copy_at:
                delta.snapshots[line] = state
        if not rows.window[r]:
            delta.state[slot] = state
    return out.to(qkv.dtype)


class _Inputs(NamedTuple):
    """Inputs of one token."""

    q: Tensor  # [Hk, dk]
    k: Tensor  # [Hk, dk]
    v: Tensor  # [Hv, dv]
    beta: Tensor  # [Hv]
    decay: Tensor  # [Hv]


def _prepare(
    qkv: Tensor, beta_and_decay: Tensor, a_log: Tensor, dt_bias: Tensor, delta: DeltaState
) -> _Inputs:
    _, v_heads, k_dim, v_dim = delta.state.shape
    k_heads = delta.keys.shape[2]
    q, k, v = qkv.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim])
    b, a = beta_and_decay.split(v_heads)
    return _Inputs(
        q=_normalised(q.view(k_heads, k_dim)) * k_dim**-0.5,
        k=_normalised(k.view(k_heads, k_dim)),
        v=v.view(v_heads, v_dim),
        beta=b.sigmoid(),
        decay=torch.exp(-a_log.exp() * functional.softplus(a + dt_bias)),
    )


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPS)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Give each of `heads` value heads the line of its key head in x [Hk, dk]."""
    return x.repeat_interleave(heads // len(x), dim=0)


def _product(state: Tensor, x: Tensor) -> Tensor:
    """Return S^T x per value head: [Hv, dv]."""
    return torch.einsum("hkv,hk->hv", state, _spread(x, len(state)))


def _fold(state: Tensor, key: Tensor, delta: Tensor, decay: Tensor) -> Tensor:
    added = _spread(key, len(state)).unsqueeze(-1) * delta.unsqueeze(-2)
    return state * decay[:, None, None] + added
