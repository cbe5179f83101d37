from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from surestep_kernels import KernelSet
from surestep_kernels.ngram import NgramDrafts, RecentTexts
from surestep_kernels.ngram import triton as ops
from torch import Tensor

NUM_DRAFTS = 5
STALE = 1


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tens of tokens reach over several blocks."""
    monkeypatch.setattr(ops, "_BLOCK", 16)


def make_table(rows: list[list[int]]) -> Tensor:
    """Rows in slots 1, 3, 5, ...; what lies behind a row and in other slots is stale."""
    width = max(map(len, rows)) + 3
    tokens = torch.full((2 * len(rows) + 1, width), STALE, dtype=torch.int32)
    for r, known in enumerate(rows):
        tokens[2 * r + 1, : len(known)] = torch.tensor(known, dtype=torch.int32)
    return tokens


def propose(
    column: KernelSet, rows: list[list[int]], caps: list[int], min_n: int, max_n: int
) -> NgramDrafts:
    slots = torch.arange(len(rows)) * 2 + 1
    lengths = torch.tensor([len(known) for known in rows])
    inputs = make_table(rows), slots, lengths, torch.tensor(caps)
    return column.ngram(*inputs, num_drafts=NUM_DRAFTS, max_n=max_n, min_n=min_n)


def by_search(known: list[int], cap: int, min_n: int, max_n: int) -> list[int]:
    for n in range(min(max_n, len(known)), min_n - 1, -1):
        for end in range(len(known) - 2, n - 2, -1):
            if known[end - n + 1 : end + 1] == known[-n:]:
                drafted = list(known)
                for i in range(cap):
                    drafted.append(drafted[end + 1 + i])
                return drafted[len(known) :]
    return []


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=45), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    ),
    min_n=st.integers(1, 3),
    more=st.integers(0, 4),
)
def test_equals_plain_search(
    column: KernelSet, rows: list[tuple[list[int], int]], min_n: int, more: int
) -> None:
    drafts = propose(
        column, [known for known, _ in rows], [c for _, c in rows], min_n, min_n + more
    )
    for (known, cap), ids, count in zip(rows, drafts.ids, drafts.counts.tolist(), strict=True):
        expected = by_search(known, min(cap, NUM_DRAFTS), min_n, min_n + more)
        assert count == len(expected)
        assert ids.tolist() == expected + [0] * (NUM_DRAFTS - count)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (2, 4), (3, 9)])
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, min_n: int, max_n: int, dtype: torch.dtype
) -> None:
    rows = [torch.randint(3, (n,)).tolist() for n in (70, 0, 1, 2, 33, 16, 17)]
    columns = torch.stack(
        (
            torch.arange(len(rows)) * 2 + 1,
            torch.tensor([len(known) for known in rows]),
            torch.randint(0, 7, (len(rows),)),
        )
    ).to(dtype)
    inputs = make_table(rows), *columns
    drafts = column.ngram(*inputs, num_drafts=NUM_DRAFTS, max_n=max_n, min_n=min_n)
    expected = reference.ngram(*inputs, num_drafts=NUM_DRAFTS, max_n=max_n, min_n=min_n)
    assert drafts.ids.dtype is drafts.counts.dtype is dtype
    assert torch.equal(drafts.ids, expected.ids)
    assert torch.equal(drafts.counts, expected.counts)


def test_padding_and_slots_out_of_bounds_get_no_drafts(column: KernelSet) -> None:
    tokens = torch.ones(2, 8, dtype=torch.int32)
    slots, lengths = torch.tensor([1, -7, 1 << 40, 0]), torch.tensor([0, 8, 8, 1 << 40])
    inputs = tokens, slots, lengths, torch.full((4,), NUM_DRAFTS)
    drafts = column.ngram(*inputs, num_drafts=NUM_DRAFTS, max_n=2, min_n=1)
    assert drafts.counts.tolist() == [0, 0, 0, NUM_DRAFTS]
    assert drafts.ids.tolist() == [[0] * NUM_DRAFTS] * 3 + [[1] * NUM_DRAFTS]


def in_others(own: list[int], others: list[list[int]], cap: int, longer: int) -> list[int]:
    """Return the tokens behind the last of the longest matches, of more than `longer` tokens."""
    for n in range(len(own), longer, -1):
        for text in others[::-1]:
            for end in range(len(text) - 1, n - 1, -1):
                if text[end - n : end] == own[-n:]:
                    return text[end : end + cap]
    return []


TEXT = st.lists(st.integers(0, 2), max_size=30)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(TEXT, st.integers(0, 7), st.integers(-1, 1)), min_size=1, max_size=4),
    lines=st.tuples(st.lists(TEXT, max_size=4), st.lists(TEXT, max_size=4)),
    min_n=st.integers(1, 3),
)
@pytest.mark.parametrize("where", ["reference", "native"])
def test_other_texts_count_where_more_of_them_is_equal(
    request: pytest.FixtureRequest,
    where: str,
    rows: list[tuple[list[int], int, int]],
    lines: tuple[list[list[int]], list[list[int]]],
    min_n: int,
) -> None:
    kernels, max_n = request.getfixturevalue(where), 100  # no match is as long
    known = [row for row, _, _ in rows]
    written = [[token for text in line for token in (*text, -1)] for line in lines]
    texts = torch.full((2, 130), 1, dtype=torch.int32)
    for line, tokens in enumerate(written):
        texts[line, : len(tokens)] = torch.tensor(tokens)
    recent = RecentTexts(
        texts,
        torch.tensor([len(tokens) for tokens in written], dtype=torch.int32),
        torch.tensor([line for _, _, line in rows], dtype=torch.int32),
        min_n + 1,
    )
    drafts = kernels.ngram(
        make_table(known),
        torch.arange(len(rows)) * 2 + 1,
        torch.tensor([len(row) for row in known]),
        torch.tensor([cap for _, cap, _ in rows]),
        num_drafts=NUM_DRAFTS,
        max_n=max_n,
        min_n=min_n,
        recent=recent,
    )
    for (own, cap, line), ids, count in zip(rows, drafts.ids, drafts.counts.tolist(), strict=True):
        cap = min(cap, NUM_DRAFTS)
        ends = range(len(own) - 1)
        same = [next((n for n in range(e + 1) if own[e - n] != own[-1 - n]), e + 1) for e in ends]
        longest = max((n for n in same if n >= min_n), default=0)
        others = lines[line] if line >= 0 and cap else []
        expected = in_others(own, others, cap, max(longest, min_n))
        expected = expected or by_search(own, cap, min_n, max_n)
        assert ids.tolist()[:count] == expected


def test_no_rows(column: KernelSet) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tokens = torch.zeros(1, 4, dtype=torch.int32)
    drafts = column.ngram(tokens, none, none, none, num_drafts=3, max_n=2, min_n=1)
    assert (drafts.ids.shape, drafts.counts.shape) == ((0, 3), (0,))
