"""Shapes of captured steps, and what is laid out in them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import le
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.invariants import Int32Array
from surestep_kernels.step_columns import HostColumn
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.batch import Extras, Geometry, StepColumns
from surestep_worker.step.buckets import (
    StepSize,
    find_bucket,
    in_order,
    make_bucket,
    make_buckets,
    padding,
    step_size,
)
from surestep_worker.step.plan import NO_SNAPSHOTS, Rows
from surestep_worker.step.sampling import SamplingTable
from surestep_worker.step.slots import Slots
from surestep_worker.step.transfer import Download, InputBuffer, Layout, Packed, upload

CPU = torch.device("cpu")
STALE = 0x7F7F7F7F


def rows_of(max_drafts: list[int], prompts: list[int]) -> Rows:
    """Windows, then ends of prompts of so many tokens; slots in descending order."""
    count = len(max_drafts) + len(prompts)
    told = {
        "slot": np.arange(count)[::-1],
        "mode": np.array([pb.VERIFY] * len(max_drafts) + [pb.PREFILL_LAST] * len(prompts)),
        "max_drafts": np.array([*max_drafts, *[0] * len(prompts)]),
        "max_proposed": np.array([*max_drafts, *[0] * len(prompts)]),
        "num_tokens": np.array([*[0] * len(max_drafts), *prompts]),
    }
    nothing = np.zeros(count, dtype=np.int64)
    return Rows(**{name: told.get(name, nothing) for name, _ in Rows.none().columns()})


def columns_of(rows: Rows, slots: Slots) -> tuple[StepColumns[HostColumn], Geometry]:
    wants = np.zeros(slots.num_slots, dtype=np.bool_)
    geometry = Geometry.of(rows, slots, wants, NO_SNAPSHOTS)
    table = SamplingTable(slots.num_slots, 100)
    return StepColumns.of(geometry, table, rows.max_drafts), geometry


def make_slots(num_slots: int) -> Slots:
    return Slots(num_slots, max_model_len=64, max_draft_tokens=3, block_size=8)


def test_there_are_few() -> None:
    buckets = make_buckets(max_rows=200, max_window=4, max_tokens=2048)
    windows = [b for b in buckets if b.longest == b.window]
    assert {b.window for b in windows} == {1, 2, 4}
    assert {b.rows for b in windows if b.window == 1} == {
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 200)
    }
    sizes = [b.tokens for b in buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert max(b.tokens for b in make_buckets(1000, 17, 8192)) <= 1024
    assert max(b.tokens for b in make_buckets(8, 1, 100)) == 100
    assert len(buckets) < 80


@given(
    st.integers(1, 24), st.integers(1, 5), st.integers(0, 90), st.integers(0, 30), st.integers(0, 9)
)
def test_a_step_gets_the_least_that_has_room(
    rows: int, window: int, prompt: int, stops: int, others: int
) -> None:
    buckets = make_buckets(max_rows=24, max_window=5, max_tokens=64)
    tokens = rows - 1 + max(window, prompt) + min(others, rows - 1)
    size = StepSize(rows, window, tokens, max(window, prompt), rows - 1 + window, stops)
    found = find_bucket(size, in_order(buckets))
    fits = [b for b in buckets if all(map(le, size, b))]
    assert (found is None) == (not fits)
    if found is not None:
        assert all(b.window >= found.window for b in fits)
        assert all(b.longest >= found.longest for b in fits if b.window == found.window)
        like = [b for b in fits if b[1::2] == found[1::2]]
        assert all(b.tokens >= found.tokens for b in like)


@given(st.integers(1, 256), st.integers(1, 4))
def test_at_most_half_as_much_again_is_padding(rows: int, window: int) -> None:
    buckets = make_buckets(max_rows=256, max_window=4, max_tokens=2048)
    size = StepSize(rows, window, rows * window, window, rows * window, rows)
    found = find_bucket(size, in_order(buckets))
    assert found is not None
    assert found.rows <= max(rows * 1.5, rows + 1)


@given(st.integers(1, 256), st.integers(8, 700))
def test_so_it_is_where_prompts_are(rows: int, prompt: int) -> None:
    buckets = make_buckets(max_rows=256, max_window=4, max_tokens=2048)
    size = StepSize(rows, 1, rows + prompt, prompt, rows, rows)
    found = find_bucket(size, in_order(buckets))
    assert found is not None
    assert found.tokens <= max(size.tokens * 1.5, 32)


def test_nothing_and_what_is_scored_or_pooled_have_none() -> None:
    slots = make_slots(4)
    assert step_size(*columns_of(Rows.none(), slots)) is None
    wants = np.ones(4, dtype=np.bool_)
    slots.prompt_len[:] = 9
    rows = rows_of([], [5])
    scored = Geometry.of(rows, slots, wants, NO_SNAPSHOTS)
    assert step_size(columns_of(rows, slots)[0], scored) is None


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(1, 20), max_size=3),
    st.sampled_from([0, 1]),
)
def test_every_word_of_a_layout_is_written_and_padding_belongs_to_nobody(
    max_drafts: list[int], prompts: list[int], more: int
) -> None:
    """Whatever an earlier step has left there."""
    rows, slots = rows_of(max_drafts, prompts), make_slots(9)
    if not len(rows):
        return
    columns, geometry = columns_of(rows, slots)
    size = step_size(columns, geometry)
    assert size is not None
    tokens, count = size.tokens + 5 * more, size.rows + more
    bucket = make_bucket(count, 4, tokens, tokens)
    empty = padding(bucket, slots.num_slots, has_draft_head=False)
    input_buffer = InputBuffer([empty], CPU)
    layout = Layout(empty, input_buffer.words)
    input_buffer.words.fill_(STALE)
    input_buffer.send(layout, columns, Extras())
    sent = layout.columns.rows
    assert sent.slot.tolist() == [*geometry.rows.slot, *[9] * more]
    real = int(geometry.width.sum())
    assert sent.cu_rows.tolist() == [*geometry.rows.cu_rows, *[real] * more]
    assert sent.token_row.tolist()[real:] == [count - 1] * (tokens - real)
    assert all(sent.position_offset[size.positions :] > 1 << 28)
    assert not (input_buffer.words[: layout.num_words] == STALE).any()


class Inner(NamedTuple):
    column: Int32Array


class Columns(NamedTuple):
    """Of sizes that are no multiples of anything."""

    first: Int32Array
    second: Int32Array
    nothing: None
    third: Inner


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_every_column_arrives_at_an_aligned_address(sizes: list[int]) -> None:
    """Else a kernel is compiled again for each way in which its pointers are aligned."""
    columns = [np.arange(size, dtype=np.int32) + 100 * i for i, size in enumerate(sizes)]
    columns_of: Any = Columns(columns[0], columns[1], None, Inner(columns[2]))
    tree = upload(columns_of, CPU)
    sent = [tree.first, tree.second, tree.third.column]
    addresses = [column.data_ptr() for column in sent if len(column)]
    for column, expected in zip(sent, columns, strict=True):
        assert column.tolist() == expected.tolist()
    assert len({address % 16 for address in addresses}) <= 1


@pytest.mark.parametrize("count", [5, 1 << 15], ids=["behind", "by itself"])
def test_what_comes_with_a_step_travels_with_it_if_there_is_room(count: int) -> None:
    empty: Any = Inner(np.zeros(6, dtype=np.int32))
    input_buffer = InputBuffer([empty], CPU)
    layout: Any = Layout(empty, input_buffer.words)
    columns: Any = Inner(np.arange(3, dtype=np.int32))
    scored = np.full(count, 7, np.int32)
    sent = input_buffer.send(layout, columns, Extras(scored=scored)).scored
    assert sent is not None
    assert sent.tolist() == [7] * count
    assert layout.columns.column.tolist() == [0, 1, 2, 0, 0, 0]
    inside = sent.untyped_storage().data_ptr() == input_buffer.words.untyped_storage().data_ptr()
    assert inside == (count == 5)


def test_any_thread_waits_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's is the first, on which waiting alone would open a context."""
    current, waited = [0], list[int]()

    @contextmanager
    def device(wanted: int) -> Iterator[None]:
        before, current[0] = current[0], wanted
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    download: Any = Download(Packed.of([torch.zeros(1)]))
    download._event = SimpleNamespace(synchronize=lambda: waited.append(current[0]))
    download._device = 3
    with ThreadPoolExecutor(1) as thread:
        thread.submit(download.wait).result()
    assert (waited, current) == ([3], [0])


@pytest.mark.parametrize("name", ["scored", "prompt_ids", "adapters"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_does_more_than_choose_is_not_plain(name: str, size: int) -> None:
    column: Any = {name: np.zeros(size, dtype=np.int32)}
    assert Extras().plain
    assert not Extras(**column).plain
