"""The state of recurrent layers: one committed state and the records of a window per slot.

Snapshots are copies of a committed state at an exact length, from which another slot may go on.
Memory is laid out once; on the CPU, what is never used costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from surestep_common.invariants import IntArray, LedgerError
from surestep_kernels.recurrent_rows import ConvState, DeltaState
from torch import Tensor

from .cache_memory import CacheMemory
from .kv_cache import cache_pages, zero_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Demands of a model's recurrent layers on this rank."""

    num_layers: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # of the convolution
    dtype: torch.dtype  # of the convolution's inputs; everything else is f32

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of one state over all layers."""
        state = self.num_v_heads * self.k_dim * self.v_dim * 4
        return self.num_layers * (state + (self.taps - 1) * self.channels * self.dtype.itemsize)

    @property
    def record_bytes(self) -> int:
        """Return the bytes that each token of a window adds over all layers."""
        heads = self.num_k_heads * self.k_dim + self.num_v_heads * (self.v_dim + 1)
        return self.num_layers * (heads * 4 + self.channels * self.dtype.itemsize)

    def slot_bytes(self, window: int) -> int:
        """Return the bytes of one slot whose windows have up to `window` tokens."""
        return self.snapshot_bytes + window * self.record_bytes


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Part of a layer in the cache."""

    delta: DeltaState
    conv: ConvState


class RecurrentCache:
    """States of `num_slots` slots and the NULL slot, and `num_snapshots` snapshots."""

    def __init__(
        self,
        spec: RecurrentSpec,
        num_slots: int,
        window: int,
        num_snapshots: int,
        device: str,
        memory: CacheMemory | None = None,
    ) -> None:
        self.spec = spec
        self._memory = memory  # of snapshots
        self.num_snapshots = num_snapshots
        self._device = device
        self._snapshot_len = [0] * num_snapshots  # tokens in each; 0 = never taken
        sizes = num_slots + 1, window, max(num_snapshots, 1)
        self.layers = [self._layer(*sizes) for _ in range(spec.num_layers)]

    def _layer(self, slots: int, window: int, lines: int) -> RecurrentLayer:
        spec = self.spec
        state = (spec.num_v_heads, spec.k_dim, spec.v_dim)
        keep = spec.taps - 1
        return RecurrentLayer(
            DeltaState(
                state=self._zeros(slots, *state),
                snapshots=self._lines(lines, *state),
                keys=self._zeros(slots, window, spec.num_k_heads, spec.k_dim),
                deltas=self._zeros(slots, window, spec.num_v_heads, spec.v_dim),
                decays=self._zeros(slots, window, spec.num_v_heads),
            ),
            ConvState(
                inputs=self._zeros(slots, keep + window, spec.channels, dtype=spec.dtype),
                snapshots=self._lines(lines, keep, spec.channels, dtype=spec.dtype),
            ),
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return zero_pages(shape, dtype, self._device)

    def _lines(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return cache_pages(shape, dtype, self._device, self._memory)

    def reset(self) -> None:
        """Invalidate all snapshots: a new epoch begins."""
        self._snapshot_len = [0] * self.num_snapshots

    def mark_taken(self, snapshot_ids: IntArray, lengths: IntArray) -> None:
        """Record that snapshots [N] were written, after `lengths` tokens."""
        for snapshot_id, length in zip(snapshot_ids.tolist(), lengths.tolist(), strict=True):
            self._snapshot_len[snapshot_id - 1] = length

    def restore(self, snapshot_id: int, slot: int, length: int) -> None:
        """Let `slot` go on from a snapshot (1..num_snapshots): its state, and no records.

        Raises LedgerError unless the snapshot was taken after exactly `length` tokens.
        """
        line = snapshot_id - 1
        if line < 0 or self._snapshot_len[line] != length:
            raise LedgerError(f"slot {slot}: snapshot {snapshot_id} is not of {length} tokens")
        for layer in self.layers:
            layer.delta.state[slot] = layer.delta.snapshots[line]
            kept = layer.conv.snapshots[line]
            layer.conv.inputs[slot, : len(kept)] = kept

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor [num_slots + 1, ...] that holds the state of slots."""
        for layer in self.layers:
            yield from (layer.delta.state, *layer.delta[2:], layer.conv.inputs)

    @property
    def snapshot_tensors(self) -> list[Tensor]:
        """Tensors [num_snapshots, ...] that hold snapshots."""
        both = ((layer.delta.snapshots, layer.conv.snapshots) for layer in self.layers)
        return [tensor for pair in both for tensor in pair if tensor.numel()]

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that one slot takes, by the tensors that there are."""
        return sum(math.prod(t.shape[1:]) * t.itemsize for t in self.tensors())
