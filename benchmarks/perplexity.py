"""Compare a GGUF file's weights as they are served, packed, with the same weights dequantised.

python benchmarks/perplexity.py --model FILE.gguf  # default: the default model's

All models run in this process, on the CPU, and read the same text: Python's own documentation of
its language. Prints one JSON line: the perplexity of each, and by how much its logits differ from
those of the dequantised weights in float32, which are exact: the largest norm of the difference
over the norm of a token's logits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import machine
import torch
from surestep_common.config import cache_dir
from surestep_common.gguf import model_folder
from surestep_kernels import KernelSet, load_kernels
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.models import Model, ModelSource, load_model
from tokenizers import Tokenizer
from torch import Tensor

_DEFAULT = cache_dir() / "models" / "SmolLM2-135M-Instruct.gguf"
BLOCK = 16
_CHUNK = 256  # tokens in a step


def text() -> str:
    """The text, without its layout and what differs between releases the least."""
    return "\n\n".join(re.sub(r"[ \t]+", " ", topics[name]) for name in sorted(topics))


def windows(ids: Sequence[int], num_tokens: int, length: int) -> list[list[int]]:
    """Texts of `length` tokens, `num_tokens` together."""
    return [list(ids[at : at + length]) for at in range(0, num_tokens, length)]


def load(folder: Path, dtype: str, kernels: KernelSet) -> Model:
    """The model with these kernels."""
    tp = TensorParallel.connect(0, 1, "", "cpu", 60.0)
    source = ModelSource(folder)  # of its own: it keeps the weights as they were laid out
    return load_model(source, dtype=dtype, device="cpu", tp=tp, kernels=kernels)


def dequantising(kernels: KernelSet, dtype: torch.dtype) -> KernelSet:
    """The same kernels for weights that are multiplied out."""
    return replace(
        kernels,
        pack_quantized=lambda weight, bias=None: kernels.pack_linear(
            weight.dequantize().to(dtype), bias
        ),
    )


@torch.inference_mode()
def logits_of(model: Model, kv: KVCache, ids: Sequence[int]) -> Iterator[Tensor]:
    """The logits f32[T, V] of each chunk of a text."""
    blocks = torch.arange(1, 2 + len(ids) // BLOCK)
    for start in range(0, len(ids), _CHUNK):
        tokens = torch.tensor(ids[start : start + _CHUNK])
        positions = torch.arange(start, start + len(tokens))
        rows = AttentionRows(
            blocks.to(torch.int32)[None],
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([0, len(tokens)], dtype=torch.int32),
            torch.tensor([start], dtype=torch.int32),
            max_tokens=len(tokens),
        )
        slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
        batch = StepBatch(tokens, positions, (GroupPages(rows, slots),), torch.arange(len(tokens)))
        yield model.logits(model.forward(batch, Caches(kv)))


def surprise(logits: Tensor, following: Tensor) -> float:
    """The sum of -log p of the tokens that follow."""
    picked = torch.log_softmax(logits[: len(following)].double(), -1)
    return -float(picked.gather(1, following[:, None]).sum())


class Tally:
    """Likelihoods that a model gives the texts, beside the reference."""

    def __init__(self) -> None:
        self._surprise, self._count = 0.0, 0
        self._worst, self._agreed, self._rows = 0.0, 0, 0

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        """Add a chunk."""
        self._surprise += surprise(logits, following)
        self._count += len(following)
        apart = (logits - reference).norm(dim=-1) / reference.norm(dim=-1)
        self._worst = max(self._worst, float(apart.max()))
        self._agreed += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self._rows += len(logits)

    @property
    def perplexity(self) -> float:
        """Perplexity of the tokens with a token before them."""
        return math.exp(self._surprise / self._count)

    def figures(self, reference: float) -> dict[str, float]:
        """`reference` is the reference's perplexity."""
        return {
            "perplexity": self.perplexity,
            "percent": 100 * (self.perplexity / reference - 1),
            "logits_apart": self._worst,
            "same_best_token": self._agreed / self._rows,
        }


def compare(
    models: Sequence[Model], texts: Sequence[list[int]], kernels: KernelSet
) -> list[dict[str, float]]:
    """Compare the models over the texts; the first model is the reference."""
    blocks = 2 + max(map(len, texts)) // BLOCK
    caches = [KVCache(model.kv_spec(BLOCK), blocks, kernels, "cpu") for model in models]
    tallies = [Tally() for _ in models]
    for ids in texts:
        runs = (logits_of(*each, ids) for each in zip(models, caches, strict=True))
        for number, chunk in enumerate(zip(*runs, strict=True)):
            first = number * _CHUNK + 1
            following = torch.tensor(ids[first : first + len(chunk[0])])
            for tally, logits in zip(tallies, chunk, strict=True):
                tally.add(logits, chunk[0], following)
    return [tally.figures(tallies[0].perplexity) for tally in tallies]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=_DEFAULT, help="GGUF file")
    parser.add_argument("--num-tokens", type=int, default=20480)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    args = parser.parse_args()
    folder = model_folder(args.model)
    kernels = load_kernels("cpu")
    kernels.set_num_threads(len(os.sched_getaffinity(0)))
    models = {
        "dequantised, float32": load(folder, "float32", dequantising(kernels, torch.float32)),
        "packed, float32": load(folder, "float32", kernels),
        "packed, bfloat16": load(folder, "bfloat16", kernels),
        "dequantised, bfloat16": load(folder, "bfloat16", dequantising(kernels, torch.bfloat16)),
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text(), add_special_tokens=False).ids
    found = compare(list(models.values()), windows(ids, args.num_tokens, args.length), kernels)
    about = {"model": args.model.name, "tokens": args.num_tokens, "length": args.length}
    print(
        json.dumps(
            {**about, **dict(zip(models, found, strict=True)), "machine": machine.describe()}
        )
    )


if __name__ == "__main__":
    main()
