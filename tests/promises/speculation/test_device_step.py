"""Steps that stay on their device answer what steps on the host answer, however late they finish.

Here the device is the CPU and its ops are the torch references, so that answers must be equal to
the last bit of every log-probability.
"""

from __future__ import annotations

import pytest
import torch
from support.parity.bench import (
    NEIGHBOURS,
    Conditions,
    ParityBench,
    build_runner,
    same,
    serve,
    step_of,
    total,
)
from support.parity.cases import EOS, VOCAB
from support.parity.drafters import TRUTH
from support.parity.local_engine import Answer, Results
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import worker_pb2 as pb
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import Drafts
from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.step.drafting import UnreadProposals
from torch import Tensor

ON_DEVICE = Conditions(step_ops=STEP_REFERENCE)
CAPTURED = Conditions(step_ops=STEP_REFERENCE, graphs=True, poison=True)
LATE = Conditions(step_ops=STEP_REFERENCE, late=True, poison=True)
# Of every run: each drafter, each surrounding and each way to run a step, at least once.
DIAGONAL = (
    *("none-0-mixed-0", "ngram-3-mixed-1", "oracle-3-mixed-2"),
    *("garbage-2-near max_model_len-1", "ragged-4-preempted-2"),
)
DIAGONAL_CAPTURED = (
    *("captured-none-0-mixed-1", "captured-oracle-3-near max_model_len-2"),
    *("late-ragged-4-mixed-1", "late-oracle-3-preempted-0"),
)
DIAGONAL_HYBRID = (
    *("none-0-mixed-eager", "oracle-3-preempted-all", "ragged-4-mixed-late"),
    *("mtp-3-preempted-eager", "mtp-3-mixed-late"),
)


def check_all(bench: ParityBench, answers: dict[str, Answer]) -> None:
    """Every request has the answer that it has alone."""
    for name, expected in bench.expected.items():
        assert same(answers[name], expected), f"{name}: {answers[name]}, not {expected}"


@pytest.mark.parametrize(
    ("where", "depth"),
    [("mixed", 0), ("mixed", 1), ("mixed", 2), ("near max_model_len", 1), ("preempted", 2)],
)
@pytest.mark.parametrize(
    ("drafter", "k"), [("none", 0), ("ngram", 3), ("oracle", 3), ("garbage", 2), ("ragged", 4)]
)
@pytest.mark.rotates(8, always=DIAGONAL)
def test_a_step_on_a_device_answers_the_same(
    bench: ParityBench, drafter: str, k: int, where: str, depth: int
) -> None:
    answers = bench.run(where, drafter=drafter, k=k, depth=depth, conditions=ON_DEVICE)
    check_all(bench, answers)
    assert (total(answers, "num_drafts") > 0) == (drafter != "none")
    assert total(answers, "num_accepted") > 0 or drafter in ("none", "garbage")


@pytest.mark.parametrize(
    ("where", "depth"), [("mixed", 1), ("near max_model_len", 2), ("preempted", 0)]
)
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("oracle", 3), ("ragged", 4)])
@pytest.mark.parametrize("conditions", [CAPTURED, LATE], ids=["captured", "late"])
@pytest.mark.rotates(6, always=DIAGONAL_CAPTURED)
def test_captured_steps_answer_the_same(
    bench: ParityBench, drafter: str, k: int, where: str, depth: int, conditions: Conditions
) -> None:
    """Prompts among windows, padding full of NaN, kinds captured while results are on their way."""
    answers = bench.run(where, drafter=drafter, k=k, depth=depth, conditions=conditions)
    check_all(bench, answers)
    assert (total(answers, "num_accepted") > 0) == (drafter != "none")
    kinds, missed = bench.captured
    # Steps in which prompts are scored have no kind; in the other case each kind is missed first.
    assert 0 < missed < (kinds + 40 if conditions.late else 40)


def test_the_drafter_has_no_more_than_it_may_propose(bench: ParityBench) -> None:
    """Where windows have room for more, as those of requests with grammars have."""
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    where, some = NEIGHBOURS["alone"], bench.requests[:2]
    built = build_runner(bench._model, TensorParallel(), where, "oracle", 3, STEP_REFERENCE)
    step, most = step_of(built.runner), set[tuple[int, int]]()

    def lowered(plan: pb.StepPlan) -> Results:
        plan.max_proposed[:] = [min(proposed, 1) for proposed in plan.max_proposed]
        finish = step(plan)
        assert callable(finish)
        results = finish()
        most.update(zip(plan.max_drafts, results[0].n_drafts, strict=True))
        return results

    answers = serve(lowered, built.facts, some, where, depth=0)
    for request in some:
        assert same(answers[request.id], bench.expected[request.id])
    assert (3, 1) in most
    assert max(drafts for _, drafts in most) == 1


@pytest.mark.timeout(400)
@pytest.mark.rotates(2, turn=0)
@pytest.mark.usefixtures("interpreter")
def test_triton_answers_the_same(bench: ParityBench) -> None:
    """The ops as kernels, in Triton's interpreter, on requests that use all of them."""
    from surestep_kernels.triton import STEP_OPS

    names = ("plain@0.7", "everything@0.0", "everything@0.7", "stop_token_ids@0.7")
    some = [request for request in bench.requests if request.id in names]
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    where, conditions = NEIGHBOURS["near max_model_len"], Conditions(step_ops=STEP_OPS)
    answers = bench.serve(some, where, "ragged", 3, 1, conditions)
    for name in names:
        assert same(answers[name], bench.expected[name]), f"{name}: {answers[name]}"
    assert total(answers, "num_accepted") > 0


@pytest.mark.parametrize("conditions", [ON_DEVICE, CAPTURED, LATE], ids=["eager", "all", "late"])
@pytest.mark.parametrize("where", ["mixed", "preempted"])
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("oracle", 3), ("ragged", 4), ("mtp", 3)])
@pytest.mark.rotates(8, always=DIAGONAL_HYBRID)
def test_a_hybrid_on_a_device_answers_the_same(
    hybrid_bench: ParityBench, drafter: str, k: int, where: str, conditions: Conditions
) -> None:
    """Recurrent state is folded, recorded and snapshotted by lengths that the host never sees."""
    answers = hybrid_bench.run(where, drafter=drafter, k=k, depth=1, conditions=conditions)
    check_all(hybrid_bench, answers)
    assert (total(answers, "num_accepted") > 0) == (drafter != "none")


@pytest.mark.parametrize("conditions", [ON_DEVICE, CAPTURED, LATE], ids=["eager", "all", "late"])
@pytest.mark.parametrize("where", ["mixed", "preempted"])
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("flip-1", 3), ("ragged", 4)])
@pytest.mark.rotates(8, always=("flip-1-3-mixed-all", "ragged-4-preempted-late"))
def test_gpt_oss_on_a_device_answers_the_same(
    gpt_oss_bench: ParityBench, drafter: str, k: int, where: str, conditions: Conditions
) -> None:
    """Windows of drafts lie across the borders of windows of attention."""
    answers = gpt_oss_bench.run(where, drafter=drafter, k=k, depth=1, conditions=conditions)
    check_all(gpt_oss_bench, answers)
    assert (total(answers, "num_accepted") > 0) == (drafter != "none")


@pytest.mark.timeout(400)
@pytest.mark.rotates(4)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("name", "drafter", "accepts"),
    [
        ("hybrid_bench", "mtp", True),
        ("eagle3_bench", "eagle3", True),
        ("dflash_bench", "dflash", True),
        ("draft_model_bench", "draft_model", True),
        ("eagle3_gpt_oss_bench", "eagle3", False),  # of random weights
    ],
)
def test_triton_drafts_what_the_reference_drafts(
    request: pytest.FixtureRequest, name: str, drafter: str, accepts: bool
) -> None:
    """A draft head between kernels, in Triton's interpreter: as many drafts are accepted."""
    from surestep_kernels.triton import STEP_OPS

    bench: ParityBench = request.getfixturevalue(name)
    names = ("plain@0.7", "plain@0.0")
    some = [one for one in bench.requests if one.id in names]
    counts = list[tuple[int, int]]()
    for ops in (STEP_OPS, STEP_REFERENCE):
        conditions = Conditions(step_ops=ops, graphs=ops is STEP_REFERENCE)
        answers = bench.serve(some, NEIGHBOURS["mixed"], drafter, 2, 1, conditions)
        for one in names:
            answer, expected = answers[one], bench.expected[one]
            assert answer.token_ids == expected.token_ids, f"{one}: {answer}"
            assert same(answer, expected) or not accepts, f"{one}: {answer}"
        counts.append((total(answers, "num_drafts"), total(answers, "num_accepted")))
    assert counts[0] == counts[1]
    drafted, accepted = counts[0]
    assert drafted > 0
    assert accepted > 0 or not accepts


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("column", ["torch", "triton"])
def test_minus_one_as_an_id_is_seen(
    bench: ParityBench, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window has fewer drafts than places, nothing but a token may stand in these."""
    from surestep_kernels.triton import STEP_OPS

    def unchecked(
        self: UnreadProposals, inputs: DraftInputs, shape: DraftShape, error: Tensor
    ) -> Drafts:
        state, line, most = self._state, inputs.slot.long(), inputs.max_drafts
        known = state.known[line].long()
        ids, counts, *_ = self._drafter.propose(state.tokens, line, known, most.long())
        real = torch.arange(ids.shape[1]) < counts.unsqueeze(1)
        return Drafts(torch.where(real, ids, -1).int(), most)

    monkeypatch.setattr(UnreadProposals, "__call__", unchecked)
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    conditions = Conditions(step_ops=STEP_OPS if column == "triton" else STEP_REFERENCE)
    some = [request for request in bench.requests if request.id == "plain@0.0"]
    with pytest.raises(IndexError):
        bench.serve(some, NEIGHBOURS["mixed"], "ragged", 3, 1, conditions)
