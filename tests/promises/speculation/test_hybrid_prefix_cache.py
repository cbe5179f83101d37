"""A cached prefix of a hybrid is its KV blocks and the recurrent state behind exactly them."""

from __future__ import annotations

import random

import pytest
import torch
from support.parity.bench import BLOCK_SIZE, Neighbours, ParityBench, build_runner, load, total
from support.parity.cases import TOTAL_LEN, VOCAB
from support.parity.local_engine import LocalEngine, one_rank
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup.built import Built

SEED = 8
WHERE = Neighbours(num_slots=4, step_tokens=40)


def request(
    name: str, prompt: list[int], max_tokens: int = 12, temperature: float = 0.8
) -> Request:
    sampling = pb.SamplingParams(
        temperature=temperature, seed=len(prompt), top_p=1.0, repetition_penalty=1.0
    )
    return Request(
        id=name, prompt_ids=prompt, emitted_ids=[], max_tokens=max_tokens, sampling=sampling
    )


def make_runner(bench: ParityBench, drafter: str) -> Built:
    tp = TensorParallel()
    return build_runner(load(bench.folder, tp), tp, WHERE, drafter, 3)


def engine(bench: ParityBench, drafter: str, *, caching: bool) -> LocalEngine:
    return engine_of(make_runner(bench, drafter), caching=caching)


def engine_of(built: Built, *, caching: bool = True) -> LocalEngine:
    return LocalEngine(
        one_rank(built.runner),
        built.facts,
        max_num_batched_tokens=WHERE.step_tokens,
        enable_prefix_caching=caching,
    )


def conversation(cut: int) -> list[list[int]]:
    """A, then B that leaves A after `cut` tokens, then A again, then A with more behind it."""
    rng = random.Random(SEED)
    first, other = rng.choices(range(3, VOCAB), k=41), rng.choices(range(3, VOCAB), k=20)
    return [first, [*first[:cut], *other], first, [*first, *other]]


@pytest.mark.parametrize("drafter", ["none", "mtp"])
@pytest.mark.parametrize("cut", range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1))
@pytest.mark.rotates(3)
def test_shared_prefixes_change_nothing(hybrid_bench: ParityBench, drafter: str, cut: int) -> None:
    """Prefixes are left at every offset from a block's border."""
    cached = engine(hybrid_bench, drafter, caching=True)
    plain = engine(hybrid_bench, drafter, caching=False)
    for turn, prompt in enumerate(conversation(cut)):
        made = request(f"{turn}", prompt)
        answer = cached.run([made])[f"{turn}"]
        assert answer.token_ids == plain.run([made])[f"{turn}"].token_ids
    counters = cached.state.counters
    assert counters.snapshot_hits >= 2
    # A again: everything but its last, incomplete block.
    assert counters.prefix_cache_hits >= 2 * (40 // BLOCK_SIZE * BLOCK_SIZE)
    assert plain.state.counters.prefix_cache_hits == 0


def test_the_next_turn_finds_the_state_behind_the_answer(hybrid_bench: ParityBench) -> None:
    cached = engine(hybrid_bench, "mtp", caching=True)
    prompt = conversation(0)[0]
    answer = cached.run([request("question", prompt, 40)])["question"].token_ids
    before = cached.state.counters.prefix_cache_hits
    cached.run([request("next", [*prompt, *answer, 5, 6])])
    found = cached.state.counters.prefix_cache_hits - before
    assert len(prompt) < found
    assert len(prompt) + len(answer) - found < 3 * BLOCK_SIZE


def test_conversations_that_begin_alike_find_the_state_where_they_part(
    hybrid_bench: ParityBench,
) -> None:
    """Even if others left no room for states within their prompts: the second leaves it there."""
    rng, found = random.Random(SEED), list[int]()
    beginning = rng.choices(range(3, VOCAB), k=3 * BLOCK_SIZE + 3)
    built = make_runner(hybrid_bench, "mtp")
    built.facts.num_snapshots = 3
    cached, plain = engine_of(built), engine(hybrid_bench, "mtp", caching=False)
    for turn in range(6):
        made = request(f"{turn}", [*beginning, *rng.choices(range(3, VOCAB), k=33)])
        before = cached.state.counters.prefix_cache_hits
        answer = cached.run([made])[made.id]
        assert answer.token_ids == plain.run([made])[made.id].token_ids
        found.append(cached.state.counters.prefix_cache_hits - before)
    assert found == [0, 0, *[3 * BLOCK_SIZE] * 4]


def test_pages_and_states_run_short_behind_drafts(hybrid_bench: ParityBench) -> None:
    """sgl-project/sglang#36537: 26 long answers, room for three of them, and the fewest states."""
    rng, tp = random.Random(36537), TensorParallel()
    where = Neighbours(num_slots=8, step_tokens=40, num_sequences=3)
    prompts = [rng.choices(range(3, VOCAB), k=rng.randint(2, 16)) for _ in range(26)]
    asked = [request(f"{i}", it, TOTAL_LEN - len(it), i % 2) for i, it in enumerate(prompts)]
    built = build_runner(load(hybrid_bench.folder, tp), tp, where, "mtp", 3)
    built.facts.num_snapshots = 2
    answers = engine_of(built).run(asked)
    plain = engine(hybrid_bench, "none", caching=False).run(asked)
    assert {name: each.token_ids for name, each in answers.items()} == {
        name: each.token_ids for name, each in plain.items()
    }
    for count in ("num_preemptions", "num_drafts", "num_accepted"):
        assert total(answers, count) > 0, count


def test_a_growing_chat_beside_others_finds_its_own_prefix(hybrid_bench: ParityBench) -> None:
    """vllm-project/vllm#45238: with few states, which others take too."""
    rng, built = random.Random(45238), make_runner(hybrid_bench, "mtp")
    built.facts.num_snapshots = 12
    cached, plain = engine_of(built), engine(hybrid_bench, "none", caching=False)
    chat: list[int] = rng.choices(range(3, VOCAB), k=20)
    for turn in range(8):
        made = request(f"{turn}", chat, 8)
        before = cached.state.counters.prefix_cache_hits
        others = [request(f"{turn}/{i}", rng.choices(range(3, VOCAB), k=20), 8) for i in range(2)]
        answer = cached.run([made, *others])[made.id].token_ids
        assert answer == plain.run([made])[made.id].token_ids
        assert turn == 0 or cached.state.counters.prefix_cache_hits > before
        chat = [*chat, *answer, *rng.choices(range(3, VOCAB), k=4)]


def test_the_state_found_is_the_state_computed(hybrid_bench: ParityBench) -> None:
    """Bit for bit, in every recurrent layer."""
    prompt = conversation(0)[0]
    states = []
    for warm in (True, False):
        built = make_runner(hybrid_bench, "none")
        cached = engine_of(built)
        if warm:
            cached.run([request("warm", prompt)])
        cached.run([request("probe", prompt, 1)])
        assert (cached.state.counters.prefix_cache_hits > 0) == warm
        recurrent = built.runner.context.caches.recurrent
        assert recurrent is not None
        states.append([layer.delta.state[0].clone() for layer in recurrent.layers])
    for found, computed in zip(*states, strict=True):
        assert torch.equal(found, computed)


def test_a_drafter_with_a_cached_prefix_drafts_as_well_as_without(
    hybrid_bench: ParityBench,
) -> None:
    """The head's rows behind a cached prefix are made up for: the same drafts are accepted."""
    prompt = conversation(0)[0]
    counts = []
    for warm in (True, False):
        cached = engine(hybrid_bench, "mtp", caching=True)
        if warm:
            cached.run([request("warm", [*prompt[:33], 9, 9])])
        answer = cached.run([request("probe", prompt, 40, temperature=0.0)])["probe"]
        assert (cached.state.counters.prefix_cache_hits > 0) == warm
        counts.append((answer.num_drafts, answer.num_accepted))
    assert counts[0] == counts[1]
