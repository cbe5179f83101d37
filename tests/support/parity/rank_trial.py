"""Ranks built from settings, as a process would build them, and what they answer among strangers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.parity.bench import BLOCK_SIZE, CALM, NEIGHBOURS, Conditions, serve, step_of, total
from support.parity.cases import EOS, NEUTRAL, VOCAB, make_request, strangers
from support.parity.drafters import TRUTH
from support.parity.local_engine import Answer
from surestep_scheduler.core.sequence import Request
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.build import build_runner
from surestep_worker.startup.built import Built
from surestep_worker.step.runner import Runner


def short_requests(seed: int, temperatures: Sequence[float]) -> list[Request]:
    """One for each temperature, with a prompt of its own."""
    rng = random.Random(seed)
    return [
        make_request(
            f"{i}@{temperature}",
            [3 + i, *rng.choices(range(20, VOCAB), k=9 + i)],
            {"temperature": temperature, "seed": i, **NEUTRAL},
        )
        for i, temperature in enumerate(temperatures)
    ]


def tokens(found: dict[str, Answer]) -> dict[str, list[int]]:
    """Of each answer."""
    return {name: answer.token_ids for name, answer in found.items()}


@dataclass(frozen=True)
class RankTrial:
    """Requests for ranks that have some settings in common."""

    requests: list[Request]
    settings: dict[str, Any]

    def build(
        self, folder: Path, where: str = "alone", drafter: str = "none", **changes: Any
    ) -> Built:
        """A rank with room for the neighbours of that name."""
        neighbours = NEIGHBOURS[where]
        defaults: dict[str, Any] = {
            "model": folder,
            "dtype": "float32",
            "max_num_seqs": neighbours.num_slots,
            "max_model_len": neighbours.max_model_len,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory": 0.01,
            "speculative_config": {"method": drafter, "num_speculative_tokens": 3},
        }
        return build_runner(WorkerSettings(**(defaults | self.settings | changes)))

    def answers(
        self,
        folder: Path,
        where: str,
        drafter: str,
        depth: int,
        conditions: Conditions = CALM,
        **changes: Any,
    ) -> dict[str, Answer]:
        """Of the requests, among strangers."""
        built = self.build(folder, where, drafter, **changes)
        ops = conditions.step_ops
        runner = Runner(built.runner.context._replace(step_ops=ops)) if ops else built.runner
        everyone = [*self.requests, *strangers(NEIGHBOURS[where].num_strangers // 3)]
        found = serve(step_of(runner), built.facts, everyone, NEIGHBOURS[where], depth, conditions)
        return {request.id: found[request.id] for request in self.requests}

    def drafts_change_nothing(
        self,
        folder: Path,
        alone: dict[str, Answer],
        where: str,
        drafter: str,
        depth: int,
        conditions: Conditions = CALM,
        **changes: Any,
    ) -> None:
        """Assert that requests answer as `alone` where some drafts are accepted."""
        self.tell_oracles(alone)
        found = self.answers(folder, where, drafter, depth, conditions, **changes)
        assert tokens(found) == tokens(alone)
        assert total(found, "num_accepted") > 0

    def tell_oracles(self, answers: dict[str, Answer]) -> None:
        """The drafters that know what will be said take it from these."""
        full = [[*request.prompt_ids, *answers[request.id].token_ids] for request in self.requests]
        TRUTH.learn(full, vocab_size=VOCAB, stop_id=EOS)
