"""Prompt lookup against a plain search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.local_engine import LocalEngine, one_rank
from surestep_kernels.ngram import ngram_reference
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_scheduler.core.sequence import Request
from surestep_worker.config import WorkerSettings
from surestep_worker.drafters.ngram import NgramDrafter, RecentAnswers
from surestep_worker.startup.build import build_runner


def _by_search(known: list[int], cap: int, min_n: int, max_n: int) -> list[int]:
    last = len(known) - 1
    for n in range(max_n, min_n - 1, -1):
        for end in range(last - 1, n - 2, -1):
            if known[end - n + 1 : end + 1] == known[last - n + 1 :] and last - n + 1 >= 0:
                drafted = list(known)
                for i in range(cap):
                    drafted.append(drafted[end + 1 + i])
                return drafted[len(known) :]
    return []


def _propose(rows: list[list[int]], caps: list[int], drafter: NgramDrafter) -> list[list[int]]:
    """Rows in slots 1, 3, 5, ...; what lies behind a row and in other slots is stale."""
    width = max(map(len, rows)) + 7
    tokens = torch.ones(2 * len(rows) + 1, width, dtype=torch.int32)
    for r, known in enumerate(rows):
        tokens[2 * r + 1, : len(known)] = torch.tensor(known, dtype=torch.int32)
    slots = torch.arange(len(rows)) * 2 + 1
    drafts = drafter.propose(
        tokens, slots, torch.tensor([len(r) for r in rows]), torch.tensor(caps)
    )
    assert drafts.ids.dtype == drafts.counts.dtype == torch.int64
    return [ids[:count] for ids, count in zip(drafts.ids.tolist(), drafts.counts, strict=True)]


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    min_n=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_equals_plain_search(rows: list[tuple[list[int], int]], min_n: int, more: int) -> None:
    drafter = NgramDrafter(ngram_reference, num_drafts=4, max_n=min_n + more, min_n=min_n)
    got = _propose([known for known, _ in rows], [cap for _, cap in rows], drafter)
    assert got == [_by_search(known, min(cap, 4), min_n, min_n + more) for known, cap in rows]


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the most recent of equal matches
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], [9, 7, 1]),  # a longer match beats a recent one
        ([4, 6, 6, 6], [6, 6, 6]),  # a match that overlaps its continuation repeats
        ([1, 2, 3, 1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_which_match_wins(known: list[int], drafts: list[int]) -> None:
    drafter = NgramDrafter(ngram_reference, num_drafts=3, max_n=3, min_n=2)
    assert _propose([known], [3], drafter) == [drafts]


def test_no_rows_and_no_drafts() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert NgramDrafter(ngram_reference, num_drafts=3, max_n=2, min_n=1).propose(
        table, none, none, none
    ).ids.shape == (0, 3)
    one = torch.tensor([0])
    off = NgramDrafter(ngram_reference, num_drafts=0, max_n=2, min_n=1).propose(
        table, one, one + 3, one + 3
    )
    assert (off.ids.shape, off.counts.tolist()) == ((1, 0), [0])


def _keep(recent: RecentAnswers, group: int, prompt: list[int], answer: list[int]) -> None:
    recent.admit(0, group)
    recent.keep(0, np.array(prompt + answer, dtype=np.int32), len(prompt))


def _drafts(recent: RecentAnswers, group: int, known: list[int]) -> list[int]:
    """Drafts of a request of a group with these tokens, in slot 1."""
    recent.admit(1, group)
    drafter = NgramDrafter(ngram_reference, num_drafts=4, max_n=9, min_n=2, recent=recent)
    (found,) = _propose([known], [4], drafter)
    return found


def test_an_answer_is_drafted_from_one_to_the_same_question() -> None:
    """From its first token on, to its end, by those of the same group alone."""
    recent = RecentAnswers(2)
    _keep(recent, 5, [1, 2, 3, 4], [50, 51, 52])
    _keep(recent, 5, [1, 2, 3, 5], [60, 61])
    assert _drafts(recent, 5, [9, 1, 2, 3, 4]) == [50, 51, 52]
    assert _drafts(recent, 5, [9, 1, 2, 3, 5, 60]) == [61]
    assert _drafts(recent, 6, [9, 1, 2, 3, 4]) == []
    assert _drafts(recent, 0, [9, 1, 2, 3, 4]) == []
    assert _drafts(recent, 5, [9, 9, 9, 2, 3, 4]) == []  # three tokens say too little
    recent.clear()
    assert _drafts(recent, 5, [9, 1, 2, 3, 4]) == []


def test_what_is_not_an_answer_is_not_kept() -> None:
    recent = RecentAnswers(2)
    _keep(recent, 0, [1, 2, 3, 4], [50, 51])
    _keep(recent, 5, [1, 2, 3, 4, 5, 6], [])
    for group in (0, 5):
        assert _drafts(recent, group, [1, 2, 3, 4]) == []


@pytest.mark.rotates(1)
def test_the_oldest_answers_make_room() -> None:
    recent = RecentAnswers(2)
    questions = [[n, n + 1, n + 2, n + 3] for n in range(100, 10_000, 10)]
    for question in questions:
        _keep(recent, 5, question, list(range(20)))
    held = [question for question in questions if _drafts(recent, 5, question)]
    assert held == questions[-len(held) :]
    assert 400 < len(held) < len(questions)
    _keep(recent, 5, [1, 2, 3, 4], list(range(100_000)))  # one that has no room keeps its end
    assert _drafts(recent, 5, [99_990, 99_991, 99_992, 99_993]) == list(range(99_994, 99_998))


def test_the_group_not_used_for_longest_makes_room() -> None:
    recent = RecentAnswers(2)
    for group in range(1, 65):
        _keep(recent, group, [1, 2, 3, 4], [group])
    _keep(recent, 1, [1, 2, 3, 4], [1])
    _keep(recent, 65, [1, 2, 3, 4], [65])
    held = [group for group in range(1, 66) if _drafts(recent, group, [1, 2, 3, 4])]
    assert held == [1, *range(3, 66)]


@pytest.mark.parametrize("caching", [True, False])
def test_a_request_drafts_from_answers_of_its_owner_and_salt(tmp_path: Path, caching: bool) -> None:
    """Where its prefixes are cached; the tokens are the same in any case."""
    settings = WorkerSettings(
        model=make_tiny_checkpoint(tmp_path),
        device="cpu",
        max_num_seqs=2,
        max_model_len=128,
        kv_cache_memory=0.01,
        speculative_config={"method": "suffix", "num_speculative_tokens": 4},
    )
    built = build_runner(settings)
    facts = built.facts
    engine = LocalEngine(one_rank(built.runner), facts, enable_prefix_caching=caching)
    told = [("a", ""), ("a", ""), ("a", "salt"), ("b", ""), ("b", "")]
    answers = []
    for number, (owner, salt) in enumerate(told):
        request = Request(
            id=str(number),
            prompt_ids=range(7, 40, 3),
            emitted_ids=(),
            max_tokens=24,
            cache_owner=owner,
            cache_salt=salt,
            sampling=SamplingParams(top_p=1, repetition_penalty=1),
        )
        answers.append(engine.run([request])[request.id])
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    accepted = [answer.num_accepted for answer in answers]
    assert accepted[0] == accepted[2] == accepted[3] < 18
    again = 18 if caching else accepted[0]  # 4 in each window but the last
    assert min(accepted[1], accepted[4]) >= again
    assert caching or len(set(accepted)) == 1
