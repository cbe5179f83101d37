"""Compare a checkpoint's weights as they are with the same weights rounded while they are loaded.

python benchmarks/rounding.py --model FOLDER            # perplexity
python benchmarks/rounding.py --model FOLDER --memory   # what a rank's process has in memory

All models run on the CPU, in one process, and read the same text (see perplexity.py). A model that
comes from a GGUF file holds numbers that such groups gave already, and rounding to four bits would
find them again: `--shuffle` writes a copy that computes the same with its channels in a random
order, so that each group has elements of many former ones. Llama without biases only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import machine
import torch
from perplexity import BLOCK, compare, logits_of, text, windows
from safetensors.torch import load_file, save_file
from surestep_kernels import load_kernels
from surestep_kernels.linear import ROUNDINGS
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from tokenizers import Tokenizer
from torch import Tensor

_KINDS: tuple[str | None, ...] = (None, "int8", "int4", "fp8")
_SEED = 7
_POLL_S = 0.002
_MIB = 1 << 20


def load(folder: Path, dtype: str, kind: str | None) -> Model:
    """The model, its weights rounded to this kind."""
    kernels = load_kernels("cpu")
    kernels.set_num_threads(len(os.sched_getaffinity(0)))
    return load_model(
        ModelSource(folder),
        dtype=dtype,
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels,
        rounding=None if kind is None else ROUNDINGS[kind],
    )


def shuffled(folder: Path, to: Path) -> Path:
    """Write a model that computes the same, with its channels in another order."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(_SEED)
    orders = {
        "hidden": torch.randperm(config["hidden_size"]),
        "inner": torch.randperm(config["intermediate_size"]),
        "head": torch.randperm(config["head_dim"]),
    }
    tensors = load_file(folder / "model.safetensors")
    made = {name: _shuffled(name, tensor, orders) for name, tensor in tensors.items()}
    save_file(made, to / "model.safetensors")
    return to


def _shuffled(name: str, tensor: Tensor, orders: dict[str, Tensor]) -> Tensor:
    """Reorder outputs and inputs. Values are reordered within heads, queries and keys are not:
    they are rotated."""
    hidden, inner, head = orders["hidden"], orders["inner"], orders["head"]

    def values(outputs: int) -> Tensor:
        return (torch.arange(0, outputs, len(head))[:, None] + head).flatten()

    module = name.split(".")[-2]
    if module in ("gate_proj", "up_proj"):
        tensor = tensor[inner]
    if module == "v_proj":
        tensor = tensor[values(len(tensor))]
    if module == "down_proj":
        return tensor[hidden][:, inner].contiguous()
    if module == "o_proj":
        return tensor[hidden][:, values(tensor.shape[1])].contiguous()
    return tensor[..., hidden].contiguous()


def _memory() -> int:
    """Bytes of this process: its own, and weights, which lie in shared memory without a file."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, shared = (int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))
    # Until they are sealed, weights are written to a descriptor, and are not mapped.
    written = dict[int, int]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "surestep-weights" in os.readlink(descriptor):
                about = descriptor.stat()
                written[about.st_ino] = about.st_blocks * 512
    return own + max(shared, sum(written.values()))


def _measure(folder: Path, kind: str | None, found: dict[str, float]) -> None:
    kernels = load_kernels("cpu")
    before, most, done = _memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(_POLL_S):
            most = max(most, _memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, processor = time.monotonic(), time.process_time()
    model = load(folder, "auto", kind)
    found["load_s"], found["load_cpu_s"] = time.monotonic() - began, time.process_time() - processor
    done.set()
    watcher.join()
    kv = KVCache(model.kv_spec(BLOCK), 4, kernels, "cpu")
    for _ in logits_of(model, kv, [1, 2, 3]):  # reads every weight once
        pass
    found["embedding_mib"] = model.vocabulary.embed.table.nbytes / _MIB
    found["grew_by_mib"] = (_memory() - before) / _MIB
    found["at_most_mib"] = (most - before) / _MIB


def memory(folder: Path) -> dict[str, dict[str, float]]:
    """Measure the memory that loading takes, each kind in a process of its own."""
    spawn, table = get_context("spawn"), {}
    with spawn.Manager() as manager:
        for kind in _KINDS:
            found = manager.dict()
            process = spawn.Process(target=_measure, args=(folder, kind, found))
            process.start()
            process.join()
            table[str(kind)] = {name: round(value, 2) for name, value in found.items()}
    return table


def quality(folder: Path, num_tokens: int, length: int) -> dict[str, dict[str, float]]:
    """Compare all kinds as they are served with the weights in float32, the reference."""
    models = {"float32": load(folder, "float32", None)}
    models |= {str(kind): load(folder, "auto", kind) for kind in _KINDS}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text(), add_special_tokens=False).ids
    found = compare(list(models.values()), windows(ids, num_tokens, length), load_kernels("cpu"))
    return dict(zip(models, found, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face format")
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--shuffle", action="store_true", help="reorder its channels first")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = shuffled(args.model, Path(scratch)) if args.shuffle else args.model
        found = memory(folder) if args.memory else quality(folder, args.num_tokens, args.length)
    about = {"model": args.model.name, "shuffled": args.shuffle}
    print(json.dumps({**about, **found, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
