"""The projection of attention's inputs, with the norms and rotation that follow it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from surestep_kernels.linear import PackedLinear


class HeadProjection(NamedTuple):
    """A weight whose outputs are heads: queries, heads left as they are, keys and values."""

    packed: PackedLinear
    head_dim: int
    num_heads: int  # of queries
    num_others: int  # gates, for example
    num_kv_heads: int  # of keys, and of values
    cos_sin: Tensor  # f32[P, D'], see rotary_reference
    q_norm: Tensor | None = None  # f32[D], or f32[heads * D] if joint_norms; both or neither
    k_norm: Tensor | None = None
    eps: float = 0.0  # of the norms

    @property
    def joint_norms(self) -> bool:
        """Return whether all heads of a token are normalised together."""
        return self.q_norm is not None and self.q_norm.numel() > self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the number of heads of each kind, in order."""
        return self.num_heads, self.num_others, self.num_kv_heads, self.num_kv_heads
