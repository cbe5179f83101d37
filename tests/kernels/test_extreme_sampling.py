"""Extreme but admissible parameters: on the host, by the references, in C and in Triton alike.

Whatever a client asks for, it gets a token of the vocabulary or learns that its parameters leave
none, and every way to compute a step says the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from step_column import StepColumn
from surestep_common.errors import InvalidRequest
from surestep_common.sampling_ranges import check_sampling
from surestep_kernels import choose
from surestep_kernels.choose import DrawParams, RowStatus
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.step_ops import STEP_REFERENCE, StepOps
from surestep_proto import engine_pb2 as pb
from surestep_worker.device.upload import upload
from surestep_worker.device.wishes import WishBook
from surestep_worker.sampling import SamplingSlots, sample
from surestep_worker.sampling.head import head_of

VOCAB, WIDTH, PROMPT = 37, 24, 5
DENORMAL, LARGEST = 1e-45, 3.4028234663852886e38
TOKENS = st.integers(0, VOCAB - 1)
BIASES = st.sampled_from([0.0, 1.5, -100.0, 100.0, 1e30, -1e30, LARGEST, -LARGEST])
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 30.0, 1e-45, 1e36, -1e36, 3e38, -3e38, -np.inf])
PARAMS = st.builds(
    pb.SamplingParams,
    temperature=st.sampled_from([0.0, DENORMAL, 1e-38, 1e-7, 0.7, 2.0, 1e30, LARGEST]),
    top_k=st.sampled_from([0, 1, 2, VOCAB, (1 << 32) - 1]),
    top_p=st.sampled_from([1.0, DENORMAL, 1e-6, 0.5, 0.9999999]),
    min_p=st.sampled_from([0.0, DENORMAL, 1e-30, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.01, 100.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    seed=st.integers(0, (1 << 64) - 1),
    min_tokens=st.sampled_from([0, 3, (1 << 32) - 1]),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    logit_bias=st.dictionaries(TOKENS, BIASES, max_size=4),
    allowed_token_ids=st.one_of(st.just([]), st.lists(TOKENS, min_size=1, max_size=4)),
    bad_words=st.lists(
        st.builds(pb.TokenSequence, token_ids=st.lists(TOKENS, min_size=1, max_size=3)), max_size=3
    ),
)


def on_a_device(
    ops: StepOps, device: str, all_params: list[pb.SamplingParams], logits: Any, tokens: Any
) -> list[tuple[int, int]]:
    """Ids and statuses; slot and window of row n are n."""
    count = len(all_params)
    book = WishBook(count, VOCAB)
    for slot, params in enumerate(all_params):
        book.admit(pb.Admission(slot=slot, sampling=params, prompt_len=PROMPT))
    rows = np.arange(count, dtype=np.int32)
    wishes = upload(book.of(rows.astype(np.int64), rows), torch.device(device))
    index = torch.from_numpy(rows).to(device)
    lengths = torch.full((count,), WIDTH - 1, dtype=torch.int32, device=device)
    z = logits.clone().to(device)
    where = Positions(index, index, lengths, tokens.to(device))
    ops.shape_logits(z, where, Shaping(wishes.biases, wishes.penalties, wishes.forbidden))
    chosen = ops.choose(
        z, index, lengths, wishes.draw, random=wishes.random, truncated=wishes.truncated
    )
    return list(zip(chosen.ids.tolist(), chosen.status.tolist(), strict=True))


def on_the_host(
    all_params: list[pb.SamplingParams], logits: Any, tokens: Any
) -> list[tuple[int, int]]:
    slots = SamplingSlots(len(all_params), VOCAB)
    for slot, params in enumerate(all_params):
        slots.admit(slot, params, PROMPT)
    rows = torch.arange(len(all_params))
    sampled = sample(logits, rows, torch.full_like(rows, WIDTH - 1), tokens, slots)
    return list(zip(sampled.ids.tolist(), sampled.status.tolist(), strict=True))


@settings(
    max_examples=40,
    phases=(Phase.generate,),  # shrinking takes minutes in the interpreter
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    all_params=st.lists(PARAMS, min_size=1, max_size=4),
    values=st.lists(LOGITS, min_size=VOCAB, max_size=VOCAB),
    seed=st.integers(0, 99),
)
def test_a_token_or_the_requests_own_error(
    column: StepColumn, all_params: list[pb.SamplingParams], values: list[float], seed: int
) -> None:
    for params in all_params:
        check_sampling(params, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.tensor(values).repeat(len(all_params), 1)
    tokens = torch.randint(0, VOCAB, (len(all_params) + 1, WIDTH), generator=generator).int()
    expected = on_the_host(all_params, logits, tokens[:-1])
    assert on_a_device(STEP_REFERENCE, "cpu", all_params, logits, tokens) == expected
    with np.errstate(all="ignore"):  # the interpreter's arithmetic is numpy's
        assert on_a_device(*column, all_params, logits, tokens) == expected
    for token, status in expected:
        assert 0 <= token < VOCAB
        assert status != RowStatus.NON_FINITE  # these logits are finite, or forbid a token


@given(params=PARAMS, rate=st.floats(0, 9.9e-3) | st.floats(100.1, 1e38))
def test_penalties_beyond_their_range_are_refused(params: pb.SamplingParams, rate: float) -> None:
    params.repetition_penalty = rate
    with pytest.raises(InvalidRequest) as refusal:
        check_sampling(params, VOCAB)
    assert refusal.value.param == "repetition_penalty"


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999, 1 - 2**-24])
def test_a_nucleus_has_as_many_tokens_on_the_host_as_in_the_reference(top_p: float) -> None:
    """However wide the head is that is looked at, and whether top_k is asked for or not."""
    ks, vocab = [0, 0, 700, 2999], 3000
    slots = SamplingSlots(len(ks), vocab)
    for slot, top_k in enumerate(ks):
        wish = pb.SamplingParams(temperature=1, top_p=top_p, top_k=top_k, repetition_penalty=1)
        slots.admit(slot, wish, PROMPT)
    z = torch.randn(len(ks), vocab, generator=torch.Generator().manual_seed(4))
    z *= torch.tensor([[0.5], [4.0], [0.5], [2.0]])
    gap = z.amax(dim=1, keepdim=True) - z
    none = torch.zeros(len(ks), dtype=torch.int32)
    max_gap, top_p_column = torch.full((len(ks),), np.inf), torch.full((len(ks),), top_p)
    k_column = torch.tensor([top_k or vocab for top_k in ks], dtype=torch.int32)
    params = DrawParams(torch.ones(len(ks)), none, none, max_gap, k_column, top_p_column)
    kept = choose._kept(gap, params).sum(dim=1)
    for width in (64, 1024, vocab):
        head = head_of(gap, width)
        count, settled = slots.draws._candidates(gap, head, torch.arange(len(ks)))
        assert settled.any() or width < vocab
        assert count[settled].tolist() == kept[settled].tolist()
    assert count.tolist() == kept.tolist()


@pytest.mark.parametrize("size", range(1, 60, 4))
def test_a_nucleus_that_ends_between_two_tokens_is_measured_exactly(size: int) -> None:
    """Among equals top_p names a border of two tokens but for its own rounding, up or down."""
    vocab, width, top_p = 3000, 64, torch.tensor([size / 3000])
    slots = SamplingSlots(1, vocab)
    wish = pb.SamplingParams(temperature=1, top_p=top_p.item(), repetition_penalty=1)
    slots.admit(0, wish, PROMPT)
    gap, none = torch.zeros(1, vocab), torch.zeros(1, dtype=torch.int32)
    whole = torch.tensor([vocab], dtype=torch.int32)
    params = DrawParams(torch.ones(1), none, none, torch.full((1,), np.inf), whole, top_p)
    count, settled = slots.draws._candidates(gap, head_of(gap, width), torch.tensor([0]))
    assert settled.all()
    assert count.tolist() == choose._kept(gap, params).sum(dim=1).tolist()
