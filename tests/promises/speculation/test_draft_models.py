"""A model that drafts for itself is right always, whatever its family; and faults show.

Its texts share a prefix, some of whose blocks were filled while nothing was drafted, and the blocks
are too few for all requests, so that some begin again.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.parity.bench import (
    BLOCK_SIZE,
    DRAFT,
    Neighbours,
    build_runner,
    load,
    make_branches,
    make_gpt_oss,
    make_hybrid,
    make_model,
    make_small,
    total,
)
from support.parity.cases import TOTAL_LEN, VOCAB
from support.parity.drafters import draft_again
from support.parity.latent_models import make_deepseek_v3, make_glm_dsa
from support.parity.local_engine import LocalEngine, one_rank
from surestep_common.invariants import LedgerError
from surestep_kernels.gather_tokens import TokenRuns
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.cache.blocks import BlockPool
from surestep_scheduler.core.sequence import Request
from surestep_worker.cache.recurrent import DraftStates
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters.head import HeadSteps
from surestep_worker.startup.built import Built

WHERE = Neighbours(num_slots=8, step_tokens=40, num_sequences=3)
MAKES: dict[str, Callable[[Path], None]] = {
    "llama": make_model,
    "hybrid": partial(make_hybrid, mtp=False),  # whose states run ahead
    "gpt_oss": make_gpt_oss,  # with windows and sinks
    "deepseek": make_deepseek_v3,  # with latents
    "glm_dsa": make_glm_dsa,  # whose indexers choose
    **{name: partial(make_small, name) for name in ("mixtral", "phi3", "smollm3", "cohere")},
    **{name: partial(make_branches, name=name) for name in ("gemma2", "gemma3", "granite")},
}


def draft_for_itself(folder: Path, make: Callable[[Path], None]) -> Path:
    make(folder)
    shutil.copytree(folder, folder / DRAFT)
    return folder


def ask(
    name: str,
    prompt: list[int],
    temperature: float,
    draft_cap: int | None = None,
    length: int = TOTAL_LEN,
) -> Request:
    sampling = pb.SamplingParams(
        temperature=temperature, seed=len(prompt), top_p=1.0, repetition_penalty=1.0
    )
    return Request(
        id=name,
        prompt_ids=prompt,
        emitted_ids=[],
        max_tokens=length - len(prompt),
        sampling=sampling,
        draft_cap=draft_cap,
    )


@pytest.mark.parametrize("limit", [*range(3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE + 2), TOTAL_LEN])
def test_acceptance_stays_at_borders_and_behind_the_end_of_a_context(
    twins: Path, limit: int
) -> None:
    """ggml-org/llama.cpp#23636, vllm-project/vllm#52873: texts run into max_model_len one after the
    other, and a fresh one follows.
    """
    tp, rng = TensorParallel(), random.Random(limit)
    where = replace(WHERE, max_model_len=limit)
    engine = engine_of(build_runner(load(twins, tp), tp, where, "draft_model", 4))
    prompts = [rng.choices(range(8, VOCAB), k=limit - 1 - n) for n in range(1, limit - 1, 3)]
    for name, each in (("full", prompts), ("fresh", prompts[-1:])):
        asked = [ask(f"{name} {i}", it, 0.0, length=limit) for i, it in enumerate(each)]
        before = engine.state.counters.draft_tokens
        found = engine.run(asked)
        assert all(len(one.prompt_ids) + len(found[one.id].token_ids) == limit for one in asked)
        assert engine.state.counters.draft_tokens > before
        assert engine.state.counters.accepted_tokens == engine.state.counters.draft_tokens


class Counts(NamedTuple):
    drafts: int
    accepted: int
    preemptions: int
    faults: int


def engine_of(built: Built) -> LocalEngine:
    tokens = WHERE.step_tokens
    return LocalEngine(
        one_rank(built.runner),
        built.facts,
        max_num_batched_tokens=tokens,
        after_apply=draft_again,
    )


def drafts(folder: Path, k: int, temperature: float = 0.0) -> Counts:
    """Serve texts with a prefix in common, and count."""
    tp, rng = TensorParallel(), random.Random(3)
    built = build_runner(load(folder, tp), tp, WHERE, "draft_model", k)
    engine = engine_of(built)
    shared = rng.choices(range(8, VOCAB), k=2 * BLOCK_SIZE)
    engine.run([ask("first", [*shared, 3], temperature, draft_cap=0)])
    others = (rng.choices(range(8, VOCAB), k=1 + i) for i in range(8))
    found = engine.run(ask(f"{i}", [*shared, *it], temperature) for i, it in enumerate(others))
    counters = engine.state.counters
    assert counters.prefix_cache_hits >= 2 * BLOCK_SIZE
    return Counts(
        counters.draft_tokens,
        counters.accepted_tokens,
        total(found, "num_preemptions"),
        counters.drafter_faults,
    )


@pytest.mark.parametrize("family", MAKES)
@pytest.mark.rotates(4, always=("[llama]", "[cohere]"))
def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path, family: str) -> None:
    folder = draft_for_itself(tmp_path / "model", MAKES[family])
    for k in (1, 4):
        counts = drafts(folder, k)
        assert counts.drafts == counts.accepted > 60
        assert counts.faults == 0
        assert counts.preemptions > 0 or family != "llama"


def newest_token_unread(patch: pytest.MonkeyPatch) -> None:
    right = HeadSteps._catch_up

    def catch_up(self: HeadSteps, slots: Any, catch_up: torch.Tensor, *rest: Any) -> None:
        right(self, slots, catch_up - 1, *rest)

    patch.setattr(HeadSteps, "_catch_up", catch_up)


def token_behind_the_position(patch: pytest.MonkeyPatch) -> None:
    """Take the token behind a position, as heads do that read hidden states."""

    def gather(self: HeadSteps, runs: Any, error: torch.Tensor) -> Any:
        kv = self._context.caches.kv
        sizes = {"block_size": kv.spec.block_size, "num_blocks": kv.num_blocks}
        return self._ops.gather_tokens(runs, self._state, error, shift=1, **sizes)

    patch.setattr(HeadSteps, "_gather", gather)


def positions_one_further(patch: pytest.MonkeyPatch) -> None:
    right = HeadSteps._next

    def further(self: HeadSteps, slots: Any, position: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, slots, position + 1, *rest)

    patch.setattr(HeadSteps, "_next", further)


def cached_rows_that_nobody_made(patch: pytest.MonkeyPatch) -> None:
    """Every cached block counts as one with the drafter's rows."""
    patch.setattr(BlockPool, "num_drafted", lambda self, blocks: len(blocks))


def states_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """Drafts advance the state of what is known."""

    def ahead(self: DraftStates, runs: TokenRuns) -> RecurrentRows:
        return self._rows(runs, runs.slots, torch.zeros_like(runs.valid), 1)

    patch.setattr(DraftStates, "ahead", ahead)


def states_of_earlier_requests(patch: pytest.MonkeyPatch) -> None:
    right = DraftStates.left

    def left(self: DraftStates, slots: torch.Tensor, upto: torch.Tensor, end: torch.Tensor) -> Any:
        return right(self, slots, upto.clamp(min=1), end)

    patch.setattr(DraftStates, "left", left)


def states_that_do_not_run_ahead(patch: pytest.MonkeyPatch) -> None:
    right = DraftStates._rows

    def rows(self: DraftStates, runs: Any, lines: Any, copied: torch.Tensor, *rest: Any) -> Any:
        return right(self, runs, lines, torch.zeros_like(copied), *rest)

    patch.setattr(DraftStates, "_rows", rows)


def faults_in_between(patch: pytest.MonkeyPatch) -> None:
    """Every fifth pass that catches up raises, when the states have advanced."""
    right, turn = DraftStates.end, count(1)

    def end(self: DraftStates, runs: TokenRuns) -> None:
        if next(turn) % 5 == 0:
            raise MemoryError
        right(self, runs)

    patch.setattr(DraftStates, "end", end)


def states_of_passes_that_failed(patch: pytest.MonkeyPatch) -> None:
    faults_in_between(patch)

    def begin(self: DraftStates, runs: TokenRuns, most: int) -> RecurrentRows:
        return self._rows(runs, runs.slots, runs.valid, most)

    patch.setattr(DraftStates, "begin", begin)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], ...]] = {
    "twins": (
        newest_token_unread,
        token_behind_the_position,
        positions_one_further,
        cached_rows_that_nobody_made,
    ),
    "hybrid_twins": (
        states_not_rolled_back,
        states_of_earlier_requests,
        states_that_do_not_run_ahead,
        states_of_passes_that_failed,
    ),
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_for_itself(tmp_path_factory.mktemp("twins") / "model", make_model)


@pytest.fixture(scope="module")
def hybrid_twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_for_itself(tmp_path_factory.mktemp("twins") / "model", MAKES["hybrid"])


@pytest.mark.parametrize(
    ("family", "mutant"), [(family, mutant) for family in MUTANTS for mutant in MUTANTS[family]]
)
def test_mutants(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    counts = drafts(request.getfixturevalue(family), 4)
    assert counts.accepted < 0.9 * counts.drafts


def test_states_of_cached_prefixes_are_refused(
    hybrid_twins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_rows_that_nobody_made(monkeypatch)
    with pytest.raises(LedgerError, match="the drafter has no state of cached prefixes"):
        drafts(hybrid_twins, 1)


def test_states_that_a_fault_left_are_not_drafted_from(
    hybrid_twins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_in_between(monkeypatch)
    counts = drafts(hybrid_twins, 4)
    assert counts.faults > 2
    assert counts.drafts == counts.accepted > 20


def test_drafts_at_a_temperature_use_the_noise_of_their_positions(twins: Path) -> None:
    """Drafts that are not accepted were drawn at another temperature, to find the best."""
    counts = drafts(twins, 2, temperature=0.9)
    assert counts.drafts > counts.accepted > 0.8 * counts.drafts
