"""Before a rank is ready: costs are measured, the drafter is checked, nothing of it stays behind."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.bench import (
    NEIGHBOURS,
    Neighbours,
    ParityBench,
    build_runner,
    load,
    make_hybrid,
    serve,
)
from support.parity.local_engine import one_rank
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup import profile
from surestep_worker.startup.build import build_runner as build_from_settings
from surestep_worker.startup.built import Built
from surestep_worker.startup.profile import Check, check_drafter, measure_costs
from surestep_worker.step.runner import Runner

TRAINED = Path(__file__).parents[2] / "data" / "tiny-hybrid"
ROOM = Neighbours(num_slots=8, max_model_len=400)


def built(folder: Path, drafter: str, k: int, where: Neighbours = ROOM) -> Built:
    tp = TensorParallel()
    return build_runner(load(folder, tp), tp, where, drafter, k)


@pytest.mark.parametrize(("drafter", "k"), [("mtp", 3), ("ngram", 4)])
def test_costs_of_few_and_many_rows(tmp_path: Path, drafter: str, k: int) -> None:
    costs = measure_costs(built(make_tiny_hybrid(tmp_path), drafter, k).runner)
    assert costs.tokens[0] == 1
    assert list(costs.tokens) == sorted(set(costs.tokens))
    assert len(costs.step_us) == len(costs.tokens)
    assert min(costs.step_us) > 0
    assert len(costs.draft_us) == len(costs.draft_rows)
    assert set(costs.draft_rows) <= {1, 2, 4, 8}
    assert costs.us_per_context_token >= 0
    if drafter == "mtp":  # n-grams may find nothing to draft
        assert (
            max(costs.draft_us) > 0 <= min(costs.draft_us)
        )  # a slow step may hide the cost of one
        assert 1 + k in costs.tokens  # one row with all its drafts


def test_sizes_without_room_are_not_measured(tmp_path: Path) -> None:
    folder = make_tiny_hybrid(tmp_path)
    small = built(folder, "mtp", 3, replace(ROOM, max_model_len=40)).runner
    assert not measure_costs(small).tokens
    assert check_drafter(small) == (0, 0, 0)


def test_a_trained_head_passes_the_check_and_a_random_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_CHECK_S", 60.0)  # the machine may be busy
    trained = check_drafter(built(TRAINED, "mtp", 1).runner)
    assert trained.accepted > 0.2 * trained.drafts > 0
    random = check_drafter(built(make_tiny_hybrid(tmp_path), "mtp", 1).runner)
    assert random.accepted < 0.2 * random.drafts
    assert trained.windows == 16, "four texts of four windows are enough for a sound head"
    settled = check_drafter(built(make_tiny_hybrid(tmp_path / "4"), "mtp", 4).runner)
    assert settled.windows == 48 or settled.accepted > 5, "192 drafts are low up to 5 accepted"
    assert check_drafter(built(TRAINED, "ngram", 1).runner) == (0, 0, 0)


def test_a_head_that_fails_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WorkerSettings(
        model=make_tiny_hybrid(tmp_path, seed=3),
        max_num_seqs=4,
        kv_cache_memory=0.02,
        speculative_config={"method": "mtp", "num_speculative_tokens": 4},
    )
    with caplog.at_level(logging.INFO):
        facts = build_from_settings(settings).facts
    assert facts.costs.tokens
    assert facts.check_drafts > 0
    (line,) = [record for record in caplog.records if "drafter check" in record.message]
    failed = Check(0, facts.check_drafts, facts.check_accepted).is_low
    assert line.levelno == (logging.WARNING if failed else logging.INFO)


@pytest.mark.rotates(1)
def test_nothing_of_it_is_seen_by_requests(tmp_path: Path) -> None:
    bench = ParityBench(tmp_path, make_hybrid)
    where = replace(NEIGHBOURS["mixed"], max_model_len=400)
    made = built(bench.folder, "mtp", 3, where)
    measure_costs(made.runner)
    check_drafter(made.runner)
    step = one_rank(Runner(made.runner.context))
    answers = serve(step, made.facts, bench.requests, where, depth=1)
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids
