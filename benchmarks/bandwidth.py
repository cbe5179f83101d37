"""Measure how fast this machine reads memory, and the share of it that a rate of tokens means.

python benchmarks/bandwidth.py MODEL --tok-s 80

A token of one client reads every weight once, so no server is faster than bandwidth over bytes.
MODEL is a GGUF file or a folder of safetensors; mixtures of experts read less than their files.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine
import numpy as np
from gguf import GGUFReader

_BYTES = 1 << 30
_TIMES = 5  # the best counts: others may use the machine
_HEADS = ("output.weight", "lm_head.weight")
_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")


def read_bandwidth(num_threads: int = 2) -> float:
    """Bytes per second that `num_threads` threads read of 1 GiB, each a part of its own."""
    numbers = np.ones(_BYTES // 8, np.int64)
    parts = np.array_split(numbers, num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_TIMES):
            start = time.perf_counter()
            list(threads.map(np.max, parts))  # of all reductions of numpy the fastest
            best = max(best, numbers.nbytes / (time.perf_counter() - start))
    return best


def weight_bytes(model: Path) -> int:
    """Bytes of the weights that a token reads: all but an embedding that is not the head too."""
    sizes = dict(_tensors(model))
    tied = not any(name in sizes for name in _HEADS)
    return sum(size for name, size in sizes.items() if tied or name not in _EMBEDDINGS)


def share(model: Path, tok_s: float, bytes_s: float) -> float:
    """Return the share of `bytes_s` that `tok_s` tokens per second of a client read."""
    return weight_bytes(model) * tok_s / bytes_s


def _tensors(model: Path) -> Iterator[tuple[str, int]]:
    if model.is_file():
        yield from ((tensor.name, int(tensor.n_bytes)) for tensor in GGUFReader(model).tensors)
        return
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                yield name, end - start


def main() -> None:
    """Print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tok-s", type=float, help="tokens per second of one client")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    bytes_s, size = read_bandwidth(args.threads), weight_bytes(args.model)
    figures = {"read_gb_s": bytes_s / 1e9, "weight_mb": size / 1e6, "most_tok_s": bytes_s / size}
    if args.tok_s is not None:
        figures["share"] = share(args.model, args.tok_s, bytes_s)
    print(json.dumps({"machine": machine.describe(), **figures}))


if __name__ == "__main__":
    main()
