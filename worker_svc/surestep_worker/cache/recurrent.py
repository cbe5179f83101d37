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
from surestep_kernels.gather_tokens import TokenRuns
from surestep_kernels.recurrent_rows import ConvState, DeltaState, RecurrentRows
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


_LOST = -1


class DraftStates(RecurrentCache):
    """States of a model that drafts. They hold all that is known of a slot, its newest token too.

    A slot has two, and no records: the pass that catches up writes both, the second as a snapshot,
    and those that draft advance the second alone. So a rejected draft is rolled back by the next
    step, which begins with the first again. No cached prefix has one: a request's begins with its
    first token. What a pass that fails leaves is lost until the slot's next request.
    """

    def __init__(self, spec: RecurrentSpec, num_slots: int, device: str) -> None:
        super().__init__(spec, 2 * num_slots + 1, window=0, num_snapshots=0, device=device)
        self._null = num_slots  # line of the NULL slot; behind it are those that run ahead
        for i, (delta, conv) in enumerate((layer.delta, layer.conv) for layer in self.layers):
            ahead = delta._replace(snapshots=delta.state), conv._replace(snapshots=conv.inputs)
            self.layers[i] = RecurrentLayer(*ahead)
        lines = num_slots + 1
        self._held = torch.zeros(lines, dtype=torch.int32, device=device)  # tokens in the first

    @property
    def slot_bytes(self) -> int:
        return 2 * super().slot_bytes

    def left(self, slots: Tensor, upto: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return where slots i64[R] go on, and how many tokens are missing up to `end` i32[R].

        Of `upto` i32[R] tokens at least the drafter is said to have a state.
        """
        held = torch.where(upto > 0, self._held[slots], 0)
        lost = held == _LOST
        start = torch.where(lost, upto, held)
        return start, torch.where(lost, 0, (end - start).clamp(min=0))

    def hold(self, slots: Tensor, known: Tensor) -> Tensor:
        """Return which slots i64[R] hold as many tokens as are `known` i32[R]."""
        return self._held[slots] == known

    def begin(self, runs: TokenRuns, max_tokens: int) -> RecurrentRows:
        """Return the rows of a pass that catches up. They are lost unless it `ends`."""
        self._note(runs, torch.full_like(runs.valid, _LOST))
        return self._rows(runs, runs.slots, runs.valid, max_tokens)

    def end(self, runs: TokenRuns) -> None:
        """Note that a pass that catches up is through."""
        self._note(runs, runs.start + runs.valid)

    def ahead(self, runs: TokenRuns) -> RecurrentRows:
        """Return the rows of a pass that follows drafts, one token each."""
        lines = runs.slots + self._null + 1
        return self._rows(runs, lines, torch.zeros_like(runs.valid), 1)

    def _note(self, runs: TokenRuns, held: Tensor) -> None:
        self._held[runs.slots] = torch.where(runs.valid > 0, held, self._held[runs.slots])

    def _rows(
        self, runs: TokenRuns, lines: Tensor, copied: Tensor, max_tokens: int
    ) -> RecurrentRows:
        """Return two rows for each run: its tokens, and its padding, which is the NULL slot's."""
        first, none, used = runs.cu_rows[:-1], torch.zeros_like(runs.valid), runs.valid > 0
        null = torch.full_like(lines, self._null)

        def paired(of_tokens: Tensor, of_padding: Tensor) -> Tensor:
            return torch.stack((of_tokens, of_padding), dim=1).flatten()

        zeros = paired(none, none)
        return RecurrentRows(
            slots=paired(torch.where(used, lines, null), null),
            cu_rows=torch.cat((paired(first, first + runs.valid), runs.cu_rows[-1:])),
            start=paired(runs.start, none),
            pending=zeros,
            window=zeros,
            snapshot_after=paired(copied, none),
            snapshot_line=paired((runs.slots + self._null + 1).int(), none),
            chunked=zeros,
            max_tokens=max_tokens,
        )
