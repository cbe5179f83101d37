"""Time steps of transformers' code over our ops beside those of our own code, in turns.

python benchmarks/model_impl.py
python benchmarks/model_impl.py --threads 1 --cpu-time  # on a busy machine

Both compute the same random Llama in bfloat16, by default in the shape of Llama-3.2-1B with half of
its layers: sequences of one new token behind 256, and their logits. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import machine
import torch
from surestep_kernels import load_kernels
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.models import Model, ModelSource, load_model
from transformers import LlamaConfig, LlamaForCausalLM

_IMPLEMENTATIONS = ("surestep", "transformers")
_BLOCK_SIZE, _CONTEXT = 16, 256
_PAGES = _CONTEXT // _BLOCK_SIZE + 1


class Served(NamedTuple):
    model: Model
    caches: Caches


def load(folder: Path, implementation: str, most_rows: int) -> Served:
    kernels = load_kernels("cpu")
    model = load_model(
        ModelSource(folder, implementation=implementation),
        dtype="bfloat16",
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels,
        max_model_len=2 * _CONTEXT,
    )
    kv = KVCache(model.kv_spec(_BLOCK_SIZE), 2 + _PAGES * most_rows, kernels, "cpu")
    return Served(model, Caches(kv))


def decode(rows: int) -> StepBatch:
    """A token for each row, behind its context."""
    tables = (1 + torch.arange(rows * _PAGES, dtype=torch.int32)).view(rows, _PAGES)
    start, place = torch.full((rows,), _CONTEXT), torch.arange(rows)
    attention = AttentionRows(
        tables, place, torch.arange(rows + 1, dtype=torch.int32), start.int(), max_tokens=1
    )
    pages = GroupPages(attention, tables[:, _CONTEXT // _BLOCK_SIZE].long() * _BLOCK_SIZE)
    return StepBatch(torch.full((rows,), 5), start, (pages,), hidden_index=place)


def main() -> None:
    """Print milliseconds of a step, and the ratio, by rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--times", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of the process, of all threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 256,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        served = {name: load(Path(folder), name, max(args.rows)) for name in _IMPLEMENTATIONS}
        found = dict[str, dict[str, float]]()
        for rows in args.rows:
            batch, took = decode(rows), {name: list[float]() for name in served}
            for turn in range(args.times + 2):
                for name, (model, caches) in served.items():
                    begun = clock()
                    model.logits(model.forward(batch, caches))
                    if turn >= 2:
                        took[name].append(1e3 * (clock() - begun))
            ms = {name: round(statistics.median(each), 2) for name, each in took.items()}
            found[str(rows)] = {**ms, "ratio": round(ms["transformers"] / ms["surestep"], 3)}
    print(json.dumps({"shape": vars(args), "rows": found, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
