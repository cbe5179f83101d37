"""The ops of a step in C, called through ctypes like those of ops.py.

Named tuples of tensors are passed as arrays of pointers, which are structs of the same fields in C.
Choosing and shaping release the interpreter lock; the other ops take less time than releasing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, PyDLL, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.choose import Chosen, DrawParams
from surestep_kernels.commit_step import StopIds, report_width
from surestep_kernels.gather_step import StepInputs
from surestep_kernels.gather_tokens import TokenInputs, TokenRuns
from surestep_kernels.ngram import NgramDrafts
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import StepOps
from surestep_kernels.write_runs import Runs

from .binding import bind

_P, _L, _I = c_void_p, c_long, c_int
_SIGNATURES: dict[str, list[Any]] = {
    "write_runs": [_P, _P, _P, _P, _L],
    "gather_tokens": [_P, _P, _P, _P, _L, _L, _P],
    "gather_step": [_P, _P, _P, _P, _P, _L, _L, _L, _L, _P],
    "commit_step": [_P, _P, _P, _P, _P, _P, _L, _L, _P],
    "fingerprint": [_P, _P, _P, _P, _L, _L, _L, _I],
}
_SIGNATURES_UNLOCKED: dict[str, list[Any]] = {
    "choose": [_P, _P, _P, _P, _P, _P, _L, _L, _I, _I],
    "bias": [_P, _L, _P, _P, _L],
    "penalise": [_P, _L, _P, _P, _L],
    "forbid": [_P, _L, _P, _P, _L],
    "mask": [_P, _L, _P, _P, _L],
    "ngram": [_P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L],
}
_RESULTS: dict[str, Any] = {"fingerprint": c_int64}
_RESULTS |= dict.fromkeys(("choose", "bias", "penalise", "forbid", "mask"), c_int)


@dataclass(frozen=True, slots=True)
class CpuStepOps:
    """The ops of one compiled library; the C function of each op is a field."""

    c_write_runs: Callable[..., None]
    c_gather_tokens: Callable[..., None]
    c_gather_step: Callable[..., None]
    c_commit_step: Callable[..., None]
    c_fingerprint: Callable[..., int]
    c_choose: Callable[..., int]
    c_bias: Callable[..., int]
    c_penalise: Callable[..., int]
    c_forbid: Callable[..., int]
    c_mask: Callable[..., int]
    c_ngram: Callable[..., None]

    @classmethod
    def load(cls, library: Path) -> CpuStepOps:
        """Open a library by its file name (see `file_of`). Raises OSError if that fails."""
        locked, unlocked = PyDLL(str(library)), CDLL(str(library))
        functions = {
            f"c_{op}": bind(opened, op, args, _RESULTS.get(op))
            for opened, ops in ((locked, _SIGNATURES), (unlocked, _SIGNATURES_UNLOCKED))
            for op, args in ops.items()
        }
        return cls(**functions)

    @property
    def table(self) -> StepOps:
        """Return all ops of a step as a table."""
        return StepOps(
            write_runs=self.write_runs,
            gather_step=self.gather_step,
            gather_tokens=self.gather_tokens,
            shape_logits=self.shape_logits,
            choose=self.choose,
            commit_step=self.commit_step,
            fingerprint=self.fingerprint,
        )

    def write_runs(self, memory: Tensor, runs: Runs) -> None:
        pointers = (x.data_ptr() for x in (memory, runs.to, runs.cu, runs.words))
        self.c_write_runs(*pointers, len(runs.to))

    def gather_step(
        self,
        rows: StepRows,
        drafts: DraftIds,
        state: SlotState,
        error: Tensor,
        block_size: int,
        num_blocks: int,
    ) -> StepInputs:
        num_rows, num_drafts = drafts.ids.shape
        num_tokens, num_positions = len(rows.token_row), len(rows.position_row)
        tokens = _token_inputs(num_tokens, state)
        slots = torch.empty(num_rows, dtype=torch.int64)
        columns = _empty(torch.int32, [num_rows] * 4 + [num_positions])
        start, valid, pending, snapshot_after, lengths = columns
        inputs = StepInputs(*tokens, start, valid, slots, pending, snapshot_after, lengths)
        structs = _struct(inputs), _struct(rows), _struct(drafts), _struct(state)
        counts = num_rows, num_tokens, num_positions, num_drafts
        sizes = _table_sizes(state, block_size, num_blocks)
        self.c_gather_step(*structs, error.data_ptr(), *counts, sizes)
        return inputs

    def gather_tokens(
        self,
        runs: TokenRuns,
        state: SlotState,
        error: Tensor,
        *,
        shift: int,
        block_size: int,
        num_blocks: int,
    ) -> TokenInputs:
        num_tokens = len(runs.token_row)
        inputs = _token_inputs(num_tokens, state)
        structs = _struct(inputs), _struct(runs), _struct(state)
        sizes = _table_sizes(state, block_size, num_blocks)
        self.c_gather_tokens(*structs, error.data_ptr(), num_tokens, shift, sizes)
        return inputs

    def shape_logits(self, z: Tensor, positions: Positions, shaping: Shaping) -> None:
        assert z.dtype is torch.float32
        assert z.is_contiguous()
        vocab, width = z.shape[1], positions.tokens.shape[1]
        at = _struct(positions, width)
        shapes = self.c_bias, self.c_penalise, self.c_forbid, self.c_mask
        for shape, asked in zip(shapes, shaping, strict=True):
            if asked is not None:
                done = shape(z.data_ptr(), vocab, at, _struct(asked), len(asked.which))
                _check_memory(done)

    def choose(
        self,
        z: Tensor,
        window: Tensor,
        length: Tensor,
        params: DrawParams,
        *,
        random: bool,
        truncated: bool,
    ) -> Chosen:
        assert z.dtype is torch.float32
        assert z.is_contiguous()
        rows, vocab = z.shape
        chosen = Chosen(*_empty(torch.int32, [rows, rows]))
        pointers = (x.data_ptr() for x in (*chosen, z, window, length))
        done = self.c_choose(*pointers, _struct(params), rows, vocab, random, truncated)
        _check_memory(done)
        return chosen

    def commit_step(
        self, rows: StepRows, drafts: DraftIds, chosen: Chosen, stops: StopIds, state: SlotState
    ) -> Tensor:
        num_rows, num_drafts = drafts.ids.shape
        report = torch.empty(num_rows, report_width(num_drafts), dtype=torch.int32)
        structs = (_struct(x) for x in (rows, drafts, chosen, stops, state))
        sizes = _table_sizes(state, 1, 0)
        self.c_commit_step(report.data_ptr(), *structs, num_rows, num_drafts, sizes)
        return report

    def fingerprint(self, hidden: Tensor, rows: StepRows, valid: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        inputs = hidden, rows.position_row, rows.position_offset, valid
        sizes = len(hidden), len(rows.position_row), hidden.shape[1], hidden.element_size()
        return torch.tensor([self.c_fingerprint(*(x.data_ptr() for x in inputs), *sizes)])

    def ngram(
        self,
        tokens: Tensor,
        slots: Tensor,
        lengths: Tensor,
        max_drafts: Tensor,
        *,
        num_drafts: int,
        max_n: int,
        min_n: int,
    ) -> NgramDrafts:
        assert tokens.is_contiguous()
        assert tokens.dtype is torch.int32
        rows, dtype = len(slots), slots.dtype
        ids = torch.empty(rows, num_drafts, dtype=torch.int32)
        counts = torch.empty(rows, dtype=torch.int32)
        data = ids, counts, tokens, *(_words(column) for column in (slots, lengths, max_drafts))
        sizes = rows, *tokens.shape, num_drafts, max_n, min_n
        self.c_ngram(*(x.data_ptr() for x in data), *sizes)
        return NgramDrafts(ids.to(dtype), counts.to(dtype))


def _empty(dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return one-dimensional tensors of these sizes, allocated together."""
    return torch.split_with_sizes(torch.empty(sum(sizes), dtype=dtype), sizes)


def _token_inputs(num_tokens: int, state: SlotState) -> TokenInputs:
    """Return room for T tokens and their places in every KV group."""
    words = torch.empty(2 + len(state.block_tables), num_tokens, dtype=torch.int64)
    return TokenInputs(words[0], words[1], words[2:])


def _words(column: Tensor) -> Tensor:
    """Return the column as i32; an index beyond that range does not exist anyway."""
    return column if column.dtype is torch.int32 else column.clamp(-1, (1 << 31) - 1).int()


def _struct(tensors: Sequence[Tensor], *sizes: int) -> bytes:
    """Return pointers to the tensors, which are made contiguous, followed by their sizes."""
    return pack(f"{len(tensors)}P{len(sizes)}l", *[x.data_ptr() for x in tensors], *sizes)


def _table_sizes(state: SlotState, block_size: int, num_blocks: int) -> bytes:
    lines, width = state.tokens.shape
    groups, _, pages = state.block_tables.shape
    return pack("6l", lines, width, groups, pages, block_size, num_blocks)


def _check_memory(done: int) -> None:
    if not done:
        raise MemoryError("no memory to choose tokens in")
