"""Accept iff equal, against a plain loop, over every small window there is."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.kernels.step_sampling import verify
from support.references.sampling import params
from surestep_kernels.choose import Chosen
from surestep_kernels.commit_step import Report
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.sampling import SamplingTable

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # choices, their status, drafts
NO_STOP, ONE_STOP, MANY_STOPS = 0, 1, 2  # slots


def _stops() -> SamplingTable:
    book = SamplingTable(3, 400)
    book.admit(MANY_STOPS, params(stop_token_ids=[2, *range(100, 400)]), 1)
    book.admit(ONE_STOP, params(stop_token_ids=[2]), 1)
    book.admit(NO_STOP, params(), 1)
    return book


def _by_loop(window: Window, has_stop: bool) -> tuple[list[int], int, int]:
    """Emitted ids, accepted count, status."""
    choices, status, drafts = window
    emitted: list[int] = []
    accepted = 0
    for i, choice in enumerate(choices):
        if status[i] != pb.OK:
            return emitted, max(len(emitted) - 1, 0), status[0]
        emitted.append(choice)
        is_draft = i < len(drafts) and drafts[i] == choice
        accepted += is_draft
        if not is_draft or (has_stop and choice == 2):
            break
    return emitted, accepted, status[0]


def _verify(windows: list[Window], slot: int) -> Report:
    counts = [len(drafts) for _, _, drafts in windows]
    k = max(counts, default=0)
    padded = [[*drafts, *([2] * (k - len(drafts)))] for _, _, drafts in windows]
    return verify(
        Chosen(
            torch.tensor([x for choices, _, _ in windows for x in choices]).int(),
            torch.tensor([x for _, status, _ in windows for x in status]).int(),
        ),
        torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0),
        torch.tensor(padded).long().view(len(windows), k),
        torch.tensor(counts).long(),
        torch.full((len(windows),), slot),
        _stops(),
    )


def _check(verdict: Report, windows: list[Window], slot: int) -> None:
    tokens, n_accepted = verdict.tokens.tolist(), verdict.n_accepted.tolist()
    n_emitted, status = verdict.n_emitted.tolist(), verdict.status.tolist()
    for r, window in enumerate(windows):
        got = (tokens[r][: n_emitted[r]], n_accepted[r], status[r])
        assert got == _by_loop(window, slot != NO_STOP), window


@pytest.mark.parametrize("slot", [NO_STOP, ONE_STOP, MANY_STOPS])
def test_every_window_of_three_ids(slot: int) -> None:
    """All choices, drafts and places of bad rows for up to 3 drafts, ragged, in one call."""
    windows: list[Window] = [
        (choices, tuple(status), drafts)
        for k in range(4)
        for choices in product(range(3), repeat=k + 1)
        for drafts in product(range(3), repeat=k)
        for bad in range(k + 2)
        for status in [[pb.NON_FINITE if i == bad else pb.OK for i in range(k + 1)]]
    ]
    _check(_verify(windows, slot), windows, slot)


def test_accepted_and_emitted_keep_the_protocol() -> None:
    """emitted = accepted + 1, or accepted if a drafted stop id ended the window; 0 and 0 if bad."""
    windows: list[Window] = [
        ((5, 6, 7), (pb.OK,) * 3, (5, 6)),
        ((5, 2, 7), (pb.OK,) * 3, (5, 2)),
        ((5, 2, 7), (pb.OK,) * 3, (5, 6)),
        ((5, 6, 7), (pb.OK, pb.OK, pb.NO_CANDIDATE), (5, 6)),
        ((0, 6, 7), (pb.NO_CANDIDATE, pb.OK, pb.OK), (0, 6)),
    ]
    verdict = _verify(windows, ONE_STOP)
    assert verdict.n_emitted.tolist() == [3, 2, 2, 2, 0]
    assert verdict.n_accepted.tolist() == [2, 2, 1, 1, 0]
    assert verdict.status.tolist() == [pb.OK] * 4 + [pb.NO_CANDIDATE]


def test_plain_decoding_is_a_window_without_drafts() -> None:
    windows: list[Window] = [
        ((7,), (pb.OK,), ()),
        ((2,), (pb.OK,), ()),
        ((0,), (pb.NON_FINITE,), ()),
    ]
    verdict = _verify(windows, ONE_STOP)
    assert verdict.tokens.tolist() == [[7], [2], [0]]
    assert verdict.n_emitted.tolist() == [1, 1, 0]
    assert verdict.n_accepted.tolist() == [0, 0, 0]


def test_no_windows() -> None:
    assert _verify([], NO_STOP).n_emitted.shape == (0,)
