"""The MTP head drafts what its definition says, whatever was accepted before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.bench import Neighbours, build_runner, load
from support.parity.local_engine import LocalEngine, one_rank
from support.parity.proposals import proposals
from support.references.mtp import MtpReference
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from transformers import AutoModelForCausalLM

TRAINED = Path(__file__).parents[2] / "data" / "tiny-hybrid"
K = 4
WHERE = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)


@torch.no_grad()
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.rotates(1)
def test_drafts_are_those_of_the_definition(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TRAINED if trained else make_tiny_hybrid(tmp_path, tie=True)
    tp = TensorParallel()
    made, engine = proposals(build_runner(load(folder, tp), tp, WHERE, "mtp", K), monkeypatch)
    assert len(made) > 40
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    reference = MtpReference(config, weights, tensors["model.embed_tokens.weight"])
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrong = 0
    for known, drafts in made:
        hidden = target.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        wrong += reference.draft(torch.tensor(known), hidden, len(drafts)) != drafts
    assert wrong <= len(made) // 50  # near ties between float32 computed in two ways
    if trained:
        accepted, drafted = (
            engine.state.counters.accepted_tokens,
            engine.state.counters.draft_tokens,
        )
        assert accepted > drafted // 8


def test_requests_without_drafts_cost_the_drafter_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K = 0 is plain decoding: the head runs in no step."""
    tp = TensorParallel()
    built = build_runner(load(make_tiny_hybrid(tmp_path), tp), tp, WHERE, "mtp", K)
    model = built.runner.context.model
    assert model.draft_head is not None
    runs = list[int]()
    forward = model.draft_head.forward

    def counted(*inputs: Any) -> torch.Tensor:
        runs.append(len(inputs[0]))
        return forward(*inputs)

    monkeypatch.setattr(model.draft_head, "forward", counted)
    sampling = pb.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0)
    for draft_cap in (0, 1):
        engine = LocalEngine(
            one_rank(built.runner, epoch=1 + draft_cap), built.facts, epoch=1 + draft_cap
        )
        prompt = list(range(5, 60))
        request = Request(
            id="r",
            prompt_ids=prompt,
            emitted_ids=[],
            max_tokens=20,
            sampling=sampling,
            draft_cap=draft_cap,
        )
        engine.run([request])
        assert bool(runs) == (draft_cap > 0)


def test_a_head_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    tp, kernels = TensorParallel(), load_kernels("cpu")

    def load_with_head(folder: Path) -> None:
        load_model(
            ModelSource(folder), dtype="auto", device="cpu", tp=tp, kernels=kernels, draft_head=True
        )

    bare = make_tiny_hybrid(tmp_path / "bare", mtp=False)
    with pytest.raises(InvalidRequest, match="no MTP head"):
        load_with_head(bare)
    damaged = make_tiny_hybrid(tmp_path / "damaged")
    from safetensors.torch import save_file

    file = damaged / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.layers.0.self_attn.query.weight"] = tensors.pop(
        "mtp.layers.0.self_attn.q_proj.weight"
    )
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"missing: mtp\.layers\.0\.self_attn\.q_proj\.weight"):
        load_with_head(damaged)
