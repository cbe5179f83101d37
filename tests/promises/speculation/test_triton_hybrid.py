"""A hybrid with an MTP head, all as Triton kernels, eager and captured: natively alone.

What the interpreter takes for a step of recurrent layers is too long; each op has tests there.
"""

from __future__ import annotations

import pytest
from support.parity.bench import NEIGHBOURS, ParityBench, serve, total
from support.parity.cases import EOS, VOCAB
from support.parity.drafters import TRUTH
from support.parity.local_engine import one_rank_behind
from support.parity.triton_engine import build_triton_engine
from surestep_worker.distributed.tensor_parallel import TensorParallel

NAMES = ("plain@0.0", "everything@0.7")


@pytest.mark.gpu
@pytest.mark.xdist_group("hybrid_bench")  # as in test_triton_engine.py
@pytest.mark.timeout(200)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("mtp", 3)])
def test_a_hybrid_of_triton_kernels_answers_as_the_cpu_does(
    hybrid_bench: ParityBench, drafter: str, k: int, captured: bool
) -> None:
    bench, where = hybrid_bench, NEIGHBOURS["mixed"]
    some = [request for request in bench.requests if request.id in NAMES]
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    built = build_triton_engine(bench.folder, TensorParallel(), where, drafter, k)
    if captured:
        built.runner.prepare()
    answers = serve(one_rank_behind(built.runner), built.facts, some, where, depth=1)
    for name in NAMES:
        assert answers[name].token_ids == bench.expected[name].token_ids, name
    assert (total(answers, "num_drafts") > 0) == (drafter == "mtp")
