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
from surestep_common.errors import InvalidRequest
from surestep_common.request_params import check_sampling
from surestep_kernels import KernelSet
from surestep_kernels.choose import RowStatus
from surestep_kernels.shape_logits import Positions
from surestep_kernels.table import StepOps
from surestep_proto import sampling_pb2 as pb
from surestep_worker.step.sampling import SamplingTable
from surestep_worker.step.transfer import upload

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


def computed(
    ops: StepOps, all_params: list[pb.SamplingParams], logits: Any, tokens: Any
) -> list[tuple[int, int]]:
    """Ids and statuses; slot and window of row n are n."""
    count = len(all_params)
    table = SamplingTable(count, VOCAB)
    for slot, params in enumerate(all_params):
        table.admit(slot, params, PROMPT)
    rows = np.arange(count, dtype=np.int32)
    slots, to = rows.astype(np.int64), torch.device("cpu")
    shaping, draw = upload(table.shaping(slots, rows), to), upload(table.draw(slots), to)
    random, truncated = table.draw_flags(slots)
    index = torch.from_numpy(rows)
    lengths = torch.full((count,), WIDTH - 1, dtype=torch.int32)
    z = logits.clone()
    where = Positions(index, index, lengths, tokens)
    ops.shape_logits(z, where, shaping)
    chosen = ops.choose(z, index, lengths, draw, random=random, truncated=truncated)
    return list(zip(chosen.ids.tolist(), chosen.status.tolist(), strict=True))


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
    column: KernelSet,
    reference: KernelSet,
    all_params: list[pb.SamplingParams],
    values: list[float],
    seed: int,
) -> None:
    for params in all_params:
        check_sampling(params, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.tensor(values).repeat(len(all_params), 1)
    tokens = torch.randint(0, VOCAB, (len(all_params) + 1, WIDTH), generator=generator).int()
    expected = computed(reference.step, all_params, logits, tokens)
    with np.errstate(all="ignore"):  # the interpreter's arithmetic is numpy's
        assert computed(column.step, all_params, logits, tokens) == expected
    for token, status in expected:
        assert 0 <= token < VOCAB
        assert status != RowStatus.NON_FINITE  # these logits are finite, or forbid a token


@given(params=PARAMS, rate=st.floats(0, 9.9e-3) | st.floats(100.1, 1e38))
def test_penalties_beyond_their_range_are_refused(params: pb.SamplingParams, rate: float) -> None:
    params.repetition_penalty = rate
    with pytest.raises(InvalidRequest) as refusal:
        check_sampling(params, VOCAB)
    assert refusal.value.param == "repetition_penalty"
