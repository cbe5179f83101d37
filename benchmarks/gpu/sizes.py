"""Cases of gpu/ops.py, the sizes of models, and random inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from surestep_kernels import KernelSet
from surestep_kernels.dispatch import load_triton
from torch import Tensor

DTYPE, BYTES = torch.bfloat16, 2  # of an activation


class Work(NamedTuple):
    """A launch, on buffers of its own."""

    run: Callable[[], object]
    nbytes: int  # that have to be read and written
    flop: int = 0


class Case(NamedTuple):
    """`make` allocates on a device. Cold: what it reads comes from memory, never from L2."""

    op: str
    shape: str
    make: Callable[[str], Work]
    cold: bool = False


class DeltaSizes(NamedTuple):
    """A gated delta layer, and the convolution in front of it."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int = 4
    records: int = 5

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


class ExpertSizes(NamedTuple):
    """A layer of routed experts, and the numbers of tokens of a step."""

    experts: int
    top_k: int
    inner: int
    rows: tuple[int, ...] = (1, 8, 64, 256, 4096)
    gpt_oss: bool = False  # biases, clamped_swiglu, no shared expert


class SinkSizes(NamedTuple):
    """Attention with sinks, in every other layer within a window, and the steps of it."""

    window: int  # positions
    batches: tuple[int, ...] = (1, 64)  # requests that decode
    contexts: tuple[int, ...] = (1024, 8192)  # tokens of each
    prompts: tuple[int, ...] = (2048,)


class DraftSizes(NamedTuple):
    """An EAGLE-3 head whose layer is of the model's sizes, and the numbers of tokens of a step."""

    captured: int = 3  # hidden states of the model
    vocab: int = 32000
    rows: tuple[int, ...] = (1, 8, 64, 256)


class Sizes(NamedTuple):
    """A model, and the steps that it is timed at."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    vocab: int
    delta: DeltaSizes | None = None
    experts: ExpertSizes | None = None
    sinks: SinkSizes | None = None
    draft: DraftSizes | None = None
    rows: tuple[int, ...] = (1, 4, 8, 64, 256, 512, 4096)  # tokens of a step
    lookups: tuple[tuple[int, int], ...] = ((1, 4096), (64, 4096), (1, 131072), (64, 131072))
    batches: tuple[int, ...] = (1, 8, 64, 256)  # requests that decode
    contexts: tuple[int, ...] = (1024, 4096)  # tokens of each
    prompts: tuple[int, ...] = (2048,)
    sampled: tuple[int, ...] = (1, 4, 64, 256)  # positions of a step


MODELS = (
    Sizes("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 64, 128256),
    Sizes("Qwen3.5-4B", 2560, 9216, 16, 4, 256, 64, 248320, DeltaSizes(16, 32, 128, 128)),
    Sizes(  # the experts alone: its other ops are much like those above
        "Qwen3.5-35B-A3B", 2048, 512, 16, 2, 256, 64, 248320, experts=ExpertSizes(256, 8, 512),
        rows=(), lookups=(), batches=(), contexts=(), prompts=(), sampled=(),
    ),
    Sizes(  # its attention is that of the larger one
        "gpt-oss-20b", 2880, 2880, 64, 8, 64, 64, 201088,
        experts=ExpertSizes(32, 4, 2880, gpt_oss=True),
        rows=(), lookups=(), batches=(), contexts=(), prompts=(), sampled=(),
    ),
    Sizes(
        "gpt-oss-120b", 2880, 2880, 64, 8, 64, 64, 201088,
        experts=ExpertSizes(128, 4, 2880, gpt_oss=True), sinks=SinkSizes(128), draft=DraftSizes(),
        rows=(), lookups=(), batches=(), contexts=(), prompts=(), sampled=(),
    ),
    Sizes(  # its attention and its draft head
        "Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128, 128256, draft=DraftSizes(),
        rows=(), lookups=(), sampled=(),
    ),
)  # fmt: skip
TINY = Sizes(
    "tiny", 128, 136, 2, 1, 8, 4, 70, DeltaSizes(1, 2, 16, 24), ExpertSizes(3, 2, 48, rows=(1, 3)),
    rows=(1, 3), lookups=((2, 40),), batches=(2,), contexts=(40,), prompts=(70,), sampled=(2,),
)  # fmt: skip

TINY_GPT_OSS = Sizes(
    "tiny gpt-oss", 96, 64, 2, 1, 8, 8, 70,
    experts=ExpertSizes(3, 2, 64, rows=(1, 3), gpt_oss=True),
    sinks=SinkSizes(20, (2,), (40,), (70,)), draft=DraftSizes(vocab=40, rows=(2,)),
    rows=(), lookups=(), batches=(), contexts=(), prompts=(), sampled=(),
)  # fmt: skip


@cache
def kernels(linear_backend: str = "auto", activation_dtype: str = "auto") -> KernelSet:
    """Return the kernels of a CUDA device, except for attention."""
    return load_triton(linear_backend, activation_dtype)


def activations(device: str, *shape: int) -> Tensor:
    """Normally distributed."""
    return torch.randn(shape, device=device).to(DTYPE)


def floats(device: str, *shape: int) -> Tensor:
    """Between 0 and 1."""
    return torch.rand(shape, device=device)


def size(*trees: Any) -> int:
    """Bytes of all tensors in tuples."""
    tensors = (tree.nbytes for tree in trees if isinstance(tree, Tensor))
    return sum(tensors) + sum(size(*tree) for tree in trees if isinstance(tree, tuple))


def i32(device: str, *values: int) -> Tensor:
    """A column of numbers that the host knows."""
    return torch.tensor(values, dtype=torch.int32, device=device)
