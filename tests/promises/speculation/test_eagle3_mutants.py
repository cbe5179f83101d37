"""Faults that change no token are seen where they show: fewer drafts are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.copied_head import make_copied_pair
from support.checkpoints.dflash import make_counting_pair
from support.parity.bench import BLOCK_SIZE, BLOCKS, HEAD, Neighbours, build_runner, load
from support.parity.cases import VOCAB
from support.parity.local_engine import LocalEngine, one_rank
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.cache.blocks import BlockPool
from surestep_scheduler.core.sequence import Request
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import Drafts
from surestep_worker.drafters.head import HeadSteps
from surestep_worker.drafters.inputs import DraftInputs
from surestep_worker.models import Model

WHERE = Neighbours(num_slots=8, step_tokens=64)
Mutant = Callable[[pytest.MonkeyPatch, Model], None]


def nothing(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Leave all as it is."""


def layers_off_by_one(patch: pytest.MonkeyPatch, model: Model) -> None:
    assert model.draft_head is not None
    model.draft_head.captured_layers = tuple(j + 1 for j in model.draft_head.captured_layers)


def token_of_the_same_position(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Row i has token i in place of token i + 1."""

    def gather(self: HeadSteps, runs: Any, error: torch.Tensor) -> Any:
        kv = self._context.caches.kv
        sizes = {"block_size": kv.spec.block_size, "num_blocks": kv.num_blocks}
        return self._ops.gather_tokens(runs, self._state, error, shift=0, **sizes)

    patch.setattr(HeadSteps, "_gather", gather)


def positions_one_further(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Further drafts are made a position behind where they belong."""
    right = HeadSteps._next

    def further(self: HeadSteps, slots: Any, position: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, slots, position + 1, *rest)

    patch.setattr(HeadSteps, "_next", further)


def minus_one_as_an_id(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Places without a draft hold -1, and every window is as long as it may be (#39295)."""
    right = HeadSteps.draft

    def draft(self: HeadSteps, rows: DraftInputs, *rest: Any) -> Drafts:
        drafts = right(self, rows, *rest)
        column = torch.arange(drafts.ids.shape[1])
        empty = column >= drafts.counts.unsqueeze(1) - 1  # the last one is never there
        return Drafts(torch.where(empty, -1, drafts.ids), drafts.counts, drafts.non_finite)

    patch.setattr(HeadSteps, "draft", draft)


def ids_of_the_draft_vocabulary(patch: pytest.MonkeyPatch, model: Model) -> None:
    """As if there were no d2t."""
    assert model.draft_head is not None
    model.draft_head.token_ids = None


def cached_rows_that_nobody_made(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Every cached block counts as one with the drafter's rows."""
    patch.setattr(BlockPool, "num_drafted", lambda self, blocks: len(blocks))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The model with a head that guards what it reads, and with one that drafts on."""
    folders = {guard: tmp_path_factory.mktemp(f"guard-{guard}") for guard in (True, False)}
    return {
        guard: make_copied_pair(folder, folder / HEAD, guard=guard)
        for guard, folder in folders.items()
    }


def accepted_share(
    folder: Path,
    mutant: Mutant,
    patch: pytest.MonkeyPatch,
    k: int,
    *,
    prefix: bool = False,
    drafter: str = "eagle3",
    own: int = 9,
) -> float:
    """Share that is accepted of the drafts of greedy requests, each with so many tokens of its
    `own`; with a `prefix`, of those that share one whose blocks were filled while nothing was
    drafted."""
    tp, rng = TensorParallel(), random.Random(3)
    model = load(folder, tp)
    mutant(patch, model)
    built = build_runner(model, tp, WHERE, drafter, k)
    engine = LocalEngine(one_rank(built.runner), built.facts, max_num_batched_tokens=64)
    shared = rng.choices(range(3, VOCAB), k=6 * BLOCK_SIZE if prefix else 1)
    if prefix:
        engine.run([ask("first", [*shared, 3], draft_cap=0)])
    engine.run(ask(f"{i}", [*shared, *rng.choices(range(8, VOCAB), k=own)]) for i in range(6))
    counters = engine.state.counters
    assert counters.draft_tokens > 60 or counters.drafter_faults
    return counters.accepted_tokens / max(1, counters.draft_tokens)


def ask(name: str, prompt: list[int], draft_cap: int | None = None) -> Request:
    sampling = pb.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0)
    return Request(
        id=name,
        prompt_ids=prompt,
        emitted_ids=[],
        max_tokens=30,
        sampling=sampling,
        draft_cap=draft_cap,
    )


def test_layers(pairs: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (
        accepted_share(pairs[True], mutant, monkeypatch, 1)
        for mutant in (nothing, layers_off_by_one)
    )
    assert right > 0.4 > 0.1 > wrong


@pytest.mark.parametrize("mutant", [token_of_the_same_position, ids_of_the_draft_vocabulary])
def test_tokens(pairs: dict[bool, Path], monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    right, wrong = (
        accepted_share(pairs[False], made, monkeypatch, 2) for made in (nothing, mutant)
    )
    assert right > 0.3 > 0.15 > wrong


def test_positions(pairs: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft of a window is right all the same."""
    right, wrong = (
        accepted_share(pairs[False], made, monkeypatch, 4)
        for made in (nothing, positions_one_further)
    )
    assert right > 1.3 * wrong


def test_placeholders_among_the_drafts_are_no_drafts(
    pairs: dict[bool, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert accepted_share(pairs[False], minus_one_as_an_id, monkeypatch, 2) == 0
    assert "the drafter proposed an id outside the vocabulary" in caplog.text


def test_cached_prefixes(pairs: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (
        accepted_share(pairs[False], mutant, monkeypatch, 2, prefix=True)
        for mutant in (nothing, cached_rows_that_nobody_made)
    )
    assert right > 0.3
    assert right > 1.5 * wrong


def test_cached_contexts_of_dflash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drafts of a request repeat what its prefix says."""
    folder = make_counting_pair(tmp_path / "model", tmp_path / "model" / BLOCKS)
    right, wrong = (
        accepted_share(folder, mutant, monkeypatch, 6, prefix=True, drafter="dflash", own=1)
        for mutant in (nothing, cached_rows_that_nobody_made)
    )
    assert right > 0.5
    assert right > 1.2 * wrong
