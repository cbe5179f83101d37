"""What a draft head proposed, and what was known then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.parity.local_engine import LocalEngine, one_rank
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.drafters import Drafts
from surestep_worker.drafters.head import HeadSteps
from surestep_worker.drafters.inputs import DraftInputs
from surestep_worker.startup.built import Built


class Proposal(NamedTuple):
    """What was known, and what was drafted."""

    known: list[int]
    drafts: list[int]


def record(into: list[Proposal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note every proposal of a draft head."""
    draft = HeadSteps.draft

    def noted(self: HeadSteps, rows: DraftInputs, *rest: Any) -> Drafts:
        state, asked = self._state, rows.max_drafts > 0
        slots = rows.slot[asked].tolist()
        known = [state.tokens[slot, : state.known[slot]].tolist() for slot in slots]
        drafts = draft(self, rows, *rest)
        ids, counts = drafts.ids[asked].tolist(), drafts.counts[asked].tolist()
        for before, row, count in zip(known, ids, counts, strict=True):
            into.append(Proposal(before, row[:count]))
        return drafts

    monkeypatch.setattr(HeadSteps, "draft", noted)


def proposals(built: Built, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Proposal], LocalEngine]:
    """What is proposed for a few greedy requests of random tokens, one with a single draft."""
    made: list[Proposal] = []
    record(made, monkeypatch)
    engine = LocalEngine(one_rank(built.runner), built.facts, max_num_batched_tokens=24)
    sampling = pb.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0)
    rng = torch.Generator().manual_seed(2)
    vocab = built.facts.vocab_size
    requests = [
        Request(
            id=f"{i}",
            prompt_ids=torch.randint(8, vocab, (5 + 20 * i,), generator=rng).tolist(),
            emitted_ids=[],
            max_tokens=40,
            sampling=sampling,
        )
        for i in range(4)
    ]
    requests[2] = replace(requests[2], draft_cap=1)
    engine.run(requests)
    return made, engine
