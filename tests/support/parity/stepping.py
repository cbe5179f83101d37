"""Drives a model without the runner, row by row, greedily, or beside transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache, KVSpec
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCKS = range(1, 12)  # of a sequence that is alone
_BLOCK_SIZE = 8
WINDOW = 4  # tokens that a recurrent layer may have to take back


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


class Pair:
    """One model, loaded by transformers and by us: of one folder, or of `ours` for us."""

    def __init__(
        self,
        folder: Path,
        kernels: KernelSet,
        *,
        ours: Path | None = None,
        kind: Any = AutoModelForCausalLM,
        near: float = 1e-4,  # parts of the logits' standard deviation that may differ
    ) -> None:
        self._theirs = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.kernels, self._near = kernels, near
        where: dict[str, Any] = {"device": "cpu", "tp": TensorParallel(), "kernels": kernels}
        self.model: Model = load_model(ModelSource(ours or folder), dtype="auto", **where)

    def caches(self) -> Caches:
        """Fresh ones, in which whatever was never written is NaN."""
        kv = KVCache(in_one_group(self.model.kv_spec(_BLOCK_SIZE)), 40, self.kernels, "cpu")
        spec = self.model.recurrent_spec()
        recurrent = None if spec is None else RecurrentCache(spec, 3, WINDOW, 1, "cpu")
        pages = [tensor for layer in kv.layers for tensor in layer.pages]
        for tensor in (*pages, *(recurrent.tensors() if recurrent else ())):
            tensor.fill_(torch.nan)
        return Caches(kv, recurrent)

    @torch.no_grad()
    def expected(self, ids: Sequence[int]) -> Tensor:
        """Logits f32[L, V] of transformers."""
        logits: Tensor = self._theirs(torch.tensor([ids])).logits[0]
        return logits

    def consume(
        self, ids: Sequence[int], cuts: Iterable[int] = (), caches: Caches | None = None
    ) -> Tensor:
        """Our logits of a prompt that is cut at these places, in slot 1."""
        caches = caches or self.caches()
        rows = [Row(ids[a:b], a, BLOCKS, slot=1) for a, b in pairwise([0, *cuts, len(ids)])]
        return torch.cat([step(self.model, caches, [row])[0] for row in rows])

    def assert_near(self, actual: Tensor, expected: Tensor) -> None:
        """Hold logits to those of transformers."""
        spread = expected.std()
        assert spread > 0.3, "logits too flat to tell right from wrong"
        assert (actual - expected).abs().max() < self._near * spread

    def assert_no_cut_matters(self, length: int, *, bit: bool) -> None:
        """In two anywhere, in pieces of any size, token by token; not a bit, if `bit`."""
        ids = random_prompt(length)
        expected, whole = self.expected(ids), self.consume(ids)
        self.assert_near(whole, expected)
        in_two = [[cut] for cut in range(2, length)]
        for cuts in (*in_two, *(list(range(size, length, size)) for size in range(1, length))):
            logits = self.consume(ids, cuts)
            self.assert_near(logits, expected)
            assert torch.equal(logits, whole) or not bit, cuts

    def assert_windows_leave_no_trace(self, length: int) -> None:
        """Of rejected drafts, NaN behind them included, nothing is in what stands."""
        ids, caches, done = random_prompt(length), self.caches(), 3
        expected = self.expected(ids)
        step(self.model, caches, [Row(ids[:done], 0, BLOCKS)])
        while done < length - 6:
            width, accepted = 1 + done % 6, 1 + done * 5 % (1 + done % 6)
            tokens = [*ids[done : done + accepted], *random_prompt(width - accepted, seed=done)]
            (logits,) = step(self.model, caches, [Row(tokens, done, BLOCKS, window=True)])
            self.assert_near(logits[:accepted], expected[done : done + accepted])
            done += accepted

    def together(self) -> list[tuple[list[int], Tensor]]:
        """Three prompts and their logits, cut after five tokens, in batches of changing order."""
        prompts = [random_prompt(9 + 3 * line, seed=line) for line in range(3)]
        caches, found = self.caches(), list[list[Tensor]]([[], [], []])
        for order, a, b in (((2, 0, 1), 0, 5), ((1, 2, 0), 5, None)):
            rows = [
                Row(prompts[line][a:b], a, range(1 + 4 * line, 5 + 4 * line), slot=line)
                for line in order
            ]
            for line, logits in zip(order, step(self.model, caches, rows), strict=True):
                found[line].append(logits)
        return [(ids, torch.cat(parts)) for ids, parts in zip(prompts, found, strict=True)]
