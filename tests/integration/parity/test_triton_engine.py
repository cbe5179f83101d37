"""Model, steps and drafts all as Triton kernels: the engine as a GPU runs it, on a tiny model.

Without a GPU the kernels run in Triton's interpreter. Sums are taken in another order than on the
CPU, so that log-probabilities may differ in their last bits; tokens, in fp32, may not.
"""

from __future__ import annotations

import pytest
from drafters import TRUTH
from local_engine import one_rank_behind
from parity import NEIGHBOURS, ParityBench, serve, total
from parity_cases import EOS, VOCAB
from surestep_worker.tp import TensorParallel
from triton_engine import DEVICE, build_triton_engine

NAMES = ("plain@0.0", "everything@0.7")
WHERE = NEIGHBOURS["near max_model_len"]

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.timeout(400)  # the interpreter takes its time
@pytest.mark.parametrize(("drafter", "k"), [("ngram", 3), ("ragged", 3)])
def test_an_engine_of_triton_kernels_answers_as_the_cpu_does(
    bench: ParityBench, drafter: str, k: int
) -> None:
    some = [request for request in bench.requests if request.id in NAMES]
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    built = build_triton_engine(bench.folder, TensorParallel(), WHERE, drafter, k)
    answers = serve(one_rank_behind(built.runner), built.facts, some, WHERE, depth=1)
    for name in NAMES:
        expected = bench.expected[name]
        assert answers[name].token_ids == expected.token_ids, name
        assert answers[name].finish == expected.finish
        assert answers[name].logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)
    assert total(answers, "num_drafts") > 0
