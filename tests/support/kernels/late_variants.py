"""Finds kernels that a GPU would compile while serving, without a GPU; run as a program.

    PYTHONPATH=... TRITON_INTERPRET=0 python late_variants.py KIND

A rank of a small model warms up as it would, then takes steps of other sizes. Triton says which
variant of a kernel each launch asks for, by how its arguments are specialised, and is told to go
without it. A line of JSON has the number of variants of the warm-up, and each that a step asked for
first: its kernel, the step, and what it has otherwise than the nearest variant of the warm-up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from gpu import launches as gpu_launches
from make_shaped_checkpoint import SHAPES
from support.kernels.compile_launchers import Driver
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup.build import assemble
from surestep_worker.step.buckets import EVERYTHING, _rows
from surestep_worker.step.plan import NO_SNAPSHOTS, Rows
from surestep_worker.step.step import StepLauncher
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from triton import knobs
from triton.runtime import driver

_SEQS, _DRAFTS = 128, 3
_GREEDY = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1)
_LOGPROBS = sampling_pb2.SamplingParams(
    top_p=1, repetition_penalty=1, want_logprobs=True, num_top_logprobs=5
)
_TINY = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
_KINDS = {kind.name: kind.config for kind in gpu_launches.KINDS}
_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


_LATENT = SHAPES["glm-5-attention"]


class Studied(NamedTuple):
    """A model, and most tokens of a step."""

    config: dict[str, Any]
    layers: tuple[str, ...]
    batched: int = 2048
    mtp: bool = False


MODELS = {
    "dense": Studied(_KINDS["dense"] | _TINY, ("full_attention",)),
    "experts": Studied(
        _KINDS["gated attention with experts"] | _TINY | _EXPERTS,
        ("full_attention", "linear_attention"),
        batched=8192,
    ),
    "hybrid": Studied(
        _KINDS["gated attention"] | _TINY, ("full_attention", "linear_attention"), batched=4096
    ),
    "hybrid with an MTP head": Studied(
        _KINDS["gated attention"] | _TINY, ("full_attention", "linear_attention"), mtp=True
    ),
    "latent": Studied(
        _LATENT.config(**_LATENT.sizes).to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]},
        ("full_attention",) * 2,
    ),
    "gpt-oss": Studied(
        GptOssConfig(num_local_experts=16, head_dim=64).to_dict()
        | _TINY
        | {"architectures": ["GptOssForCausalLM"]},
        ("sliding_attention", "full_attention"),
    ),
}


class Variants:
    """Which variants have been asked for, and by which step first."""

    def __init__(self) -> None:
        self.step = ""  # of the warm-up
        self.late = list[dict[str, Any]]()
        self._warm = dict[str, list[tuple[str, ...]]]()
        self._seen = set[tuple[str, str]]()

    @property
    def num_warm(self) -> int:
        return sum(map(len, self._warm.values()))

    def ask(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        """Triton's jit_cache_hook: whether to go without the kernel."""
        name = fn.name.rpartition(".")[2]
        if (name, key) not in self._seen:
            self._seen.add((name, key))
            options = "num_warps", "num_stages", "configs", "constants", "signature"
            variant = tuple(part for name in options for part in _parts(compile[name]))
            known = self._warm.setdefault(name, [])
            if self.step:
                differ = min((set(variant) ^ set(other) for other in known), key=len, default=())
                self.late.append({"kernel": name, "step": self.step, "differ": sorted(differ)})
            else:
                known.append(variant)
        return True


def _parts(told: Any) -> Iterator[str]:
    if isinstance(told, dict):
        yield from (f"{name}: {value}" for name, value in told.items())
    elif isinstance(told, (list, tuple)):
        for part in told:
            yield from _parts(part)
    else:
        yield str(told)


class _Written(TorchDispatchMode):
    """Kernels do not write: what they would have is 0, which every index allows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if "empty" in func.overloadpacket.__name__ else made


def _steps(null: int, batched: int) -> Iterator[tuple[str, Rows, Any]]:
    """Steps larger than any that is captured, which are launched kernel by kernel."""
    last, mode = pb.PREFILL_LAST, pb.VERIFY
    for tokens in (1025, 1026, 1100, 1999, 2016, 2017, 2032, 2047, 2049, 3001, 4095, 5000, 8191):
        if tokens <= batched:
            yield f"a prompt of {tokens}", _rows(null, 1, last, num_tokens=tokens), _GREEDY
    for rows, tokens in ((3, 431), (7, 211), (100, 13)):
        yield f"{rows} prompts of {tokens}", _rows(null, rows, last, num_tokens=tokens), _GREEDY
    for rows in (1, 3, 17, 65, 127):
        for params in (_GREEDY, _LOGPROBS, EVERYTHING):
            for drafts in (0, _DRAFTS):
                name = f"{rows} windows of {drafts + 1}"
                yield name, _rows(null, rows, mode, max_drafts=drafts), params


def study(model: Studied) -> Variants:
    """Warm up, then take the steps."""
    ops, variants = gpu_launches.kernels(), Variants()
    settings = WorkerSettings(
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=_SEQS,
        max_model_len=max(2048, model.batched),
        max_num_batched_tokens=model.batched,
        kv_cache_memory=0.3,
        speculative_config={
            "method": "mtp" if model.mtp else "ngram",
            "num_speculative_tokens": _DRAFTS,
        },
    )
    kind = gpu_launches.Kind("", model.config, mtp=model.mtp)
    made = gpu_launches.make_model(kind, model.layers, ops)
    context = assemble(settings, made, TensorParallel(), ops).runner.context
    launcher = StepLauncher(context, context.step_ops)
    driver.set_active(Driver())
    knobs.runtime.jit_cache_hook = variants.ask
    with _Written(), torch.inference_mode():
        launcher.prepare()
        launcher._graphs = None
        for step, rows, params in _steps(context.slots.num_slots, model.batched):
            variants.step = step
            launcher._sampling.set_dummy(params)
            launcher._guidance.set_dummy(made.config.vocab_size if params is EVERYTHING else None)
            launcher._run(rows, launcher._memory.no_difference(), NO_SNAPSHOTS)
    return variants


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    variants = study(MODELS[sys.argv[1]])
    print(json.dumps({"warm": variants.num_warm, "late": variants.late}))  # noqa: T201


if __name__ == "__main__":
    main()
