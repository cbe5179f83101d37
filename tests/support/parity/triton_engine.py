"""The engine of Triton kernels on a tiny model; without a GPU they run in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from support.parity.bench import BLOCK_SIZE, Neighbours
from surestep_kernels.dispatch import load_triton
from surestep_kernels.paged_attention import AttentionCase
from surestep_kernels.paged_attention.backends import choose_attention
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.startup.build import assemble
from surestep_worker.startup.built import Built
from surestep_worker.startup.speculation import attach_draft_head, speculation_asked
from surestep_worker.step import step
from surestep_worker.step.graphs import Graphs
from surestep_worker.step.runner import Runner

if TYPE_CHECKING:
    from surestep_kernels import KernelSet

DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"


def triton_kernels() -> KernelSet:
    case = AttentionCase.on(DEVICE)
    attention = choose_attention("triton", replace(case, dtype=torch.float32))
    return replace(
        load_triton(),
        kv_cache_shape=attention.kv_cache_shape,
        store_kv=attention.store_kv,
        paged_attention=attention.paged_attention,
    )


def build_triton_engine(
    folder: Path, tp: TensorParallel, where: Neighbours, drafter: str, k: int
) -> Built:
    """A runner whose every op is Triton's, with the draft head that the drafter needs."""
    kernels = triton_kernels()
    source, mtp = ModelSource(folder), drafter == "mtp"
    model = load_model(
        source, dtype="float32", device=DEVICE, tp=tp, kernels=kernels, draft_head=mtp
    )
    speculation = {"method": drafter, "num_speculative_tokens": k, "model": str(folder / drafter)}
    settings = WorkerSettings(
        device=DEVICE,
        max_num_seqs=where.num_slots,
        max_model_len=where.max_model_len,
        max_num_batched_tokens=where.step_tokens,
        block_size=BLOCK_SIZE,
        kv_cache_memory=0.01,
        speculative_config=speculation,
    )
    assert not attach_draft_head(settings, speculation_asked(settings), model, tp, kernels)
    return assemble(settings, model, tp, kernels)


def begin_to_capture(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` on a GPU; without one nothing has to be compiled, and the interpreter is slow."""
    if DEVICE == "cpu":
        monkeypatch.setattr(Graphs, "warm_up", lambda self, progress: None)
        monkeypatch.setattr(step, "warm_up_steps", lambda *_, **__: ())
    runner.prepare()
