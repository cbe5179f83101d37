"""Latent attention: as the reference, and bit for bit as if alone."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import assert_close, row_bounds
from support.kernels.columns import triton_kernels
from support.kernels.latents import (
    COUNTS,
    KEY,
    TOP_K,
    TYPES,
    VALUES,
    WIDTH,
    Sequences,
    tokens,
)
from surestep_kernels import KernelSet
from surestep_kernels.latent_attention import store_latents
from surestep_kernels.latent_attention import triton as latent_attention_triton
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8
from torch import Tensor

TOKENS = sum(COUNTS)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("column", "heads"),
    [("c", 1), ("c", 4), ("c", 11), ("triton", 4), ("triton", 19)],
    indirect=["column"],
)
@pytest.mark.parametrize(("dtype", "page_dtype"), TYPES, ids=str)
@pytest.mark.rotates(1)
def test_equals_the_reference_and_is_the_same_alone(
    column: KernelSet,
    reference: KernelSet,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    heads: int,
    sparse: bool,
) -> None:
    sequences, q = Sequences(WIDTH, page_dtype), torch.randn(TOKENS, heads, WIDTH).to(dtype)
    rows, chosen = sequences.rows(), None
    if sparse:
        keys, index = Sequences(KEY, page_dtype), torch.randn(TOKENS, 3, KEY).to(dtype)
        on_keys = rows._replace(block_tables=keys.tables)
        weights = torch.randn(TOKENS, 3)
        chosen = reference.latent.choose(index, weights, keys.pages, on_keys, TOP_K)
    out = column.latent.attend(q, sequences.pages, rows, 0.3, VALUES, chosen)
    expected = reference.latent.attend(q, sequences.pages, rows, 0.3, VALUES, chosen)
    assert_close(out, expected)
    for token, row, i in tokens(rows)[::5]:
        line = slice(token, token + 1)
        one, few = sequences.alone(rows, row, i), None if chosen is None else chosen[line]
        alone = column.latent.attend(q[line], sequences.pages, one, 0.3, VALUES, few)
        assert torch.equal(alone[0], out[token])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, as interpreter
def test_every_number_of_fp8_is_read(kernels: KernelSet) -> None:
    """Attend to one position: the outcome is its value, NaN and what is saturated included."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 1, 256)
    rows = AttentionRows(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        row_bounds([1]),
        torch.zeros(1, dtype=torch.int32),
        1,
    )
    numbers = codes.flatten().float()
    finite = torch.where(numbers.isnan(), 0.0, numbers).to(FP8).view(1, 1, 256)
    q = torch.zeros(1, 1, 256)
    out = kernels.latent.attend(q, finite, rows, 1.0, 256).flatten()
    assert torch.equal(out, finite.flatten().float())
    assert kernels.latent.attend(q, codes, rows, 1.0, 256).isnan().all()
    store_latents(
        torch.tensor([[1e9, -1e9, torch.nan]]),
        stored := torch.zeros(1, 1, 3).to(FP8),
        torch.zeros(1, dtype=torch.int64),
    )
    assert stored.float().flatten()[:2].tolist() == [448.0, -448.0]
    assert stored.float().flatten()[2].isnan()


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_tokens_of_no_row(column: KernelSet, reference: KernelSet) -> None:
    """Rows without tokens, and tokens behind the last row, disturb no others."""
    sequences = Sequences(WIDTH, torch.float32)
    rows = sequences.rows()
    q = torch.randn(TOKENS + 3, 4, WIDTH)
    empty = rows._replace(
        slots=torch.cat((rows.slots, rows.slots[:1])),
        cu_rows=torch.cat((rows.cu_rows, rows.cu_rows[-1:])),
        start=torch.cat((rows.start, rows.start[:1])),
    )
    out = column.latent.attend(q, sequences.pages, empty, 0.3, VALUES)
    expected = reference.latent.attend(q, sequences.pages, rows, 0.3, VALUES)
    assert_close(out[:TOKENS], expected[:TOKENS])


def test_threads_change_nothing(native: KernelSet) -> None:
    """Nor what is chosen."""
    sequences = Sequences(KEY, torch.float32)
    rows, q = sequences.rows(), torch.randn(sum(COUNTS), 32, KEY)
    weights, results = torch.randn(sum(COUNTS), 32), list[Tensor]()
    for threads in (1, 3):
        native.set_num_threads(threads)
        chosen = native.latent.choose(q, weights, sequences.pages, rows, TOP_K)
        results.append(native.latent.attend(q, sequences.pages, rows, 0.3, 16, chosen))
    native.set_num_threads(1)
    assert torch.equal(*results)


@pytest.mark.rotates(1 if torch.cuda.is_available() else 2)
@pytest.mark.parametrize(("window", "scratch"), [(4, 1 << 20), (16, 4000)])
def test_splits_are_merged_alike_in_scratch_and_in_a_program(
    gpu: str, monkeypatch: pytest.MonkeyPatch, window: int, scratch: int
) -> None:
    """Rows that are long, and rows for which no scratch is left."""
    sequences, q = Sequences(WIDTH, torch.float32), torch.randn(TOKENS, 2, WIDTH)
    rows, attend = sequences.rows(), triton_kernels(gpu).latent.attend
    expected = attend(q, sequences.pages, rows, 0.3, VALUES)
    monkeypatch.setattr(latent_attention_triton, "_WINDOW", window)
    monkeypatch.setattr(latent_attention_triton, "MAX_SCRATCH", scratch)
    assert torch.equal(attend(q, sequences.pages, rows, 0.3, VALUES), expected)
