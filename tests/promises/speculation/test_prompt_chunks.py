"""An engine whose recurrent layers compute prompts in chunks, in bf16: no bit depends on the rest.

The delta rule is Triton's, the other ops are the CPU's, in which a row depends on no other either.
So states must be equal to the last bit, however a prompt was cut, whatever was found in the cache,
after a preemption and after a fault, and beside any neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.bench import BLOCK_SIZE, same, step_of
from support.parity.cases import EOS, VOCAB
from support.parity.local_engine import Answer, LocalEngine
from surestep_common.invariants import IntArray
from surestep_kernels import KernelSet, load_kernels
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.startup.build import assemble
from surestep_worker.startup.built import Built
from surestep_worker.step.slots import Slots
from torch import Tensor

pytestmark = pytest.mark.rotates(3)

CHUNK = 64
SLOTS = 3
OUTPUT = 6
RNG = random.Random(3)
TEXT = RNG.choices(range(3, VOCAB), k=2 * CHUNK + 11)

After = Callable[["Engine"], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chunks")
    heads: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    make_tiny_hybrid(path, vocab=VOCAB, eos_token_ids=(EOS,), seed=7, **heads)
    return path


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.kernels.triton_interpreter import repair

    repair(monkeypatch)


def chunking_kernels() -> KernelSet:
    from surestep_kernels.gated_delta.chunks import CHUNK as SIZE
    from surestep_kernels.gated_delta.triton import gated_delta

    assert SIZE == CHUNK
    return replace(load_kernels("cpu"), gated_delta=gated_delta, delta_chunk=SIZE)


def build(folder: Path, drafter: str, kernels: KernelSet) -> Built:
    tp = TensorParallel()
    source = ModelSource(folder)
    model = load_model(
        source, dtype="bfloat16", device="cpu", tp=tp, kernels=kernels, draft_head=True
    )
    settings = WorkerSettings(
        max_num_seqs=SLOTS,
        max_model_len=4 * CHUNK,
        block_size=BLOCK_SIZE,
        kv_cache_memory=0.01,
        speculative_config={"method": drafter, "num_speculative_tokens": 2 * (drafter != "none")},
    )
    return assemble(settings, model, tp, kernels)


def request(name: str, prompt: list[int]) -> Request:
    sampling = pb.SamplingParams(
        top_p=1, repetition_penalty=1, want_logprobs=True, num_top_logprobs=3
    )
    return Request(id=name, prompt_ids=prompt, emitted_ids=[], max_tokens=OUTPUT, sampling=sampling)


PROBE = request("probe", TEXT)


@dataclass
class Outcome:
    """Of the probe."""

    answer: Answer
    states: list[Tensor]  # of every recurrent layer, when it ended

    def equals(self, other: Outcome) -> bool:
        states = zip(self.states, other.states, strict=True)
        return same(self.answer, other.answer) and all(torch.equal(a, b) for a, b in states)


class Engine:
    """Serves the probe among others; `after` may interfere between steps."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 4 * CHUNK,
        drafter: str = "none",
        depth: int = 0,
        kernels: KernelSet | None = None,
        after: After = lambda engine: None,
    ) -> None:
        self.built = build(folder, drafter, kernels or chunking_kernels())
        self.slot, self.interfered = -1, 0
        self._after = after
        self.local = LocalEngine(
            step_of(self.built.runner),
            self.built.facts,
            depth=depth,
            max_num_batched_tokens=budget,
            after_apply=self._applied,
        )

    def _applied(self, state: object) -> None:
        seq = self.local.state.open.get("probe")
        if seq is not None and seq.tenancy is not None:
            self.slot = seq.tenancy.slot
        self._after(self)

    def serve(self, others: Iterable[Request] = (), probe: Request = PROBE) -> Outcome:
        answer = self.local.run([*others, probe])["probe"]
        recurrent = self.built.runner.context.caches.recurrent
        assert recurrent is not None
        return Outcome(answer, [layer.delta.state[self.slot].clone() for layer in recurrent.layers])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outcome:
    """In one row, with nobody beside it, on the host."""
    with pytest.MonkeyPatch.context() as patch:
        from support.kernels.triton_interpreter import repair

        repair(patch)
        return Engine(folder).serve()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("budget", [SLOTS + CHUNK, 2 * CHUNK + 5])
def test_cuts(folder: Path, alone: Outcome, budget: int, on_device: bool) -> None:
    kernels = chunking_kernels()
    if on_device:
        kernels = replace(kernels, step=STEP_REFERENCE)
    engine = Engine(folder, budget=budget, kernels=kernels, depth=int(on_device))
    assert engine.built.facts.prompt_chunk == CHUNK
    assert engine.serve().equals(alone)


@pytest.mark.parametrize("shared", [CHUNK + 5, 2 * CHUNK + 1, len(TEXT)])
def test_prefix_hits(folder: Path, alone: Outcome, shared: int) -> None:
    """What another left of its prompt, beyond its last whole chunk too."""
    engine = Engine(folder)
    engine.local.run([request("earlier", [*TEXT[:shared], 5, 6, 7])])
    assert engine.serve().equals(alone)
    assert engine.local.state.counters.prefix_cache_hits == (shared + 3) // CHUNK * CHUNK


def test_an_answer_is_no_part_of_a_prompt(folder: Path, alone: Outcome) -> None:
    """A conversation: the probe's text goes beyond a chunk that was decoded, or was a tail."""
    first = request("turn", TEXT[: 2 * CHUNK - OUTPUT])
    engine = Engine(folder)
    answer = engine.local.run([first])["turn"].token_ids
    turn = replace(PROBE, prompt_ids=[*first.prompt_ids, *answer, *TEXT[2 * CHUNK :]])
    served = engine.local.run([turn])["probe"]
    assert engine.local.state.counters.prefix_cache_hits == CHUNK
    assert same(served, Engine(folder).local.run([turn])["probe"])


def probe_has(engine: Engine, num_emitted: int) -> bool:
    seq = engine.local.state.open.get("probe")
    if seq is None or seq.tenancy is None:
        return False
    return len(seq.tokens) == seq.prompt_len + num_emitted


@pytest.mark.parametrize("emitted", [0, 4])
def test_preemptions(folder: Path, alone: Outcome, emitted: int) -> None:
    """In the middle of its prompt, and of its answer: what was emitted is computed again."""

    def preempt(engine: Engine) -> None:
        if not engine.interfered and probe_has(engine, emitted):
            engine.interfered += 1
            tenancy = engine.local.state.open["probe"].tenancy
            assert tenancy is not None
            engine.local.state.preempt(tenancy)

    engine = Engine(folder, budget=SLOTS + CHUNK, after=preempt)
    assert engine.serve().equals(alone)
    assert engine.interfered


def lose_epoch(engine: Engine) -> None:
    if not engine.interfered and probe_has(engine, 3):
        engine.interfered += 1
        state = engine.local.state
        state.fence()
        state.open_epoch(state.epoch + 1, state.limits)
        engine.built.runner.open(state.epoch)


SHORT = request("probe", TEXT[: CHUNK - 2])  # with what it emits it fills a chunk


def test_a_replay_after_a_fault(folder: Path, alone: Outcome) -> None:
    engine = Engine(folder, after=lose_epoch)
    assert engine.serve().equals(alone)
    assert engine.interfered
    short = Engine(folder).serve(probe=SHORT)
    assert Engine(folder, after=lose_epoch).serve(probe=SHORT).equals(short)


@pytest.mark.parametrize("sizes", [(1, CHUNK - 1), (CHUNK, CHUNK + 1), (2 * CHUNK + 2, 30)])
def test_neighbours(folder: Path, alone: Outcome, sizes: tuple[int, int]) -> None:
    others = [request(f"{n}", RNG.choices(range(3, VOCAB), k=n)) for n in sizes]
    assert Engine(folder, budget=2 * CHUNK).serve(others).equals(alone)


@pytest.mark.parametrize(("drafter", "on_device"), [("mtp", False), ("ngram", True)])
def test_drafts(folder: Path, alone: Outcome, drafter: str, on_device: bool) -> None:
    """Windows reach over borders of chunks; what was accepted is folded token by token."""
    kernels = chunking_kernels()
    if on_device:
        kernels = replace(kernels, step=STEP_REFERENCE)
    engine = Engine(folder, drafter=drafter, kernels=kernels, after=lose_epoch)
    beside = request("beside", TEXT[: CHUNK - 3])
    assert same(engine.serve([beside]).answer, alone.answer)


def of_the_row(slots: Slots, slot: IntArray, start: IntArray, count: IntArray) -> IntArray:
    """The mutant: chunks are counted from where a row begins, and rows end anywhere."""
    return count // CHUNK * CHUNK


def test_chunks_that_are_counted_from_a_row_are_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutant(**wishes: Any) -> Engine:
        kernels = replace(chunking_kernels(), delta_chunk=1)  # the scheduler knows of no chunks
        return Engine(folder, kernels=kernels, **wishes)

    monkeypatch.setattr(Slots, "chunked", of_the_row)
    uncut = mutant().serve()
    assert not mutant(budget=CHUNK + 36).serve().equals(uncut)
    others = [request("one", TEXT[:1]), request("other", TEXT[10:60])]
    assert not mutant(budget=2 * CHUNK).serve(others).equals(uncut)
    hit = mutant()
    hit.local.run([request("earlier", [*TEXT[:90], 5])])
    assert not hit.serve().equals(uncut)
    short = mutant().serve(probe=SHORT)
    assert not mutant(after=lose_epoch).serve(probe=SHORT).equals(short)
