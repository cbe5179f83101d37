"""One tiny model behind the real scheduler core and the real runner, in any arrangement."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.checkpoints.branches import make_branch_checkpoint
from support.checkpoints.copied_head import make_copied_pair
from support.checkpoints.drafting import add_noise, keep_last_layer, make_tiny_mtp
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.gpt_oss import make_mxfp4_twins, make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.captured_steps import capture_all, without_rest
from support.parity.cases import EOS, TOTAL_LEN, VOCAB, Probe, make_requests, strangers
from support.parity.drafters import TRUTH
from support.parity.grammars import compile_grammars
from support.parity.local_engine import Answer, LocalEngine, Step, one_rank, one_rank_behind
from support.parity.poison import poison_idle
from support.suite.sharing import once
from surestep_kernels import load_kernels
from surestep_kernels.table import StepOps
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.core.state import SchedulerState
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.kv_cache import bytes_per_block
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import LOADERS, DraftRank, DraftSource, Model, ModelSource, load_model
from surestep_worker.startup.build import assemble, begin_to_serve
from surestep_worker.startup.built import Built
from surestep_worker.step.runner import Runner

BLOCK_SIZE = 8
LOOKUP = "+lookup"
HEAD = "eagle3"  # folder of a draft head inside that of its model
BLOCKS = "dflash"  # or that of one that drafts whole windows
DRAFT = "draft_model"  # or that of a draft model: all are named after their methods
Alone = tuple[list[Request], dict[str, list[int]], dict[str, Answer]]


@dataclass(frozen=True)
class Neighbours:
    """Load beside a request."""

    num_slots: int
    max_model_len: int = 4 * TOTAL_LEN
    num_strangers: int = 0
    step_tokens: int = 64  # max_num_batched_tokens
    num_sequences: int | None = None  # at full length, for which there are KV blocks; None = all
    num_blocks: int | None = None  # or as many as this, the NULL block included


@dataclass(frozen=True)
class Conditions:
    """Conditions that must not matter."""

    prefix_caching: bool = True
    shuffle_seed: int = 0  # rows in random order, results delayed at random; 0 = neither
    poison: bool = False  # whatever belongs to nobody is NaN or out of range
    after_apply: Callable[[SchedulerState], None] = lambda state: None
    step_ops: StepOps | None = None  # steps run as on a device that has these; None = as on a CPU
    graphs: bool = False  # and are captured, all kinds before the first step
    late: bool = False  # or each kind when steps have wanted it


CALM = Conditions()

NEIGHBOURS = {
    "alone": Neighbours(num_slots=1),
    "mixed": Neighbours(num_slots=8, num_strangers=12, step_tokens=24),
    "near max_model_len": Neighbours(num_slots=12, max_model_len=TOTAL_LEN),
    "preempted": Neighbours(num_slots=10, num_sequences=4, step_tokens=64),
}


def make_model(folder: Path) -> None:
    """The checkpoint of the matrix: two layers, two heads that share keys and values."""
    make_tiny_checkpoint(
        folder, vocab=VOCAB, hidden=32, heads=2, kv_heads=1, intermediate=48, seed=7
    )


_SIZES: Any = {"vocab": VOCAB, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
_SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # by transformers' code
    "phi3": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
    "cohere": {},  # which transformers' code computes
    "smollm3": {
        "layers": 3,
        "no_rope_layers": [1, 0, 0],
        "use_sliding_window": True,
        "sliding_window": BLOCK_SIZE,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
}


def make_small(family: str, folder: Path) -> None:
    """The checkpoint of the matrix, of another family."""
    make_tiny_checkpoint(folder, family, seed=7, **_SIZES, **_SMALL[family])


def make_hybrid(folder: Path, *, mtp: bool = True) -> None:
    """The checkpoint of the hybrid matrix: three recurrent layers, one of attention, an MTP head."""
    make_tiny_hybrid(folder, vocab=VOCAB, mtp=mtp, eos_token_ids=(EOS,), seed=7)


def make_mtp(kind: str, folder: Path) -> None:
    """The checkpoint of the matrix, of another family, with an MTP head of random weights."""
    make_tiny_mtp(folder, kind, seed=7, **_SIZES)


def make_branches(folder: Path, name: str) -> None:
    """The checkpoint of a family with other branches, a layer of it with a window if it has any.

    It is not tied: an embedding that is multiplied brings the same token again.
    """
    sizes: Any = {"vocab": VOCAB, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    if name != "granite":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    make_branch_checkpoint(folder, name, **sizes, layers=2, head_dim=16, tie=False, seed=7)


def make_eagle3(folder: Path) -> None:
    """A dense model, and a head that is right wherever the first token of a text hardly counts."""
    make_copied_pair(folder, folder / HEAD)


def make_draft_model(folder: Path) -> None:
    """A dense model, and its last layer as a model of its own, which is right most of the time."""
    make_copied_pair(folder, folder.with_name(f"{folder.name}-head"))
    keep_last_layer(folder, folder / DRAFT)


def make_draft_twin(family: str, folder: Path, *, noise: float = 0.05) -> None:
    """A checkpoint of the matrix, and the same with some noise as what drafts for it."""
    make_small(family, folder)
    add_noise(folder, folder / DRAFT, noise)


def make_draft_hybrid(folder: Path) -> None:
    """A hybrid, and the same with some noise, which is right most of the time."""
    make_hybrid(folder, mtp=False)
    add_noise(folder, folder / DRAFT, 0.02)


def make_eagle3_hybrid(folder: Path) -> None:
    """A hybrid, and a head of random weights that drafts 150 of its tokens."""
    make_hybrid(folder, mtp=False)
    _add_random_head(folder)


def make_eagle3_gpt_oss(folder: Path) -> None:
    """The checkpoint of the gpt-oss matrix, and a head of random weights with a window."""
    make_gpt_oss(folder)
    _add_random_head(folder, window=5)


def _add_random_head(
    folder: Path, window: int | None = None, layer_ids: Sequence[int] = (1, 2, 4)
) -> None:
    ids, captured = torch.arange(10, VOCAB), len(layer_ids)
    head = make_reference(folder, num_captured=captured, draft_vocab=len(ids), window=window)
    save_head(folder / HEAD, head, form="speculators", token_ids=ids, layer_ids=layer_ids)


def make_gpt_oss(folder: Path) -> None:
    """The checkpoint of the gpt-oss matrix: two layers with a window of 8 tokens, two without."""
    make_tiny_gpt_oss(folder, vocab=VOCAB, eos_token_ids=(EOS,), seed=7)


def make_least_gpt_oss(folder: Path, *, mxfp4: bool) -> Path:
    """The least that has all of gpt-oss, a layer of either kind, and a head of random weights."""
    sizes: Any = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    twins = make_mxfp4_twins(folder, vocab=VOCAB, eos_token_ids=(EOS,), seed=7, **sizes)
    made = twins.quantized if mxfp4 else twins.plain
    _add_random_head(made, window=5, layer_ids=(1, 2))
    return made


def load(
    folder: Path, tp: TensorParallel, *, expert_parallel: bool = False, implementation: str = "auto"
) -> Model:
    """This rank's part of the checkpoint, with the draft head that is in it, or in its folder."""
    source, kernels = ModelSource(folder, implementation=implementation), load_kernels("cpu")
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu", "expert_parallel": expert_parallel}
    model = load_model(source, tp=tp, kernels=kernels, draft_head=source.has_own_head, **how)
    rank = DraftRank("cpu", tp, kernels, 4 * TOTAL_LEN)
    for method in LOADERS:
        if (folder / method).exists():
            draft = DraftSource(folder=folder / method, model_folder=folder)
            model.draft_head, _ = LOADERS[method](draft, model, rank)
    return model


def build_runner(
    model: Model,
    tp: TensorParallel,
    neighbours: Neighbours,
    drafter: str,
    k: int,
    step_ops: StepOps | None = None,
    folder: Path | None = None,
    memory: CacheMemory | None = None,
) -> Built:
    """A fresh runner around the model; with ops, as on a device that they are of.

    The tokenizer in `folder`, if there is one, is that of its grammars. A drafter whose name ends
    in LOOKUP drafts with its head only where it finds nothing.
    """
    method, looks_up, _ = drafter.partition(LOOKUP)
    asked = {"method": method, "num_speculative_tokens": k, "model": HEAD}
    kernels = load_kernels("cpu")
    if step_ops is not None:
        kernels = replace(kernels, step=step_ops)
    blocks = 1 + (neighbours.num_sequences or 100) * -(-TOTAL_LEN // BLOCK_SIZE)
    blocks = neighbours.num_blocks or blocks
    settings = WorkerSettings(
        model=folder,
        device="cpu",
        max_num_seqs=neighbours.num_slots,
        max_model_len=neighbours.max_model_len,
        block_size=BLOCK_SIZE,
        kv_cache_memory=blocks * bytes_per_block(model.kv_spec(BLOCK_SIZE), kernels) / 2**30,
        speculative_config=asked | ({"prompt_lookup_min": 2} if looks_up else {}),
    )
    built = assemble(settings, model, tp, kernels, memory=memory)
    compile_grammars(built.runner, folder)
    if looks_up:
        begin_to_serve(built.runner.context)
    return built


class ParityBench:
    """A model, the requests of the matrix, and what they answer alone without speculation."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[Path], None] = make_model,
        requests: Callable[[Probe], list[Request]] = make_requests,
        implementation: str = "auto",
    ) -> None:
        once(folder.with_name(f"{folder.name}.made"), lambda: make(folder))
        self.folder = folder
        self._tp = TensorParallel()
        self._model = load(folder, self._tp, implementation=implementation)
        self.plain: dict[str, list[int]] = {}  # answers without the parameter
        self.captured = 0, 0  # of the latest runner
        alone = once(folder.with_name(f"{folder.name}.alone"), lambda: self._ask(requests))
        self.requests, self.plain, self.expected = alone

    @property
    def truth(self) -> list[list[int]]:
        """Prompt and answer of every request."""
        return [[*r.prompt_ids, *self.expected[r.id].token_ids] for r in self.requests]

    def run(
        self, where: str, *, drafter: str, k: int, depth: int, conditions: Conditions = CALM
    ) -> dict[str, Answer]:
        """Serve the requests of the matrix among neighbours; the strangers' answers are dropped."""
        TRUTH.learn(self.truth, vocab_size=VOCAB, stop_id=EOS)
        neighbours = NEIGHBOURS[where]
        everyone = _interleave(self.requests, strangers(neighbours.num_strangers))
        answers = self.serve(everyone, neighbours, drafter, k, depth, conditions)
        return {request.id: answers[request.id] for request in self.requests}

    def rank(
        self, where: Neighbours, drafter: str, k: int, memory: CacheMemory | None = None
    ) -> Built:
        """A fresh rank, whose caches lie in `memory`."""
        return build_runner(self._model, self._tp, where, drafter, k, None, self.folder, memory)

    def _ask(self, requests: Callable[[Probe], list[Request]]) -> Alone:
        asked = requests(self._probe)
        return asked, self.plain, self._alone(asked)

    def _probe(self, request: Request) -> list[int]:
        self.plain[request.id] = self._alone([request])[request.id].token_ids
        return self.plain[request.id]

    def _alone(self, requests: Sequence[Request]) -> dict[str, Answer]:
        return self.serve(requests, NEIGHBOURS["alone"], "none", 0, 0)

    def serve(
        self,
        requests: Sequence[Request],
        neighbours: Neighbours,
        drafter: str,
        k: int,
        depth: int,
        conditions: Conditions = CALM,
    ) -> dict[str, Answer]:
        """Answers of any requests by a fresh runner."""
        ops = conditions.step_ops
        built = build_runner(self._model, self._tp, neighbours, drafter, k, ops, self.folder)
        step = step_of(built.runner)
        if conditions.graphs or conditions.late:
            built.runner.prepare()
        if conditions.graphs:
            capture_all(built.runner)
        if conditions.poison:
            conditions = replace(conditions, after_apply=_poisoning(built.runner, conditions))
        with without_rest() if conditions.late else nullcontext():
            answers = serve(step, built.facts, requests, neighbours, depth, conditions)
        self.captured = built.runner.captured
        return answers


def step_of(runner: Runner) -> Step:
    """Steps on a device are finished as late as the depth allows."""
    return (one_rank if runner.context.reads_freely else one_rank_behind)(runner)


def serve(
    step: Step,
    facts: pb.WorkerInfo,
    requests: Sequence[Request],
    where: Neighbours,
    depth: int,
    conditions: Conditions = CALM,
    reopen: Callable[[int], object] | None = None,
) -> dict[str, Answer]:
    """Answers of `requests`, which arrive one a step if there are strangers, else all at once."""
    engine = LocalEngine(
        step,
        facts,
        depth=depth,
        max_num_batched_tokens=where.step_tokens,
        enable_prefix_caching=conditions.prefix_caching,
        after_apply=conditions.after_apply,
        shuffle=random.Random(conditions.shuffle_seed) if conditions.shuffle_seed else None,
        reopen=reopen,
    )
    return engine.run(requests, arrive_every=1 if where.num_strangers else 0)


def _poisoning(runner: Runner, conditions: Conditions) -> Callable[[SchedulerState], None]:
    def after_apply(state: SchedulerState) -> None:
        poison_idle(runner, state)
        conditions.after_apply(state)

    return after_apply


def _interleave(requests: Sequence[Request], others: Sequence[Request]) -> list[Request]:
    """Spread `others` evenly among `requests`."""
    both = [
        *enumerate(requests),
        *((i * len(requests) / len(others), x) for i, x in enumerate(others)),
    ]
    return [request for _, request in sorted(both, key=lambda item: item[0])]


def same(answer: Answer, expected: Answer) -> bool:
    """Equal in tokens, in why they ended, and in every reported log-probability."""
    return (
        (answer.token_ids, answer.finish, answer.error)
        == (expected.token_ids, expected.finish, None)
        and answer.logprobs == expected.logprobs
        and answer.prompt_logprobs == expected.prompt_logprobs
    )


def total(answers: dict[str, Answer], name: str) -> int:
    """Sum one of the counts of answers."""
    return sum(getattr(answer, name) for answer in answers.values())
