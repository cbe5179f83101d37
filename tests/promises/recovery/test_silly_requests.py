"""Parameters that spoil finite logits end their own request; no worker is replaced for them."""

from __future__ import annotations

from typing import Any

import pytest
from support.parity.bench import NEIGHBOURS, Conditions, ParityBench
from support.parity.cases import NEUTRAL, VOCAB, make_request
from surestep_common.errors import InvalidRequest
from surestep_kernels.table import STEP_REFERENCE, StepOps
from surestep_proto import sampling_pb2 as pb

LARGEST = 3.4028234663852886e38
TOKEN = 50
SILLY: dict[str, dict[str, Any]] = {
    "overflow": {"logit_bias": {TOKEN: LARGEST}, "repetition_penalty": 0.01},
    "overflow at a temperature": {
        "logit_bias": {TOKEN: LARGEST},
        "repetition_penalty": 0.01,
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "nothing left": {
        "allowed_token_ids": [TOKEN],
        "bad_words": [pb.TokenSequence(token_ids=[TOKEN])],
    },
}
EXTREME: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 1e-38},
    "hot": {"temperature": 3e38, "min_p": 1.0},
    "biased": {"logit_bias": dict.fromkeys(range(VOCAB), -3e38) | {TOKEN: 3e38}},
    "penalised": {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
    "rewarded": {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "temperature": 0.7},
}


@pytest.mark.parametrize("ops", [None, STEP_REFERENCE], ids=["host", "device"])
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("ragged", 4)])
def test_silly_requests_end_alone(
    bench: ParityBench, ops: StepOps | None, drafter: str, k: int
) -> None:
    """More of them than it takes to have a rank replaced, were it the rank's fault."""
    odd = [
        make_request(f"{name} {number}", [3 + number, TOKEN, 9], NEUTRAL | params)
        for number in range(3)
        for name, params in (SILLY | EXTREME).items()
    ]
    answers = bench.serve(
        [*odd, *bench.requests], NEIGHBOURS["mixed"], drafter, k, 1, Conditions(step_ops=ops)
    )
    for request in odd:
        answer, name = answers[request.id], request.id.rpartition(" ")[0]
        if name in SILLY:
            assert isinstance(answer.error, InvalidRequest), request.id
            assert answer.token_ids == []
        else:
            assert answer.error is None
            assert len(answer.token_ids) == request.max_tokens
    for request in bench.requests:
        assert answers[request.id].token_ids == bench.expected[request.id].token_ids
