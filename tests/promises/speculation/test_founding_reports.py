"""The reports that this project grew from, as tests. Numbers are issues of vllm-project/vllm.

All on a hybrid with recurrent layers and an MTP head, the one on EAGLE-3 with such a head, too;
tests/e2e/test_report_39295_served.py has that one behind its own command line. Expected is always
what the engine says without speculation.
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
@pytest.mark.rotates(3)
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


@pytest.mark.rotates(2)
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


def at_random(count: int, longest: int) -> list[Request]:
    """Requests of all sorts of parameters, most of which end only where `longest` does."""
    rng = random.Random(39295)

    def some(*values: Any) -> Any:
        return rng.choice(values)

    def params(i: int) -> dict[str, Any]:
        biased = rng.sample(range(3, VOCAB), k=6)
        return {
            "temperature": some(0.0, 0.5, 1.0, 2.0),
            "seed": i,
            "min_p": some(0.0, 0.1, 0.5),
            "top_k": some(0, 1, 8),
            "top_p": some(1.0, 0.8),
            "repetition_penalty": some(1.0, 1.3),
            "presence_penalty": some(0.0, 1.0),
            "frequency_penalty": some(0.0, -0.5, 0.8),
            "logit_bias": {token: rng.uniform(-9, 3) for token in biased[: some(0, 6)]},
            "stop_token_ids": rng.sample(range(3, VOCAB), k=some(0, 0, 12)),
            "min_tokens": some(0, 9),
        }

    lengths = [rng.randint(2, longest - 2) for _ in range(count)]
    return [
        request(f"{i}", rng.choices(range(3, VOCAB), k=length), longest, **params(i))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("bench_name", ["eagle3_bench", "eagle3_gpt_oss_bench"])
def test_39295_200_requests_of_random_parameters(
    request: pytest.FixtureRequest, bench_name: str
) -> None:
    """They come and go in 32 slots, and run into max_model_len with fewer places than drafts."""
    bench: ParityBench = request.getfixturevalue(bench_name)
    limit = 40
    where, asked = (
        Neighbours(num_slots=32, step_tokens=120, max_model_len=limit),
        at_random(200, limit),
    )
    expected = bench.serve(asked, where, "none", 0, 0)
    answers = bench.serve(asked, where, "eagle3", 5, 2, DISORDER)
    assert ids(answers) == ids(expected)
    assert [a.finish for a in answers.values()] == [a.finish for a in expected.values()]
    full = [r for r in asked if len(r.prompt_ids) + len(answers[r.id].token_ids) == limit]
    assert len(full) > 100
    assert sum(answer.num_drafts for answer in answers.values()) > 500
    assert sum(answer.num_accepted for answer in answers.values()) > 10
