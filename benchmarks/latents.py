"""Measure latents of a token, and the time of a decode step over long contexts.

python benchmarks/latents.py bytes
python benchmarks/latents.py steps FOLDER [--contexts N ...] [--rounds N] [--threads N]

`bytes` is arithmetic: published models in bfloat16, against keys and values of their heads. `steps`
times one row of a model whose indexers choose positions, and of the same model when they choose all
of them, in turns; FOLDER is what tools/make_shaped_checkpoint.py makes of "glm-5-attention".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from machine import describe
from surestep_kernels import KernelSet, load_kernels
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.models import Model, ModelSource, load_model

_BLOCK = 16
_BYTES = 2  # of a number in bfloat16


class Kept(NamedTuple):
    """Bytes that layers keep of a token: of all heads together, and in the place of them."""

    layers: int
    heads: int
    key: int  # elements of a head's key, and of its value
    value: int
    latent: int
    index_key: int


MODELS: Mapping[str, Kept] = {
    "deepseek_v3 (DeepSeek-V3)": Kept(61, 128, 192, 128, 576, 0),
    "deepseek_v32 (DeepSeek-V3.2)": Kept(61, 128, 192, 128, 576, 128),
    "glm_moe_dsa (GLM-5.1)": Kept(78, 64, 256, 256, 576, 128),
}


def bytes_of_a_token(kept: Kept) -> dict[str, int | float]:
    """In bfloat16, without an MTP layer, which has as much as another layer."""
    latents = kept.layers * kept.latent * _BYTES
    index = kept.layers * kept.index_key * _BYTES
    heads = kept.layers * kept.heads * (kept.key + kept.value) * _BYTES
    ratio = round(heads / (latents + index), 1)
    return {"latents": latents, "index_keys": index, "keys_and_values": heads, "ratio": ratio}


def load(folder: Path, kernels: KernelSet, *, sparse: bool, longest: int) -> Model:
    """Load the model; `sparse` or not, its weights are the same."""
    source = ModelSource(folder)
    indexer = getattr(source.config, "indexer", None)
    assert indexer is not None, "a model without indexers"
    if not sparse:
        everything = replace(indexer, top_k=longest)
        object.__setattr__(source.config, "indexer", everything)
    return load_model(
        source,
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels,
        max_model_len=longest,
    )


def decode_ms(model: Model, caches: Caches, context: int) -> float:
    """Milliseconds of one row that reads `context` positions."""
    pages = -(-context // _BLOCK)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    start = torch.tensor([context - 1], dtype=torch.int32)
    border = torch.tensor([0, 1], dtype=torch.int32)
    rows = AttentionRows(table, torch.zeros(1, dtype=torch.int64), border, start, 1)
    slot = torch.tensor([_BLOCK + context - 1])
    last = torch.zeros(1, dtype=torch.int64)
    batch = StepBatch(torch.tensor([7]), start.long(), (GroupPages(rows, slot),), last)
    began = time.perf_counter()
    model.forward(batch, caches)
    return (time.perf_counter() - began) * 1e3


@torch.inference_mode()
def time_steps(options: argparse.Namespace) -> None:
    """Print a line for each context."""
    kernels, longest = load_kernels("cpu"), max(options.contexts)
    kernels.set_num_threads(options.threads)
    models, caches = {}, {}
    for name in ("dense", "sparse"):
        models[name] = load(options.folder, kernels, sparse=name == "sparse", longest=longest)
        spec, blocks = models[name].kv_spec(_BLOCK), 2 + -(-longest // _BLOCK)
        caches[name] = Caches(KVCache(spec, blocks, kernels, "cpu"), None)
        for layer in caches[name].kv.layers:
            for pages in layer.pages:
                pages.normal_()
    for context in options.contexts:
        took: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(options.rounds):
            for name, model in models.items():
                took[name].append(decode_ms(model, caches[name], context))
        ms = {name: round(statistics.median(times), 2) for name, times in took.items()}
        ratio = round(ms["dense"] / ms["sparse"], 2)
        print(json.dumps({"context": context, "ms": ms, "dense_over_sparse": ratio}))


def main() -> None:
    """Print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("bytes")
    steps = parts.add_parser("steps")
    steps.add_argument("folder", type=Path)
    contexts = [1024, 2048, 4096, 8192, 16384, 32768]
    steps.add_argument("--contexts", type=int, nargs="+", default=contexts)
    steps.add_argument("--rounds", type=int, default=7)
    steps.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.part == "bytes":
        for name, kept in MODELS.items():
            print(json.dumps({"model": name, **bytes_of_a_token(kept)}))
        return
    print(json.dumps({"machine": describe(), "threads": options.threads}))
    time_steps(options)


if __name__ == "__main__":
    main()
