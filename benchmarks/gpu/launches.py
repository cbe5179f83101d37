"""Launches of a decode step on a GPU, counted without one; JSON lines.

    PYTHONPATH=proto:common:kernels:worker_svc:tools:benchmarks python -m gpu.launches [--out FILE]

The worker's own device step runs on models of published shapes whose weights and caches are memory
that nobody has written. Triton's launches are counted in place of being run, and torch's operators
by its dispatcher, but for those that only allocate or look at memory in another way: one operator
is one launch at least. Copies between host and device, of which a step has one each, do not count.
What a layer takes is what a model with one more of its kind takes more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is defined

import machine
import torch
from make_shaped_checkpoint import SHAPES
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.dispatch import load_triton
from surestep_kernels.paged_attention.triton import paged_attention
from surestep_kernels.store_kv.triton import store_kv
from surestep_proto import sampling_pb2 as pb
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.decoder import Decoder
from surestep_worker.layers.linear import Sharding
from surestep_worker.models import FAMILIES, Model
from surestep_worker.startup.build import assemble
from surestep_worker.step.buckets import warm_up_steps
from surestep_worker.step.plan import NO_SNAPSHOTS
from surestep_worker.step.step import StepLauncher
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

# Operators that launch nothing, beside views.
_FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
)
_MAX_MODEL_LEN = 2048


class Kind(NamedTuple):
    """A kind of layer, and the model that has it."""

    name: str
    config: dict[str, Any]
    layer: str = "full_attention"
    mtp: bool = False


def _config(architecture: str, shape: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture]} | SHAPES[shape].sizes | changes


_LLAMA = _config("LlamaForCausalLM", "llama-3.2-1b")
_QWEN3 = _config("Qwen3ForCausalLM", "llama-3.2-1b")
_HYBRID = _config("Qwen3_5ForCausalLM", "qwen3.5-4b")
_DENSE = (_LLAMA, _QWEN3)
_EXPERTS = _config(
    "Qwen3_5MoeForCausalLM",
    "qwen3.5-4b",
    hidden_size=2048,
    num_experts=8,  # of which a token takes as many as of 256
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
KINDS = (
    Kind("dense", _LLAMA),
    Kind("dense with norms of heads", _QWEN3),
    Kind("gated attention", _HYBRID),
    Kind("gated delta", _HYBRID, "linear_attention"),
    Kind("gated delta, step with MTP", _HYBRID, "linear_attention", mtp=True),
    Kind("gated attention with experts", _EXPERTS),
)


class Unwritten:
    """Weights of a model: memory of the right shapes."""

    nbytes, dtype = 0, torch.bfloat16

    def __init__(self, table: Mapping[str, Parameter]) -> None:
        self._table = table

    def __contains__(self, name: str) -> bool:
        return name in self._table or f"{name}.weight" in self._table

    def take(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        prepare: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Tensor:
        """Take a parameter."""
        made = torch.zeros(self._table[name].shape, dtype=dtype or torch.bfloat16)
        return prepare(made).contiguous()

    take_linear = take

    def take_packed(self, name: str, pack: Callable[[Any], PackedLinear]) -> PackedLinear:
        """Take a linear layer."""
        return pack(self)

    def in_host_memory(self, name: str) -> Tensor:
        """Take a parameter that stays in host memory."""
        return self.take(name)

    def quantized(self, name: str) -> None:
        """None of them is."""


def _shares(made: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator that may return its argument's memory did."""
    first = made[0] if isinstance(made, (tuple, list)) else made
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    storage = first.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)


class Launches(TorchDispatchMode):
    """Counts by name while it is entered; Triton's are counted and not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name not in _FREE and not (func.is_view and _shares(made, args)):
            self.names[f"torch {name}"] += 1
        return made.zero_() if "empty" in name else made  # kernels would have written ids there

    def __enter__(self) -> Launches:
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **options: self._count(kernel)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        JITFunction.run = self._run

    def _count(self, kernel: Any) -> None:
        self.names[kernel.__name__] += 1


def kernels() -> KernelSet:
    """Return the kernels of a CUDA device."""
    return replace(load_triton(), store_kv=store_kv, paged_attention=paged_attention)


def make_model(kind: Kind, layers: Sequence[str], ops: KernelSet) -> Model:
    """Make a model of these kinds of layers."""
    raw = kind.config | {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    files, tp = ConfigFiles(raw, {}), TensorParallel()
    family, shard = FAMILIES[raw["architectures"][0]], Sharding(tp)
    config = family.parse(files)
    weights: Any = Unwritten(family.parameter_table(config, shard, set(), draft_head=kind.mtp))
    rotary = torch.zeros(_MAX_MODEL_LEN, config.rotary_dim)
    return Decoder(LayerContext(config, weights, shard, ops, rotary), family.feed_forward)


def count_step(kind: Kind, layers: Sequence[str], batch: int) -> Counter[str]:
    """Launches of a greedy step in which so many requests decode."""
    ops, drafts = kernels(), 1 if kind.mtp else 0
    settings = WorkerSettings(
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=batch,
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_memory=0.2,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None,
    )
    model = make_model(kind, layers, ops)
    parts = assemble(settings, model, TensorParallel(), ops).runner.context
    step = StepLauncher(parts, parts.step_ops)
    steps = warm_up_steps(parts.slots, 1, drafts, has_head=True)
    wanted = batch, drafts
    rows = next(rows for rows, _ in steps if (len(rows.slot), rows.max_drafts[0]) == wanted)
    step._sampling.set_dummy(pb.SamplingParams(top_p=1, repetition_penalty=1))
    with Launches() as counted, torch.inference_mode():
        step._run(rows, step._memory.no_difference(), NO_SNAPSHOTS)
    return counted.names


def figures(kind: Kind, batch: int) -> dict[str, Any]:
    """Return the launches of a layer, and of a step beside its layers."""
    base = ("full_attention",) if kind.config in _DENSE else ("full_attention", "linear_attention")
    whole = count_step(kind, base, batch)
    added = {layer: count_step(kind, (*base, layer), batch) - whole for layer in base}
    layer, rest = added[kind.layer], whole.copy()
    for one in added.values():
        rest -= one
    return {
        "kind": kind.name,
        "batch": batch,
        "layer": layer.total(),
        "step": rest.total(),
        "of_layer": dict(sorted(layer.items())),
        "of_step": dict(sorted(rest.items())),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Count all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS])
    parser.add_argument("--out", type=Path, help="also write the counts to this file, as JSON")
    args = parser.parse_args(argv)
    lines = list[dict[str, Any]]()
    for kind in (kind for kind in KINDS if kind.name in args.kinds):
        for batch in args.batch:
            lines.append(figures(kind, batch))
            sys.stdout.write(json.dumps(lines[-1]) + "\n")
            sys.stdout.flush()
    about = {"commit": machine.describe()["commit"], "torch": torch.__version__}
    machine.write(args.out, about, launches=lines)


if __name__ == "__main__":
    main()
