"""The C kernels of hybrid models, called through ctypes like those of ops.py."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.recurrent_rows import ConvState, DeltaState, RecurrentRows
from surestep_kernels.route import SigmoidChoice

from .binding import DTYPE_CODES, bind

_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "causal_conv": [*[_P] * 12, *[_L] * 5, _I],
    "gated_delta": [*[_P] * 18, *[_L] * 7, _I],
    "rms_norm_gated": [_P, _P, _P, _P, _F, _L, _L, _L, _L, _I],
    "mul_sigmoid": [_P, _P, _L, _L, _L, _L, _I],
    "route": [_P, _P, _P, _L, _L, _L, _I],
    "route_sigmoid": [*[_P] * 4, *[_L] * 5, _I, _F],
}


@dataclass(frozen=True, slots=True)
class CpuRecurrentOps:
    """The ops of one compiled library; the C function of each op is a field."""

    c_causal_conv: Callable[..., None]
    c_gated_delta: Callable[..., None]
    c_rms_norm_gated: Callable[..., None]
    c_mul_sigmoid: Callable[..., None]
    c_route: Callable[..., None]
    c_route_sigmoid: Callable[..., None]

    @classmethod
    def load(cls, library: Path) -> CpuRecurrentOps:
        """Open a library by its file name (see `file_of`). Raises OSError if that fails."""
        opened = CDLL(str(library))
        return cls(**{f"c_{op}": bind(opened, op, args) for op, args in _SIGNATURES.items()})

    def causal_conv(
        self, x: Tensor, weight: Tensor, conv: ConvState, rows: RecurrentRows
    ) -> Tensor:
        """Convolve x, which may be a slice of a projection."""
        tokens, channels = x.shape
        taps, (_, lines, _) = len(weight), conv.inputs.shape
        assert x.stride(1) == 1
        assert x.dtype is conv.inputs.dtype is conv.snapshots.dtype
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        out = x.new_empty(tokens, channels)
        data = out, x, weight, conv.inputs, conv.snapshots
        sizes = len(rows.slots), x.stride(0), channels, taps, lines
        self.c_causal_conv(*_pointers(*data), *_row_pointers(rows), *sizes, DTYPE_CODES[x.dtype])
        return out

    def gated_delta(
        self,
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
        inputs = _pointers(out, qkv, beta_and_decay, a_log, dt_bias, workspace, *delta)
        sizes = len(rows.slots), tokens, k_heads, v_heads, k_dim, v_dim, records
        self.c_gated_delta(*inputs, *_row_pointers(rows), *sizes, DTYPE_CODES[qkv.dtype])
        return out

    def rms_norm_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise and gate x; gate may be a slice of a projection."""
        tokens, groups, width = x.shape
        assert x.is_contiguous()
        assert gate.shape == x.shape
        assert gate.stride()[1:] == (width, 1)
        assert x.dtype is gate.dtype
        assert weight.dtype is torch.float32
        out = torch.empty_like(x)
        sizes = tokens, groups, width, gate.stride(0)
        pointers = _pointers(out, x, gate, weight)
        self.c_rms_norm_gated(*pointers, eps, *sizes, DTYPE_CODES[x.dtype])
        return out

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        """Gate x in place; gate may be a slice of a projection."""
        assert x.is_contiguous()
        assert gate.stride(1) == 1
        assert x.dtype is gate.dtype
        sizes = *x.shape, gate.shape[1], gate.stride(0)
        self.c_mul_sigmoid(*_pointers(x, gate), *sizes, DTYPE_CODES[x.dtype])

    def route(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype is torch.float32
        weights = logits.new_empty(tokens, top_k)
        experts = torch.empty(tokens, top_k, dtype=torch.int64)
        pointers = _pointers(weights, experts, logits)
        self.c_route(*pointers, tokens, num_experts, top_k, int(normalize))
        return weights, experts

    def route_sigmoid(self, logits: Tensor, how: SigmoidChoice) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype is how.bias.dtype is torch.float32
        assert how.bias.shape == (num_experts,)
        weights = logits.new_empty(tokens, how.top_k)
        experts = torch.empty(tokens, how.top_k, dtype=torch.int64)
        pointers = _pointers(weights, experts, logits, how.bias)
        sizes = tokens, num_experts, how.groups, how.kept_groups, how.top_k
        self.c_route_sigmoid(*pointers, *sizes, int(how.normalize), how.scale)
        return weights, experts


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _row_pointers(rows: RecurrentRows) -> list[int]:
    slots, *columns, _, _ = rows  # not `chunked`: it processes token by token
    assert slots.dtype is torch.int64
    assert all(column.dtype is torch.int32 for column in columns)
    return _pointers(slots, *columns)
