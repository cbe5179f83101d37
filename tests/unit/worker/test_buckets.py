"""Shapes of captured steps, and what is laid out in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from surestep_kernels.compilations import Compilations
from surestep_proto import engine_pb2 as pb
from surestep_worker.device.buckets import Bucket, find_bucket, make_buckets
from surestep_worker.device.geometry import Geometry
from surestep_worker.device.upload import Int32Array, num_words, upload
from surestep_worker.plan import NOTHING_ARMED, Rows
from surestep_worker.slots import Slots


def rows_of(k_caps: list[int], catch_up: int = 0, mode: pb.DecodeMode = pb.VERIFY) -> Rows:
    count = len(k_caps)
    told = {
        "slot": np.arange(count)[::-1],
        "mode": np.full(count, mode),
        "k_cap": np.array(k_caps),
        "num_tokens": np.full(count, int(mode != pb.VERIFY)),
        "catch_up": np.full(count, catch_up),
    }
    nothing = np.zeros(count, dtype=np.int64)
    return Rows(**{name: told.get(name, nothing) for name, _ in Rows.none().columns()})


def test_there_are_few() -> None:
    buckets = make_buckets(max_rows=200, max_window=4)
    assert {bucket.window for bucket in buckets} == {1, 2, 4}
    assert {bucket.rows for bucket in buckets} == {1, 2, 4, 8, 16, 32, 64, 128, 200}
    sizes = [bucket.rows * bucket.window for bucket in buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert max(bucket.rows * bucket.window for bucket in make_buckets(1000, 17)) <= 1024


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(0, 7), st.booleans())
def test_a_step_gets_the_least_that_has_room(
    k_caps: list[int], catch_up: int, catches_up: bool
) -> None:
    buckets = make_buckets(max_rows=24, max_window=5)
    found = find_bucket(rows_of(k_caps, catch_up), buckets, catches_up=catches_up)
    window = max(1 + max(k_caps), catch_up if catches_up else 0)
    fits = [b for b in buckets if b.rows >= len(k_caps) and b.window >= window]
    assert (found is None) == (not fits) == (window > 5)
    if found is not None:
        assert found in fits
        assert all(b.window >= found.window for b in fits)
        assert all(b.rows >= found.rows for b in fits if b.window == found.window)


@pytest.mark.parametrize("rows", [rows_of([]), rows_of([0], mode=pb.PREFILL_LAST)])
def test_prompts_and_nothing_have_none(rows: Rows) -> None:
    assert find_bucket(rows, make_buckets(4, 4), catches_up=False) is None


def test_padding_stands_behind_and_belongs_to_the_null_slot() -> None:
    slots = Slots(num_slots=9, max_model_len=32, max_draft_tokens=3, block_size=8)
    wants = np.zeros(9, dtype=np.bool_)
    geometry = Geometry.of(rows_of([3, 0, 1]), slots, wants, NOTHING_ARMED, Bucket(4, 4))
    assert np.asarray(geometry.rows.slot).tolist() == [2, 1, 0, 9]
    assert geometry.k_cap.tolist() == [3, 0, 1, 0]
    assert np.asarray(geometry.rows.cu_rows).tolist() == [0, 4, 8, 12, 16]
    assert geometry.window_row.tolist() == [0, 1, 2]
    assert geometry.window_slot.tolist() == [2, 1, 0, 9]
    assert geometry.hidden_index.tolist() == list(range(16))


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
    host = Columns(columns[0], columns[1], None, Inner(columns[2]))
    tree, words = upload(host, torch.device("cpu"))
    base = words.data_ptr()
    for sent, column in zip((tree.first, tree.second, tree.third.column), columns, strict=True):
        assert torch.as_tensor(sent).tolist() == column.tolist()
        assert (torch.as_tensor(sent).data_ptr() - base) % 16 == 0 or not len(column)
    assert num_words(host) == len(words)


def test_what_is_compiled_while_serving_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    compilations = Compilations()
    compilations.note("early")
    assert compilations.num_late == 0
    compilations.serve()
    compilations.note("late_kernel")
    assert compilations.num_late == 1
    assert "late_kernel was compiled while serving" in caplog.text
