"""Model, steps and drafts all as Triton kernels: the engine as a GPU runs it, on tiny models.

Steps are launched kernel by kernel, or captured before the first of them or as they come. Without a
GPU the kernels run in Triton's interpreter, and what is captured is called instead of replayed.
Sums are taken in another order than on the CPU, so that log-probabilities may differ in their last
bits; tokens, in fp32, may not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.parity.bench import Neighbours, ParityBench, serve, total
from support.parity.captured_steps import capture_all, without_rest
from support.parity.cases import EOS, TOTAL_LEN, VOCAB
from support.parity.drafters import TRUTH
from support.parity.local_engine import one_rank_behind
from support.parity.triton_engine import DEVICE, begin_to_capture, build_triton_engine
from surestep_worker.distributed.tensor_parallel import TensorParallel

NAMES = ("plain@0.0", "everything@0.7")
# Room for a prompt among windows, and little else to interpret.
WHERE = Neighbours(num_slots=3, max_model_len=TOTAL_LEN, step_tokens=48)

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


MODES = ("eager", "captured", "late")
# By model; an MTP head is in its checkpoint, another drafter in a folder beside it.
DRAFTERS = {
    "bench": ("ngram", "ragged"),
    "hybrid_bench": ("mtp",),
    "eagle3_bench": ("eagle3",),
    "eagle3_hybrid_bench": ("eagle3",),
    "dflash_hybrid_bench": ("dflash",),
    "draft_model_bench": ("draft_model",),
    "least_gpt_oss_bench": ("none", "ngram", "flip-1", "eagle3"),
    "least_mxfp4_bench": ("none", "flip-1", "eagle3"),
    "glm_dsa_bench": ("none", "mtp"),
    "qwen3_moe_bench": ("flip-1",),
    "phi3_bench": ("flip-1",),
    "smollm3_bench": ("flip-1",),
}
# The interpreter is slow: without a GPU each is tried in one mode, on short answers but where drafts
# are found in what was answered; and capturing every kind of step takes longest.
INTERPRETED = (
    ("bench", "ngram", "eager"),
    ("bench", "ragged", "captured"),
    ("hybrid_bench", "mtp", "late"),
    ("eagle3_bench", "eagle3", "late"),
    ("eagle3_hybrid_bench", "eagle3", "eager"),
    ("dflash_hybrid_bench", "dflash", "late"),
    ("draft_model_bench", "draft_model", "late"),
    ("least_gpt_oss_bench", "flip-1", "captured"),
    ("least_gpt_oss_bench", "eagle3", "late"),
    ("least_mxfp4_bench", "none", "eager"),
    ("least_mxfp4_bench", "flip-1", "late"),
    ("glm_dsa_bench", "none", "eager"),
    ("qwen3_moe_bench", "flip-1", "eager"),
    ("phi3_bench", "flip-1", "eager"),
    ("smollm3_bench", "flip-1", "late"),
)
EVERY = tuple(
    (name, drafter, mode)
    for name, drafters in DRAFTERS.items()
    for drafter, mode in product(drafters, MODES)
)
CASES = EVERY if DEVICE == "cuda" else INTERPRETED
# Under --dist loadgroup the cases of a model share a process, which compiles its kernels once.
GROUPED = [pytest.param(*case, marks=pytest.mark.xdist_group(case[0])) for case in CASES]


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, as interpreter, of padding's NaN
@pytest.mark.parametrize(("name", "drafter", "mode"), GROUPED)
@pytest.mark.rotates(9)
def test_an_engine_of_triton_kernels_answers_as_the_cpu_does(
    request: pytest.FixtureRequest,
    name: str,
    drafter: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench: ParityBench = request.getfixturevalue(name)
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    check(bench, drafter, mode, monkeypatch)


def check(
    bench: ParityBench, drafter: str, mode: str, monkeypatch: pytest.MonkeyPatch, k: int = 2
) -> None:
    most = TOTAL_LEN if DEVICE == "cuda" or drafter == "ngram" else 8
    some = [
        replace(request, max_tokens=min(request.max_tokens, most))
        for request in bench.requests
        if request.id in NAMES
    ]
    built = build_triton_engine(bench.folder, TensorParallel(), WHERE, drafter, k)
    step = one_rank_behind(built.runner)
    if mode != "eager":
        begin_to_capture(built.runner, monkeypatch)
    if mode == "captured":
        capture_all(built.runner)
    with without_rest():
        answers = serve(step, built.facts, some, WHERE, depth=1)
    for name in NAMES:
        ids, logprobs = bench.expected[name].token_ids, bench.expected[name].logprobs.logprob
        assert answers[name].token_ids == ids[:most], name
        expected = pytest.approx(logprobs[:most], abs=1e-4)
        assert answers[name].logprobs.logprob == expected
        if len(ids) < most:
            assert answers[name].finish == bench.expected[name].finish
    assert (total(answers, "num_drafts") > 0) == (drafter != "none")
    kinds, missed = built.runner.captured
    assert (kinds > 0) == (mode != "eager")
    # Prompts whose tokens are scored have no kind.
    assert missed <= {"eager": 0, "captured": 2, "late": 3 * kinds + 2}[mode]


@pytest.mark.gpu
@pytest.mark.xdist_group("bench")
def test_a_capture_that_breaks_costs_its_kind_alone(
    bench: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch leaves behind: others are captured, and memory is released."""
    built = build_triton_engine(bench.folder, TensorParallel(), WHERE, "ngram", 2)
    built.runner.prepare()
    graphs = built.runner._launcher._graphs
    assert graphs is not None
    broken, sound = [kind for kind in graphs.kinds() if kind not in graphs._captured][:2]

    def refused(*_: object) -> None:
        torch.cuda.synchronize()  # what no capture allows

    with monkeypatch.context() as breaking:
        breaking.setattr(graphs, "_run", refused)
        assert not graphs.capture(broken)
    assert graphs.capture(sound)
    torch.cuda.empty_cache()
