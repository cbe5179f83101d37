"""Model, steps and drafts all as Triton kernels: the engine as a GPU runs it, on a tiny model.

Without a GPU the kernels run in Triton's interpreter. Sums are taken in another order than on the
CPU, so that log-probabilities may differ in their last bits; tokens, in fp32, may not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from drafters import TRUTH
from local_engine import one_rank_behind
from parity import BLOCK_SIZE, NEIGHBOURS, ParityBench, serve, total
from parity_cases import EOS, VOCAB
from surestep_kernels.attention import AttentionCase, choose_attention
from surestep_kernels.dispatch import load_triton
from surestep_worker.build import Built, assemble
from surestep_worker.config import WorkerSettings
from surestep_worker.models import load_model
from surestep_worker.tp import TensorParallel

if TYPE_CHECKING:
    from surestep_kernels import KernelSet

HAS_GPU = torch.cuda.is_available()
DEVICE: Literal["cpu", "cuda"] = "cuda" if HAS_GPU else "cpu"
NAMES = ("plain@0.0", "everything@0.7")
WHERE = NEIGHBOURS["near max_model_len"]

pytestmark = [pytest.mark.gpu] if HAS_GPU else []


def triton_kernels() -> KernelSet:
    case = AttentionCase.on(DEVICE)
    attention = choose_attention("triton", replace(case, dtype=torch.float32))
    return replace(
        load_triton(),
        kv_cache_shape=attention.kv_cache_shape,
        store_kv=attention.store_kv,
        paged_attention=attention.paged_attention,
    )


def build(bench: ParityBench, drafter: str, k: int) -> Built:
    """A runner whose every op is Triton's."""
    kernels, tp = triton_kernels(), TensorParallel()
    model = load_model(bench.folder, dtype="float32", device=DEVICE, tp=tp, kernels=kernels)
    settings = WorkerSettings(
        device=DEVICE,
        max_num_seqs=WHERE.num_slots,
        max_model_len=WHERE.max_model_len,
        block_size=BLOCK_SIZE,
        kv_cache_memory=0.01,
        speculative_config={"method": drafter, "num_speculative_tokens": k},
    )
    return assemble(settings, model, tp, kernels)


@pytest.mark.timeout(400)  # the interpreter takes its time
@pytest.mark.parametrize(("drafter", "k"), [("ngram", 3), ("ragged", 3)])
def test_an_engine_of_triton_kernels_answers_as_the_cpu_does(
    bench: ParityBench, drafter: str, k: int
) -> None:
    some = [request for request in bench.requests if request.id in NAMES]
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    built = build(bench, drafter, k)
    answers = serve(one_rank_behind(built.runner), built.facts, some, WHERE, depth=1)
    for name in NAMES:
        expected = bench.expected[name]
        assert answers[name].token_ids == expected.token_ids, name
        assert answers[name].finish == expected.finish
        assert answers[name].logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)
    assert total(answers, "num_drafts") > 0
