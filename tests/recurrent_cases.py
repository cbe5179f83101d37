"""A gated delta layer's state, driven row by row, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from surestep_kernels import KernelSet
from surestep_kernels.recurrent import ConvState, DeltaState, RecurrentRows
from torch import Tensor

TAPS = 4


@dataclass(frozen=True)
class Sizes:
    """Of one layer."""

    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 40  # not a multiple of the columns that a task takes
    records: int = 6

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True)
class Sequence:
    """Inputs of one sequence of L tokens."""

    x: Tensor  # [L, C] before the convolution
    beta_and_decay: Tensor  # [L, 2 Hv]


@dataclass(frozen=True)
class Row:
    """One row of a batch: tokens first..first+n of a sequence, in a slot."""

    slot: int
    first: int
    n: int
    window: bool
    pending: int
    snapshot_after: int = 0
    snapshot_line: int = 0


class Layer:
    """Weights and state of one layer. Whatever was never written is NaN."""

    def __init__(
        self, kernels: KernelSet, sizes: Sizes, num_slots: int, dtype: torch.dtype
    ) -> None:
        rng = torch.Generator().manual_seed(5)
        self._kernels = kernels
        self._weight = torch.randn(TAPS, sizes.channels, generator=rng)
        self._a_log = torch.rand(sizes.v_heads, generator=rng)
        self._dt_bias = torch.randn(sizes.v_heads, generator=rng)
        state = (sizes.v_heads, sizes.k_dim, sizes.v_dim)
        slots, records, lines = num_slots, sizes.records, 4
        self.delta = DeltaState(
            state=torch.full((slots, *state), torch.nan),
            snapshots=torch.full((lines, *state), torch.nan),
            keys=torch.full((slots, records, sizes.k_heads, sizes.k_dim), torch.nan),
            deltas=torch.full((slots, records, sizes.v_heads, sizes.v_dim), torch.nan),
            decays=torch.full((slots, records, sizes.v_heads), torch.nan),
        )
        inputs = (slots, TAPS - 1 + records, sizes.channels)
        self.conv = ConvState(
            torch.full(inputs, torch.nan, dtype=dtype),
            torch.full((lines, TAPS - 1, sizes.channels), torch.nan, dtype=dtype),
        )

    def run(self, rows: list[Row], sequences: dict[int, Sequence]) -> list[Tensor]:
        """Outputs [n, Hv, dv] of each row; sequences are named by slot."""
        x = torch.cat([sequences[r.slot].x[r.first : r.first + r.n] for r in rows])
        ba = torch.cat([sequences[r.slot].beta_and_decay[r.first : r.first + r.n] for r in rows])
        described = _describe(rows)
        qkv = self._kernels.causal_conv(x, self._weight, self.conv, described)
        out = self._kernels.gated_delta(qkv, ba, self._a_log, self._dt_bias, self.delta, described)
        return list(out.split([r.n for r in rows]))


def _describe(rows: list[Row]) -> RecurrentRows:
    def column(name: str) -> Tensor:
        return torch.tensor([int(getattr(r, name)) for r in rows], dtype=torch.int32)

    return RecurrentRows(
        slots=column("slot").long(),
        cu_rows=torch.tensor([0, *(r.n for r in rows)]).cumsum(0).int(),
        start=column("first"),
        pending=column("pending"),
        window=column("window"),
        snapshot_after=column("snapshot_after"),
        snapshot_line=column("snapshot_line"),
    )


def make_sequence(sizes: Sizes, length: int, seed: int, dtype: torch.dtype) -> Sequence:
    """Random inputs."""
    rng = torch.Generator().manual_seed(seed)
    return Sequence(
        torch.randn(length, sizes.channels, generator=rng).to(dtype),
        torch.randn(length, 2 * sizes.v_heads, generator=rng).to(dtype),
    )
