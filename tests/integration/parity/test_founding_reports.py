"""The reports that this project grew from, as tests. Numbers are issues of vllm-project/vllm.

All on a hybrid with recurrent layers and an MTP head; expected is always what the engine says
without speculation.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.parity.bench import Conditions, Neighbours, ParityBench, serve
from support.parity.cases import EOS, NEUTRAL, VOCAB
from support.parity.drafters import TRUTH
from support.parity.local_engine import Answer
from support.processes.ports import free_address
from support.ranks.pair import RankSetup, two_ranks
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Finish, Request

SEED = 41
DISORDER = Conditions(shuffle_seed=3, poison=True)


def request(name: str, prompt: list[int], max_tokens: int, **params: Any) -> Request:
    fields: dict[str, Any] = {"temperature": 0.0, **NEUTRAL, **params}
    sampling = pb.SamplingParams(**fields)
    return Request(
        id=name,
        prompt_ids=prompt,
        emitted_ids=[],
        max_tokens=max_tokens,
        stop_ids=frozenset(sampling.stop_token_ids),
        sampling=sampling,
    )


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [rng.choices(range(3, VOCAB), k=rng.randint(shortest, longest)) for _ in range(count)]


def ids(answers: dict[str, Answer]) -> dict[str, list[int]]:
    assert [answer.error for answer in answers.values()] == [None] * len(answers)
    return {name: answer.token_ids for name, answer in answers.items()}


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("drafter", ["mtp", "oracle", "ragged"])
def test_36917_requests_run_into_max_model_len_at_different_times(
    hybrid_bench: ParityBench, drafter: str, k: int
) -> None:
    """Eight at once. Windows shrink to decode rows one request after the other, in mixed batches."""
    limit = 40
    where = Neighbours(num_slots=8, max_model_len=limit)
    requests = [request(f"{i}", prompt, limit) for i, prompt in enumerate(prompts(8, 3, 30))]
    expected = hybrid_bench.serve(requests, where, "none", 0, 0)
    TRUTH.learn(
        [[*r.prompt_ids, *expected[r.id].token_ids] for r in requests],
        vocab_size=VOCAB,
        stop_id=EOS,
    )
    answers = hybrid_bench.serve(requests, where, drafter, k, 1, DISORDER)
    assert ids(answers) == ids(expected)
    for made in requests:
        assert answers[made.id].finish is Finish.LENGTH
        assert len(made.prompt_ids) + len(answers[made.id].token_ids) == limit
    assert any(answer.num_drafts for answer in answers.values())


def test_41190_two_ranks_first_request_and_64_at_once(hybrid_bench: ParityBench) -> None:
    """Accepted counts of hybrids under tensor parallelism, from the very first request on."""
    where = Neighbours(num_slots=64, step_tokens=200)
    first = [request("first", [5, 9, 11], 24)]
    crowd = [
        request(f"{i}", prompt, 20, temperature=0.7 * (i % 2), seed=i)
        for i, prompt in enumerate(prompts(64, 2, 20))
    ]
    expected = hybrid_bench.serve(first + crowd, where, "none", 0, 0)
    setup = RankSetup(hybrid_bench.folder, free_address(), where, "mtp", 3, [], "")
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, first, where, depth=1)
        crowded = two_ranks(setup._replace(address=free_address()))
        with crowded as (step, facts):
            answers |= serve(step, facts, crowd, where, depth=1)
    assert ids(answers) == ids(expected)
    assert sum(answer.num_accepted for answer in answers.values()) > 0


def test_45100_first_windows_behind_prompts_under_row_movement(hybrid_bench: ParityBench) -> None:
    """64 prompts, 8 samples each: no early end, no other token than without drafts."""
    where = Neighbours(num_slots=64, step_tokens=160)
    requests = [
        request(f"{i}/{j}", prompt, 8, temperature=1.0, seed=100 * i + j)
        for i, prompt in enumerate(prompts(64, 2, 24))
        for j in range(8)
    ]
    expected = hybrid_bench.serve(requests, where, "none", 0, 0)
    answers = hybrid_bench.serve(requests, where, "mtp", 3, 2, DISORDER)
    assert ids(answers) == ids(expected)
    assert {len(answer.token_ids) for answer in answers.values()} == {8}


@pytest.mark.parametrize("drafter", ["mtp", "oracle", "eos-mid"])
def test_39295_parameters_and_ends_inside_windows(hybrid_bench: ParityBench, drafter: str) -> None:
    """min_p and logit_bias are honoured at every position; ends and counts are exact."""
    where, prompt = Neighbours(num_slots=8), [7, 20, 33]
    plain = hybrid_bench.serve([request("plain", prompt, 30)], where, "none", 0, 0)["plain"]
    banned, late = plain.token_ids[4], plain.token_ids[9]
    requests = [
        request("bias", prompt, 30, logit_bias={banned: -100.0}),
        request("min_p", prompt, 30, temperature=1.0, seed=4, min_p=1.0),
        request("stop", prompt, 30, stop_token_ids=[late]),
        *(request(f"length {n}", prompt, n) for n in range(1, 8)),
    ]
    expected = hybrid_bench.serve(requests, where, "none", 0, 0)
    TRUTH.learn(
        [[*r.prompt_ids, *expected[r.id].token_ids] for r in requests],
        vocab_size=VOCAB,
        stop_id=late,
    )
    answers = hybrid_bench.serve(requests, where, drafter, 4, 1, DISORDER)
    assert ids(answers) == ids(expected)
    assert banned not in answers["bias"].token_ids
    assert answers["min_p"].token_ids == plain.token_ids  # only the likeliest token is left
    stop_at = plain.token_ids.index(late) + 1
    assert answers["stop"].token_ids == plain.token_ids[:stop_at]
    assert answers["stop"].finish is Finish.STOP
    for n in range(1, 8):
        assert answers[f"length {n}"].token_ids == plain.token_ids[:n]
        assert answers[f"length {n}"].finish is Finish.LENGTH
