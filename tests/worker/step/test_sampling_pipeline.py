"""Every sampling parameter against the plain restatement, alone and in mixed batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from support.kernels.step_sampling import Rows, sample
from support.kernels.step_sampling import shape as shape_all
from support.references.sampling import choose, params, shape
from surestep_kernels.choose import Chosen
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.sampling import SamplingTable

V, WIDTH, PROMPT = 40, 64, 9
SEED = 20_240

SHAPING = {
    "allowed": params(allowed_token_ids=[3, 8, 9, 31]),
    "bias": params(logit_bias={0: 5.0, 7: -100.0, 39: 3.5}),
    "allowed+bias": params(allowed_token_ids=[3, 8], logit_bias={8: 2.0, 9: 50.0}),
    "min_tokens": params(min_tokens=12, stop_token_ids=list(range(0, 40, 2))),
    "min_tokens without stop ids": params(min_tokens=12),
    "repetition": params(repetition_penalty=1.7),
    "repetition below one": params(repetition_penalty=0.6),
    "presence": params(presence_penalty=1.5),
    "frequency": params(frequency_penalty=-0.8),
    "all penalties": params(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.9),
    "bad_words": params(bad_words=[[4], [1, 2], [5, 6, 7], [1, 1, 1, 1]]),
    "everything": params(
        allowed_token_ids=list(range(1, 40, 2)),
        logit_bias={5: 4.0},
        min_tokens=6,
        stop_token_ids=[5],
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        bad_words=[[1], [1, 3]],
    ),
}
DRAWING = {
    "greedy": params(),
    "temperature": params(temperature=0.7, seed=2**63 + 5),
    "tiny temperature": params(temperature=1e-30),
    "min_p": params(temperature=1.3, min_p=0.2),
    "min_p one": params(temperature=1.3, min_p=1.0),
    "top_k": params(temperature=2.0, top_k=3),
    "top_k one": params(temperature=2.0, top_k=1),
    "top_k above vocabulary": params(temperature=2.0, top_k=1000),
    "top_p": params(temperature=1.5, top_p=0.6),
    "tiny top_p": params(temperature=1.5, top_p=1e-6),
    "top_k+top_p": params(temperature=1.8, top_k=5, top_p=0.7),
    "min_p+top_k+top_p": params(temperature=1.8, min_p=0.05, top_k=8, top_p=0.8),
}


class Case(NamedTuple):
    """A filled table and logits: row n belongs to slot n, which holds the parameters of n."""

    logits: torch.Tensor
    tokens: torch.Tensor
    length: torch.Tensor
    slots: SamplingTable


def _merged(
    shaping: sampling_pb2.SamplingParams, drawing: sampling_pb2.SamplingParams
) -> sampling_pb2.SamplingParams:
    merged = sampling_pb2.SamplingParams()
    merged.CopyFrom(shaping)
    for name in ("temperature", "min_p", "top_k", "top_p", "seed"):
        setattr(merged, name, getattr(drawing, name))
    return merged


MIXED = [_merged(a, b) for a in (params(), *SHAPING.values()) for b in DRAWING.values()]


def _case(all_params: list[sampling_pb2.SamplingParams], seed: int = SEED) -> Case:
    generator = torch.Generator().manual_seed(seed)
    n = len(all_params)
    slots = SamplingTable(n, V)
    for slot, p in enumerate(all_params):
        slots.admit(slot, p, PROMPT)
    return Case(
        torch.randn(n, V, generator=generator) * 3,
        torch.randint(0, 10, (n, WIDTH), generator=generator, dtype=torch.int32),
        torch.randint(PROMPT, WIDTH, (n,), generator=generator),
        slots,
    )


def _sample(case: Case, slot: torch.Tensor | None = None) -> Chosen:
    slot = torch.arange(len(case.length)) if slot is None else slot
    return sample(case.logits[slot], slot, case.length[slot], case.tokens, case.slots)


def _history(case: Case, n: int) -> list[int]:
    history: list[int] = case.tokens[n, : case.length[n]].tolist()
    return history


@pytest.mark.parametrize("name", SHAPING)
def test_feature_shapes_logits_as_restated(name: str) -> None:
    p = SHAPING[name]
    case = _case([p] * 60)
    z = case.logits.clone()
    shape_all(z, Rows(torch.arange(60), case.length, case.tokens), case.slots)
    want = [shape(case.logits[n].tolist(), _history(case, n), PROMPT, p) for n in range(60)]
    torch.testing.assert_close(z.double(), torch.tensor(want).double(), rtol=1e-6, atol=1e-6)
    assert name == "min_tokens without stop ids" or not torch.equal(z, case.logits)


@pytest.mark.parametrize("seed", range(3))
def test_choice_is_as_restated(seed: int) -> None:
    case = _case(MIXED, seed)
    got = _sample(case)
    want = [
        choose(case.logits[n].tolist(), _history(case, n), PROMPT, p) for n, p in enumerate(MIXED)
    ]
    assert set(got.status.tolist()) == {pb.OK}
    assert got.ids.tolist() == want


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_change_nothing(threads: int) -> None:
    """Rows of a mixed batch, in any order, are those sampled alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        vocab = 40_000  # above the size at which torch starts to split single rows over threads
        mixed = [p for p in DRAWING.values() for _ in range(2)] + [params(repetition_penalty=1.2)]
        slots = SamplingTable(len(mixed), vocab)
        for slot, p in enumerate(mixed):
            slots.admit(slot, p, PROMPT)
        generator = torch.Generator().manual_seed(SEED)
        logits = torch.randn(len(mixed), vocab, generator=generator)
        tokens = torch.randint(0, vocab, (len(mixed), 32), generator=generator).int()
        order = torch.randperm(len(mixed), generator=generator)
        length = torch.arange(len(mixed)) % 20 + 10
        together = sample(logits[order], order, length[order], tokens, slots)
        for n, slot in enumerate(order):
            one = slot.unsqueeze(0)
            alone = sample(logits[one], one, length[one], tokens, slots)
            assert torch.equal(together.ids[n : n + 1], alone.ids), mixed[int(slot)]
    finally:
        torch.set_num_threads(before)


def test_history_of_a_window_holds_its_earlier_drafts() -> None:
    """Rows of one slot at growing lengths see what stands in the table, no more and no less."""
    p = params(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        bad_words=[[2, 3]],
        min_tokens=3,
        stop_token_ids=[1],
        temperature=0.9,
    )
    case = _case([p] * 4)
    slot, length = torch.tensor([2] * 5), torch.arange(PROMPT, PROMPT + 5)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(SEED))
    got = sample(logits, slot, length, case.tokens, case.slots)
    for n in range(5):
        history = case.tokens[2, : length[n]].tolist()
        assert got.ids[n] == choose(logits[n].tolist(), history, PROMPT, p)
    stale = case.tokens.clone()
    stale[2, PROMPT + 4 :] = 39
    assert torch.equal(got.ids, sample(logits, slot, length, stale, case.slots).ids)


def test_bad_rows_are_named_and_harm_nobody() -> None:
    clean, dirty = _case(MIXED), _case(MIXED)
    for n, value in ((3, math.nan), (40, math.inf), (80, math.nan)):
        dirty.logits[n, 17] = value
    dirty.logits[90] = -math.inf
    got, want = _sample(dirty), _sample(clean)
    bad = {3: pb.NON_FINITE, 40: pb.NON_FINITE, 80: pb.NON_FINITE, 90: pb.NO_CANDIDATE}
    for n in range(len(MIXED)):
        assert got.status[n] == bad.get(n, pb.OK)
        assert got.ids[n] == (0 if n in bad else want.ids[n])


def test_masks_may_leave_nothing() -> None:
    p = params(allowed_token_ids=[4], bad_words=[[4]], temperature=0.5, top_p=0.5)
    hidden_nan = params(allowed_token_ids=[4])
    case = _case([p, params(), hidden_nan])
    case.logits[2, 30] = math.nan  # masked, and yet a sign that the model is broken
    got = _sample(case)
    assert got.status.tolist() == [pb.NO_CANDIDATE, pb.OK, pb.NON_FINITE]
    assert got.ids.tolist() == [0, int(case.logits[1].argmax()), 0]


@pytest.mark.parametrize(
    ("p", "logit", "status"),
    [
        (params(repetition_penalty=0.01, temperature=0.7), 3e37, pb.SHAPING_OVERFLOW),
        (params(logit_bias=dict.fromkeys(range(V), 3.4e38)), 1e37, pb.SHAPING_OVERFLOW),
        (params(logit_bias={5: 3.4e38}, repetition_penalty=100), 1e37, pb.OK),  # divided again
        (params(repetition_penalty=100), -3e37, pb.NO_CANDIDATE),
        (params(logit_bias={5: -3.4e38}, frequency_penalty=2), -1e37, pb.OK),
        (params(logit_bias={5: 3.4e38}), math.inf, pb.NON_FINITE),
        (params(repetition_penalty=100, bad_words=[[1]]), math.nan, pb.NON_FINITE),
        (params(), 3e38, pb.OK),
    ],
)
def test_it_is_told_whose_doing_unusable_logits_are(
    p: sampling_pb2.SamplingParams, logit: float, status: int
) -> None:
    """All tokens stand in the history, so that each of them is penalised."""
    case = _case([p])
    case.logits[:] = logit
    case.tokens[:] = torch.arange(WIDTH) % V
    case.length[:] = WIDTH - 1
    assert _sample(case).status.tolist() == [status]


@pytest.mark.parametrize("name", DRAWING)
def test_ties_go_to_the_lowest_id(name: str) -> None:
    """Logits of few distinct values: every cut falls among equals."""
    p = DRAWING[name]
    case = _case([p] * 80)
    case.logits.copy_(case.logits.round() // 2)
    want = [choose(case.logits[n].tolist(), _history(case, n), PROMPT, p) for n in range(80)]
    assert _sample(case).ids.tolist() == want


@pytest.mark.parametrize(
    "p",
    [
        params(temperature=1.0, top_p=0.999),
        params(temperature=1.0, top_k=2500),
        params(temperature=1.0, min_p=1e-3, top_p=0.98),
        params(temperature=1.0, top_k=3000, top_p=0.97),
    ],
    ids=["top_p", "top_k", "min_p+top_p", "top_k+top_p"],
)
def test_nucleus_wider_than_the_first_look(p: sampling_pb2.SamplingParams) -> None:
    """Flat logits over 12000 ids: far more candidates than the head that is tried first."""
    slots = SamplingTable(1, 12_000)
    slots.admit(0, p, 1)
    logits = torch.randn(12, 12_000, generator=torch.Generator().manual_seed(SEED))
    slot, length = torch.zeros(12, dtype=torch.int64), torch.arange(1, 13)
    tokens = torch.zeros(1, 16, dtype=torch.int32)
    got = sample(logits, slot, length, tokens, slots).ids.tolist()
    assert got == [choose(logits[n].tolist(), [0] * (n + 1), 1, p) for n in range(12)]


def test_a_slot_forgets_its_tenant() -> None:
    case = _case(MIXED)
    for slot in range(len(MIXED)):
        case.slots.free(slot)
    for slot in range(len(MIXED)):
        case.slots.admit(slot, params(), PROMPT)
    assert torch.equal(_sample(case).ids, case.logits.argmax(dim=1).int())


def test_nothing_to_sample() -> None:
    case = _case([params()])
    got = _sample(case, torch.zeros(0, dtype=torch.int64))
    assert got.ids.shape == got.status.shape == (0,)
