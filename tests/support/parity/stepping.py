"""Drives a model without the runner: packs rows into a StepBatch and steps greedily."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache, KVSpec
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.models import Model
from torch import Tensor


class Row(NamedTuple):
    """Tokens of one sequence to consume from position `start` on, and its KV blocks in order."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = 0  # of recurrent state, with `pending` records of the last window to fold
    pending: int = 0
    window: bool = False  # tokens that may still be rejected


def pack(rows: Sequence[Row], block_size: int) -> StepBatch:
    """A batch of all rows that wants the logits of every token."""
    positions = [range(row.start, row.start + len(row.tokens)) for row in rows]
    kv_slots = [
        row.blocks[p // block_size] * block_size + p % block_size
        for row, span in zip(rows, positions, strict=True)
        for p in span
    ]
    counts = torch.tensor([0, *(len(row.tokens) for row in rows)])
    width = max(len(row.blocks) for row in rows)
    tables = [[*row.blocks, *[NULL_BLOCK] * (width - len(row.blocks))] for row in rows]
    attention = AttentionRows(
        torch.tensor(tables, dtype=torch.int32),
        torch.arange(len(rows)),
        counts.cumsum(0).to(torch.int32),
        _column(row.start for row in rows),
        max_tokens=int(counts.max()),
    )
    return StepBatch(
        token_ids=torch.tensor([token for row in rows for token in row.tokens]),
        positions=torch.tensor([p for span in positions for p in span]),
        groups=(GroupPages(attention, torch.tensor(kv_slots)),),
        hidden_index=torch.arange(int(counts.sum())),
        recurrent=RecurrentRows(
            slots=torch.tensor([row.slot for row in rows]),
            cu_rows=counts.cumsum(0).to(torch.int32),
            start=_column(row.start for row in rows),
            pending=_column(row.pending for row in rows),
            window=_column(int(row.window) for row in rows),
            snapshot_after=_column(0 for _ in rows),
            snapshot_line=_column(0 for _ in rows),
            chunked=_column(0 for _ in rows),
            max_tokens=int(counts.max()),
        ),
    )


def in_one_group(spec: KVSpec) -> KVSpec:
    """The same cache, but that layers with windows keep their pages too."""
    return replace(spec, windows=(0,) * len(spec.windows))


def random_prompt(length: int, seed: int = 3) -> list[int]:
    """Random ids that the tiny checkpoints know, none of them special."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(3, 380, (length,), generator=rng).tolist()


def _column(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@torch.inference_mode()
def step(model: Model, kv: KVCache | Caches, rows: Sequence[Row]) -> list[Tensor]:
    """Forward all rows in one batch; returns each row's logits f32[num_tokens, V]."""
    caches = kv if isinstance(kv, Caches) else Caches(kv)
    batch = pack(rows, caches.kv.spec.block_size)
    logits = model.logits(model.forward(batch, caches)[batch.hidden_index])
    return list(torch.split(logits, [len(row.tokens) for row in rows]))


def generate(
    model: Model, kv: KVCache, prompt: Sequence[int], max_tokens: int, chunk: int
) -> list[int]:
    """Greedy ids after `prompt`, up to and including the first end-of-sequence token.

    The prompt is consumed in chunks of `chunk` tokens; the sequence occupies blocks 1, 2, ...
    """
    blocks = range(1, 2 + (len(prompt) + max_tokens) // kv.spec.block_size)
    for start in range(0, len(prompt), chunk):
        logits = step(model, kv, [Row(prompt[start : start + chunk], start, blocks)])[0]
    emitted = [int(logits[-1].argmax())]
    while len(emitted) < max_tokens and emitted[-1] not in model.config.eos_token_ids:
        start = len(prompt) + len(emitted) - 1
        logits = step(model, kv, [Row(emitted[-1:], start, blocks)])[0]
        emitted.append(int(logits[-1].argmax()))
    return emitted
