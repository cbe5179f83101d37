"""A rank that is replaced: its successor goes on from the blocks that are whole, and from no others.

The rank ends wherever it may: before a step, with its pages written and nothing told, or behind it.
Whatever was not sealed then is garbage.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parity import local_engine
from support.parity.bench import (
    BLOCK_SIZE,
    HEAD,
    Neighbours,
    ParityBench,
    make_draft_model,
    make_eagle3_gpt_oss,
    make_gpt_oss,
    make_hybrid,
    make_model,
    same,
)
from support.parity.cases import strangers
from support.parity.local_engine import Answer, LocalEngine, Step, one_rank
from surestep_common.invariants import LedgerError
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.messages import Kept
from surestep_scheduler.engine import wire
from surestep_worker.cache import held_caches
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.held_caches import IDENTITY_BYTES, HeldCaches
from surestep_worker.host import shared_memory
from surestep_worker.startup.built import Built
from surestep_worker.step.runner import Runner

WHERE = Neighbours(num_slots=8, step_tokens=24)
IDENTITY = b"i" * IDENTITY_BYTES
EVERY = 9  # steps of a rank
KINDS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "dense": (make_model, "ngram", 4),
    "hybrid with MTP": (make_hybrid, "mtp", 3),
    "windows and EAGLE-3": (make_eagle3_gpt_oss, HEAD, 3),
    "windows": (make_gpt_oss, "none", 0),
    "draft model": (make_draft_model, "draft_model", 3),
}


class End(Exception):
    """The rank has ended."""


class Ranks:
    """One rank after the other, on the same memory."""

    def __init__(self, bench: ParityBench, drafter: str, k: int, seed: int) -> None:
        self._fd = shared_memory.create("surestep-test")
        self._bench, self._drafts = bench, (drafter, k)
        self.rng = random.Random(seed)
        self.lost = list[int]()  # committed tokens that are computed again, of each replay
        self.num_corrupted = self.num_drafted = 0

    def start(self) -> Built:
        """The next rank, and in its facts what it found whole."""
        built = self._bench.rank(WHERE, *self._drafts, CacheMemory(os.dup(self._fd)))
        kept = held(built).verify(IDENTITY)
        if kept is not None:
            built.facts.kept.CopyFrom(kept)
            self.num_drafted += sum(byte.bit_count() for byte in kept.drafted)
        return built

    def steps(self, runner: Runner) -> Callable[[int], Step]:
        """Steps of a rank that ends in one of them."""

        def opened(epoch: int) -> Step:
            runner.open(epoch)
            ends, where = self.rng.randint(2, EVERY), self.rng.randrange(3)

            def step(plan: pb.StepPlan) -> list[pb.StepResult]:
                if plan.step == ends and where == 0:
                    raise End
                pending = runner.launch(plan)
                if plan.step == ends and where == 1:
                    raise End
                result = pending.finish()
                if plan.step == ends:
                    raise End
                return [result]

            return step

        return opened

    def serve(self, corrupt: int = 0) -> dict[str, Answer]:
        """Answers of the requests of the matrix; `corrupt` sealed blocks change at every end."""
        built = self.start()
        engine = LocalEngine(
            self.steps(built.runner)(1), built.facts, max_num_batched_tokens=WHERE.step_tokens
        )
        for request in self._bench.requests:
            engine.add(request)
        while engine.state.open or engine._results:
            try:
                engine.advance()
            except End:
                state = engine.state
                committed = {t.seq: int(state.slots.committed[t.slot]) for t in state.running}
                scribble(built, self.rng)
                self.num_corrupted += corrupt_blocks(built, self.rng, corrupt)
                built = self.start()
                engine.recover(built.facts, self.steps(built.runner))
                self.lost += [
                    length - state.lookup(seq).cached.num_blocks * BLOCK_SIZE
                    for seq, length in committed.items()
                    if not seq.needs_whole_prompt and not seq.num_non_finite
                ]
            engine.state.check()
        return engine._answers


def held(built: Built) -> HeldCaches:
    found = built.runner.context.caches.held
    assert found is not None
    return found


def sealed(seals: Any) -> Iterator[int]:
    yield from np.flatnonzero(seals.epochs).tolist()


def scribble(built: Built, rng: random.Random) -> None:
    """Leave garbage in all that no seal protects, as a rank does that ends while it writes."""
    books = held(built)
    for seals in (books._blocks, books._drafted, books._snapshots):
        free = np.flatnonzero(seals.epochs == 0)
        for page in seals._pages:
            page[free] = torch.full_like(page[free], rng.choice([-8.5, 3.25]))


def corrupt_blocks(built: Built, rng: random.Random, count: int) -> int:
    """Flip a bit in so many sealed blocks, of an exponent."""
    seals = held(built)._blocks
    chosen = list(sealed(seals))
    chosen = rng.sample(chosen, min(count, len(chosen)))
    for block in chosen:
        data = rng.choice(seals._pages)[block].flatten().view(torch.uint8)
        data[rng.randrange(3, len(data), 4)] ^= 8  # a number is 2**16 times what it was, or less
    return len(chosen)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ParityBench]:
    made = dict[str, ParityBench]()

    def bench(kind: str) -> ParityBench:
        if kind not in made:
            made[kind] = ParityBench(tmp_path_factory.mktemp("kept") / "model", KINDS[kind][0])
        return made[kind]

    return bench


def ranks(benches: Callable[[str], ParityBench], kind: str, seed: int) -> Ranks:
    return Ranks(benches(kind), *KINDS[kind][1:], seed)


def unequal(bench: ParityBench, answers: dict[str, Answer]) -> list[str]:
    return [name for name, answer in answers.items() if not same(answer, bench.expected[name])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_costs_less_than_a_block(
    benches: Callable[[str], ParityBench], kind: str, seed: int
) -> None:
    """Of each request, except where log-probabilities of a whole prompt are wanted."""
    served = ranks(benches, kind, seed)
    assert unequal(benches(kind), served.serve()) == []
    assert len(served.lost) > 50
    blocks = 3 if kind == "hybrid with MTP" else 1  # its states lie apart by a block or more
    assert max(served.lost) < blocks * BLOCK_SIZE
    assert (served.num_drafted > 20) == (kind not in ("dense", "windows"))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_other_bytes_are_computed_again(
    benches: Callable[[str], ParityBench], kind: str
) -> None:
    served = ranks(benches, kind, 5)
    assert unequal(benches(kind), served.serve(corrupt=3)) == []
    assert served.num_corrupted > 10


def trusts_every_digest(self: Any, epoch: int) -> Any:
    return self.epochs == epoch


def trusts_every_planner(infos: Any, planner: int, epoch: int) -> Kept | None:
    return wire.kept_by(infos, infos[0].kept.planner, infos[0].kept.epoch)


def test_wrong_bytes_would_be_noticed(
    benches: Callable[[str], ParityBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_caches._Seals, "verify", trusts_every_digest)
    answers = ranks(benches, "dense", 5).serve(corrupt=20)
    assert unequal(benches("dense"), answers) != []


@pytest.mark.parametrize("careless", [False, True])
def test_a_scheduler_knows_whose_blocks_they_are(
    benches: Callable[[str], ParityBench], monkeypatch: pytest.MonkeyPatch, careless: bool
) -> None:
    """Another one has planned in between, and its epochs have numbers of this one's. A rank does not
    let a scheduler be careless."""
    if careless:
        monkeypatch.setattr(local_engine, "kept_by", trusts_every_planner)
    bench, served = benches("dense"), ranks(benches, "dense", 1)
    built = served.start()
    engine = LocalEngine(one_rank(built.runner), built.facts, max_num_batched_tokens=24)
    for request in bench.requests:
        engine.add(request)
    for _ in range(40):
        engine.advance()
    between = served.start()
    assert list(np.flatnonzero(held(between)._blocks.epochs == 1)) != []
    other = LocalEngine(one_rank(between.runner), between.facts, max_num_batched_tokens=24)
    other.run(strangers(30))
    engine.state.epoch += careless  # it has tried to open an epoch meanwhile
    last = served.start()
    engine.recover(last.facts, partial(one_rank, last.runner))
    assert (engine.state.num_kept > 0) == careless
    if careless:
        with pytest.raises(LedgerError, match="keeps blocks of epoch"):
            engine.advance()
    else:
        assert unequal(bench, engine.run([])) == []
