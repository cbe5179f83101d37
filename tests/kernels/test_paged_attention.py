from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.cases import (
    DTYPES,
    Context,
    assert_close,
    fill_cache,
    interpreted_in_turn,
    make_context,
    row_bounds,
)
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8, LayerCache
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

F32, BF16 = DTYPES
# Query heads, KV heads, head_dim, block size: groups of 1 to 8; pages that are parts of the blocks
# that a Triton kernel reads, have such as their parts, or neither.
HEADS = [(2, 2, 24, 8), (6, 2, 64, 16), (4, 1, 40, 128), (7, 1, 128, 24), (8, 1, 96, 40)]
MORE_HEADS = [(9, 3, 64, 16), (4, 4, 8, 16), (8, 1, 128, 16), (14, 2, 24, 16), (4, 1, 512, 16)]
LENGTHS = [1, 5, 17, 64, 90, 200]  # positions that the last token of a row sees
COUNTS = [1, 2, 16, 1, 23, 4]  # tokens of the row: decode, windows, prompts
LONGER, MORE = [1, 5, 16, 17, 64, 70, 150, 333], [1, 1, 5, 17, 1, 3, 100, 2]
WINDOWS = [1, 7, 8, 16, 64, 65, 100, 128, 1000]  # spans of 64 positions, and groups of 8


def attend(
    kernels: KernelSet,
    q: Tensor,
    cache: LayerCache,
    context: Context,
    rows: list[tuple[int, int, int]],
    *,
    wider: list[int] | None = None,
    **options: Any,
) -> Tensor:
    """Attention of rows (context row, start, tokens), whose queries follow each other in q."""
    slots = torch.tensor([row for row, _, _ in rows])
    start = torch.tensor([start for _, start, _ in rows], dtype=torch.int32)
    counts = [count for _, _, count in rows]
    batch = AttentionRows(context.block_tables, slots, row_bounds(counts), start, max(counts))
    if wider is not None:
        batch = batch._replace(wider=torch.tensor(wider, dtype=torch.int32))
    return kernels.paged_attention(q, cache, batch, q.shape[2] ** -0.5, **options)


def all_rows(
    lengths: list[int] = LENGTHS, counts: list[int] = COUNTS
) -> list[tuple[int, int, int]]:
    return [(row, n - c, c) for row, (n, c) in enumerate(zip(lengths, counts, strict=True))]


def assert_as_reference(
    column: KernelSet,
    reference: KernelSet,
    q: Tensor,
    context: Context,
    rows: list[tuple[int, int, int]],
    pages: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """With pages that are NaN wherever nothing was stored."""
    expected, actual = (
        attend(kernels, q, fill_cache(kernels, context, *pages), context, rows, **options)
        for kernels in (reference, column)
    )
    assert actual.isfinite().all()
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("column", "heads", "dtype"),
    [
        *(("c", heads, dtype) for heads in (*HEADS, *MORE_HEADS) for dtype in DTYPES),
        *(("triton", heads, F32) for heads in HEADS),
        *(("triton", heads, BF16) for heads in HEADS[:3]),
    ],
    indirect=["column"],
    ids=str,
)
@interpreted_in_turn
def test_equals_the_reference_and_never_sees_unused_pages(
    column: KernelSet,
    reference: KernelSet,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    q_heads, kv_heads, head_dim, block_size = heads
    few = column.name != "C"
    lengths, counts = (LENGTHS, COUNTS) if few else (LONGER, MORE)
    context = make_context(lengths, kv_heads, head_dim, dtype, block_size)
    q = torch.randn(sum(counts), q_heads, head_dim).to(dtype)
    assert_as_reference(column, reference, q, context, all_rows(lengths, counts))


@pytest.mark.parametrize(
    ("column", "window", "dtype"),
    [
        *(("c", window, dtype) for window in WINDOWS for dtype in DTYPES),
        *(("triton", window, F32) for window in (1, 7, 16, 100, 1000)),
    ],
    indirect=["column"],
    ids=str,
)
def test_a_sliding_window_and_sinks(
    column: KernelSet, reference: KernelSet, window: int, dtype: torch.dtype
) -> None:
    few = column.name != "C"
    lengths, counts = (LENGTHS, COUNTS) if few else (LONGER, MORE)
    kv_heads, rows = (1, all_rows()) if few else (2, all_rows(lengths, counts))
    whole, context = (make_context(lengths, kv_heads, 24, dtype) for _ in range(2))
    for row, start, _ in rows:  # what no token of the row sees
        for part in (context.k, context.v):
            part[row][: max(0, start + 1 - window)] = torch.nan
    sinks = torch.tensor([-3.0, 0.5, 9, -40, 40, 0])[: 3 * kv_heads]
    q = torch.randn(sum(counts), 3 * kv_heads, 24).to(dtype)
    assert_as_reference(column, reference, q, context, rows, window=window, sinks=sinks)
    if not few or window == 16:
        assert_as_reference(column, reference, q, context, rows, window=window)
        assert_as_reference(column, reference, q, whole, rows, sinks=sinks)


@pytest.mark.parametrize("window", [0, 1, 16, 100])
def test_rows_whose_windows_are_wider(column: KernelSet, window: int) -> None:
    """Each is what a window of its width gives alone; without a window all is seen anyway."""
    context, q = make_context(LENGTHS, 2, 24, F32), torch.randn(sum(COUNTS), 6, 24)
    cache, rows, wider = fill_cache(column, context), all_rows(), [0, 3, 15, 16, 0, 70]
    made = attend(column, q, cache, context, rows, window=window, wider=wider)
    parts = made.split(COUNTS), q.split(COUNTS), rows, wider
    for part, own, row, more in zip(*parts, strict=True):
        alone = attend(column, own, cache, context, [row], window=window and window + more)
        assert_close(part, alone)


@pytest.mark.parametrize(
    ("pages", "dtype"),
    [((), F32), ((), BF16), ((FP8, torch.tensor((0.02, 0.5))), BF16)],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 16])
def test_a_soft_cap(
    column: KernelSet, reference: KernelSet, window: int, pages: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """Some scores are far beyond it, others hardly notice."""
    context, q = make_context(LENGTHS, 2, 40, dtype), 4 * torch.randn(sum(COUNTS), 6, 40)
    options: dict[str, Any] = {"window": window, "softcap": 3.0, "sinks": torch.randn(6)}
    assert_as_reference(column, reference, q.to(dtype), context, all_rows(), pages, **options)


@pytest.mark.parametrize(("dtype", "scales"), [(F32, None), (BF16, (0.02, 0.5))], ids=str)
def test_fp8_pages(
    column: KernelSet,
    reference: KernelSet,
    dtype: torch.dtype,
    scales: tuple[float, float] | None,
) -> None:
    context, q = make_context(LENGTHS, 2, 40, dtype), torch.randn(sum(COUNTS), 6, 40).to(dtype)
    pages = FP8, None if scales is None else torch.tensor(scales)
    assert_as_reference(column, reference, q, context, all_rows(), pages, sinks=torch.randn(6))


def test_a_sink_is_a_logit_without_a_value(reference: KernelSet) -> None:
    context = make_context([40], 1, 16, torch.float32)
    q, sinks = torch.randn(7, 2, 16), torch.tensor([0.5, -2.0])
    cache = fill_cache(reference, context)
    actual = attend(reference, q, cache, context, [(0, 33, 7)], sinks=sinks, window=9)
    scores = torch.einsum("qhd,ld->hql", q, context.k[0][:, 0]) / 4
    distance = torch.arange(33, 40)[:, None] - torch.arange(40)
    scores = scores.masked_fill((distance < 0) | (distance > 8), float("-inf")).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    assert_close(actual, torch.einsum("hql,ld->qhd", weights, context.v[0][:, 0]))


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_the_reference_caps_scores_as_transformers_does(
    reference: KernelSet, softcap: float
) -> None:
    context, q = make_context([40], 3, 16, torch.float32), 8 * torch.randn(7, 9, 16)
    cache = fill_cache(reference, context)
    actual = attend(reference, q, cache, context, [(0, 33, 7)], softcap=softcap)
    k, v = (x[0].transpose(0, 1)[None] for x in (context.k, context.v))
    mask = torch.zeros(7, 40).masked_fill(~torch.ones(7, 40, dtype=torch.bool).tril(33), -torch.inf)
    layer: Any = SimpleNamespace(num_key_value_groups=3, training=False)
    heads = q.transpose(0, 1)[None]
    theirs, _ = eager_attention_forward(layer, heads, k, v, mask, scaling=0.25, softcap=softcap)
    assert_close(actual, theirs[0])


def test_the_reference_equals_dense_attention(reference: KernelSet) -> None:
    context = make_context([40], 3, 16, torch.float32)
    q = torch.randn(7, 9, 16)
    actual = attend(reference, q, fill_cache(reference, context), context, [(0, 33, 7)])
    k, v = (x[0].repeat_interleave(3, dim=1).transpose(0, 1) for x in (context.k, context.v))
    mask = torch.ones(7, 40, dtype=torch.bool).tril(33)
    dense = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask)
    assert_close(actual, dense.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 5, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [heads[:3] for heads in MORE_HEADS])
def test_decode_windows_and_prefill_agree_bit_for_bit(
    native: KernelSet, heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    """Any cut of a sequence into rows, beside any neighbours, gives the bits of one prefill."""
    length = 210
    context = make_context([length, 90], kv_heads, head_dim, dtype)
    cache = fill_cache(native, context)
    q = torch.randn(length, heads, head_dim).to(dtype)
    neighbour = torch.randn(30, heads, head_dim).to(dtype)
    more: dict[str, Any] = {"window": window, "sinks": torch.randn(heads), "softcap": window / 20}
    options = more if window else {}
    native.set_num_threads(2)
    whole = attend(native, q, cache, context, [(0, 0, length)], **options)
    for trial in range(30):
        native.set_num_threads(1 + trial % 3)
        first = int(torch.randint(0, length, ()))
        count = int(torch.randint(1, min(length - first, [1, 6, 80][trial % 3]) + 1, ()))
        mixed = torch.cat((neighbour, q[first : first + count]))
        rows = [(1, 60, 30), (0, first, count)]
        out = attend(native, mixed, cache, context, rows, **options)
        assert torch.equal(out[30:], whole[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_prompt_gives_the_bits_of_its_tokens_alone(
    native: KernelSet, dtype: torch.dtype
) -> None:
    """Larger tiles are made of many tokens."""
    length = 850
    context = make_context([length], 2, 24, dtype)
    cache, q = fill_cache(native, context), torch.randn(length, 6, 24).to(dtype)
    native.set_num_threads(2)
    whole = attend(native, q, cache, context, [(0, 0, length)])
    for first in torch.randint(0, length - 5, (40,)).tolist():
        for count in (1, 5):
            alone = attend(native, q[first : first + count], cache, context, [(0, first, count)])
            assert torch.equal(alone, whole[first : first + count]), (first, count)


@pytest.fixture
def exact_products(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, products are NumPy's, whose last bits depend on a row's place.

    In double precision, rounded once, they do not.
    """
    if gpu == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return TensorHandle(product.astype(np.float32) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("column", ["triton"], indirect=True)
@pytest.mark.parametrize(("window", "dtype"), [(0, F32), (50, BF16)], ids=str)
def test_decode_windows_and_prompts_over_the_border_between_splits_agree(
    column: KernelSet, window: int, dtype: torch.dtype
) -> None:
    """Any cut of a sequence into rows, beside any neighbours, gives the bits of one prompt."""
    length, begin = 270, 235
    context = make_context([length, 60], 1, 24, dtype)
    cache = fill_cache(column, context)
    q, other = torch.randn(length, 3, 24).to(dtype), torch.randn(6, 3, 24).to(dtype)
    prompt = [(0, begin, length - begin)]
    whole = attend(column, q[begin:], cache, context, prompt, window=window)
    for first, count in ((255, 4), (257, 1), (244, 16)):
        own, expected = q[first : first + count], whole[first - begin : first - begin + count]
        alone = attend(column, own, cache, context, [(0, first, count)], window=window)
        rows = [(1, 30, 6), (0, first, count)]
        mixed = attend(column, torch.cat((other, own)), cache, context, rows, window=window)
        assert torch.equal(alone, expected), (first, count)
        assert torch.equal(mixed[6:], expected), (first, count)


@pytest.mark.parametrize("which", ["k and v", "v"])
def test_what_lies_behind_a_token_does_not_change_it(column: KernelSet, which: str) -> None:
    """A rejected draft, even one that is NaN, in its values alone or not, leaves no trace."""
    context, q = make_context([100], 1, 24, F32), torch.randn(5, 3, 24)
    clean = attend(column, q, fill_cache(column, context), context, [(0, 95, 5)])
    context.v[0][98:] = torch.nan
    if which == "k and v":
        context.k[0][98:] = torch.nan
    dirty = attend(column, q, fill_cache(column, context), context, [(0, 95, 5)])
    assert torch.equal(dirty[:3], clean[:3])
    assert dirty[3:].isnan().all()


def test_what_lies_before_a_window_does_not_change_it(column: KernelSet) -> None:
    """Its pages may be gone: they name the null block, which holds anything."""
    context, q = make_context([100], 1, 24, F32), torch.randn(5, 3, 24)
    cache = fill_cache(column, context)
    clean = attend(column, q, cache, context, [(0, 95, 5)], window=30)
    context.block_tables[0, : (96 - 30) // context.block_size] = 0  # whole pages
    assert cache.k[0].isnan().all()
    gone = attend(column, q, cache, context, [(0, 95, 5)], window=30)
    assert torch.equal(gone, clean)


def test_a_slice_of_a_projection(column: KernelSet) -> None:
    context = make_context([50], 2, 24, F32)
    cache, qkv = fill_cache(column, context), torch.randn(3, 8, 24)
    sliced, packed = qkv[:, :4], qkv[:, :4].contiguous()
    assert torch.equal(
        attend(column, sliced, cache, context, [(0, 47, 3)]),
        attend(column, packed, cache, context, [(0, 47, 3)]),
    )
