"""The gated delta rule in C, token by token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    DTYPE_CODES,
    CFunction,
    Library,
    pointers,
    recurrent_row_pointers,
)
from surestep_kernels.recurrent_rows import DeltaState, RecurrentRows


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("gated_delta", "18P 7l i")
    return {"gated_delta": partial(gated_delta, run)}


def gated_delta(
    run: CFunction,
    qkv: Tensor,
    beta_and_decay: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    delta: DeltaState,
    rows: RecurrentRows,
) -> Tensor:
    tokens, beta_and_decay = len(qkv), beta_and_decay.contiguous()
    _, v_heads, k_dim, v_dim = delta.state.shape
    _, records, k_heads, _ = delta.keys.shape
    assert qkv.is_contiguous()
    assert qkv.dtype is beta_and_decay.dtype
    assert a_log.dtype is dt_bias.dtype is torch.float32
    assert all(x.dtype is torch.float32 and x.is_contiguous() for x in delta)
    out = qkv.new_empty(tokens, v_heads, v_dim)
    workspace = torch.empty(tokens, 2 * k_heads * k_dim + 2 * v_heads)
    data = pointers(out, qkv, beta_and_decay, a_log, dt_bias, workspace, *delta)
    sizes = len(rows.slots), tokens, k_heads, v_heads, k_dim, v_dim, records
    run(*data, *recurrent_row_pointers(rows), *sizes, DTYPE_CODES[qkv.dtype])
    return out
