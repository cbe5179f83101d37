"""The causal depthwise convolution in front of a gated delta layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from surestep_kernels.recurrent_rows import ConvState, RecurrentRows


def causal_conv_reference(
    x: Tensor, weight: Tensor, conv: ConvState, rows: RecurrentRows
) -> Tensor:
    """Convolve x [T, C] with weight f32[taps, C], tap `taps - 1` on the newest token, and apply
    silu.

    Returns [T, C]; `conv` advances as described in recurrent.py.
    """
    keep, out = len(weight) - 1, torch.zeros_like(x)
    for r in range(len(rows.slots)):
        slot, pending = int(rows.slots[r]), int(rows.pending[r])
        copy_at, line = int(rows.snapshot_after[r]), int(rows.snapshot_line[r])
        first, end = int(rows.cu_rows[r]), int(rows.cu_rows[r + 1])
        if first == end:
            continue
        x_row = x[first:end]
        inputs = conv.inputs[slot]
        if 0 < copy_at <= pending:
            conv.snapshots[line] = inputs[copy_at : copy_at + keep]
        history = inputs[pending : pending + keep]
        if rows.start[r] == 0:
            history = torch.zeros_like(history)
        sequence = torch.cat((history, x_row))
        windows = sequence.float().unfold(0, keep + 1, 1)  # [n, C, taps]
        total = (windows * weight.t()).sum(dim=-1).to(x.dtype)
        # torch rounds vectors and their remainders differently; single tokens are all alike.
        for at, token in zip(range(first, end), total, strict=True):
            out[at] = functional.silu(token.float()).to(x.dtype)
        if rows.window[r]:
            inputs[: len(sequence)] = sequence
            continue
        if copy_at > pending:
            conv.snapshots[line] = sequence[copy_at - pending :][:keep]
        inputs[:keep] = sequence[len(x_row) :]
    return out
