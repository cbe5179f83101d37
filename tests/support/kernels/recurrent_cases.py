"""A gated delta layer's state, driven row by row, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from surestep_kernels import KernelSet
from surestep_kernels.recurrent_rows import ConvState, DeltaState, RecurrentRows
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
    chunked: int = 0


class Layer:
    """Weights and state of one layer. Whatever was never written is NaN."""

    def __init__(
        self,
        kernels: KernelSet,
        sizes: Sizes,
        num_slots: int,
        dtype: torch.dtype,
    ) -> None:
        rng = torch.Generator().manual_seed(5)
        self._kernels = kernels
        self._weight = torch.randn(TAPS, sizes.channels, generator=rng)
        self._a_log = torch.rand(sizes.v_heads, generator=rng)
        self._dt_bias = torch.randn(sizes.v_heads, generator=rng)
        state = (sizes.v_heads, sizes.k_dim, sizes.v_dim)
        slots, records, lines = num_slots, sizes.records, 4

        def never_written(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype)

        self.delta = DeltaState(
            state=never_written(slots, *state),
            snapshots=never_written(lines, *state),
            keys=never_written(slots, records, sizes.k_heads, sizes.k_dim),
            deltas=never_written(slots, records, sizes.v_heads, sizes.v_dim),
            decays=never_written(slots, records, sizes.v_heads),
        )
        self.conv = ConvState(
            never_written(slots, TAPS - 1 + records, sizes.channels, dtype=dtype),
            never_written(lines, TAPS - 1, sizes.channels, dtype=dtype),
        )

    def run(self, rows: list[Row], sequences: dict[int, Sequence]) -> list[Tensor]:
        """Outputs [n, Hv, dv] of each row; sequences are named by slot."""
        qkv = torch.cat(self.convolve(rows, sequences))
        return self.apply_delta_rule(qkv, rows, sequences)

    def convolve(self, rows: list[Row], sequences: dict[int, Sequence]) -> list[Tensor]:
        """Outputs [n, C] of the convolution alone."""
        x = torch.cat([sequences[r.slot].x[r.first : r.first + r.n] for r in rows])
        described = _describe(rows)
        out = self._kernels.causal_conv(x, self._weight, self.conv, described)
        return _split(out, rows)

    def apply_delta_rule(
        self, qkv: Tensor, rows: list[Row], sequences: dict[int, Sequence]
    ) -> list[Tensor]:
        """Outputs [n, Hv, dv] of the delta rule alone, for what it reads of each token."""
        ba = torch.cat([sequences[r.slot].beta_and_decay[r.first : r.first + r.n] for r in rows])
        gates = ba, self._a_log, self._dt_bias
        described = _describe(rows)
        out = self._kernels.gated_delta(qkv, *gates, self.delta, described)
        return _split(out, rows)


def _split(out: Tensor, rows: list[Row]) -> list[Tensor]:
    return list(out.split([row.n for row in rows]))


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
        chunked=column("chunked"),
        max_tokens=max(r.n for r in rows),
    )


def make_sequence(sizes: Sizes, length: int, seed: int, dtype: torch.dtype) -> Sequence:
    """Random inputs."""
    rng = torch.Generator().manual_seed(seed)
    return Sequence(
        torch.randn(length, sizes.channels, generator=rng).to(dtype),
        torch.randn(length, 2 * sizes.v_heads, generator=rng).to(dtype),
    )


def mixed_batches() -> list[list[Row]]:
    """Three sequences through every mode: prompts in pieces beside windows with rejected drafts."""
    return [
        [Row(2, 0, 19, False, 0), Row(0, 0, 5, False, 0, 2, 0), Row(1, 0, 1, False, 0)],
        [Row(0, 5, 4, True, 0), Row(1, 1, 2, False, 0, 1, 1), Row(2, 19, 3, False, 0, 3, 2)],
        [Row(0, 7, 6, True, 2), Row(2, 22, 2, True, 0), Row(1, 3, 1, True, 0)],
        [Row(1, 4, 3, True, 1), Row(2, 24, 1, True, 2, 1, 3), Row(0, 7, 1, True, 0)],
        [Row(0, 8, 6, True, 1), Row(2, 25, 2, False, 1, 2, 2), Row(1, 7, 4, True, 3, 2, 1)],
        [Row(2, 27, 6, True, 0), Row(1, 9, 1, True, 2), Row(0, 14, 5, True, 6, 6, 0)],
        [Row(1, 10, 5, False, 1, 4, 3), Row(0, 17, 1, True, 3), Row(2, 31, 2, False, 4, 4, 1)],
    ]
