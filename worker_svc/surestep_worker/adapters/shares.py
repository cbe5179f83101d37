"""Shares of an adapter in the model's linear layers, under the names that these have.

peft has written adapters of experts in two ways: one by one, as transformers 4 had them, and all
experts of a layer in one stack, whose tensors are named after the wrappers of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest

from .folder import PARAM, AdapterFolder, Halves, Scaling
from .kernels import Stack

_OLD_LAYER = re.compile(r"(\.experts\.\d+)\.w([123])")
_LAYERS = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}

Words = np.ndarray[Any, Any]  # numbers by their bits, which are copied fast


class Share(NamedTuple):
    """Share of an adapter in one linear layer of the model."""

    layer: str  # canonical name
    source: str  # the adapter's module
    outputs: int
    inputs: int
    rank: int
    scale: float
    expert: int = 0  # within a stack
    experts: int = 1  # of the stack
    rows: slice = slice(None)  # of the stack's outputs

    def unstacked(self, a: Words, b: Words) -> tuple[Words, Words]:
        """Return A [E, r, K] and B [E, r, N] of the tensors of the adapter's module."""
        b = b.reshape(-1, self.rank, self.experts).transpose(2, 1, 0)
        return a.reshape(self.experts, self.rank, -1), np.ascontiguousarray(b)


def canonical(module: str) -> str:
    """Return the name that a module has in transformers 5; checkpoints may have older ones."""
    module = module.replace(".block_sparse_moe.", ".mlp.")
    return _OLD_LAYER.sub(lambda found: f"{found[1]}.{_LAYERS[found[2]]}", module)


def shares_of(folder: AdapterFolder, stacks: Mapping[str, Stack]) -> list[Share]:
    """Return the shares of an adapter; `stacks` are the model's, by name of the module.

    Raises InvalidRequest for a stack of another size.
    """
    known, shares = {canonical(name): stack for name, stack in stacks.items()}, list[Share]()
    for source, halves in folder.modules.items():
        name = canonical(source)
        stack = known.get(name.removesuffix(".base_layer"))
        if stack is not None:
            shares += _of_stack(source, halves, stack, folder.scaling)
            continue
        (rank, inputs), outputs = halves.a.shape, halves.b.shape[0]
        scale = folder.scaling.of(source, rank)
        shares.append(Share(name, source, outputs, inputs, rank, scale))
    return shares


def _of_stack(source: str, halves: Halves, stack: Stack, scaling: Scaling) -> Iterator[Share]:
    """Yield the shares of all experts. Their ranks lie one behind the other in A, in turns in B."""
    (rows, inputs), outputs = halves.a.shape, halves.b.shape[0]
    layers, (rank, rest) = stack.rows(outputs, inputs), divmod(rows, stack.experts)
    if rest or not layers:
        size = f"[{outputs}, {inputs}] of rank {rows}"
        message = f"{source} {size} does not fit {stack.experts} experts of {stack.inner} columns"
        raise InvalidRequest(f"the adapter is another model's: {message}", param=PARAM)
    experts = source.removesuffix(".base_layer")
    parameter = "down_proj" if "down_proj" in layers else "gate_up_proj"
    scale = scaling.of(f"{experts}.{parameter}", rank)
    for expert in range(stack.experts):
        for layer, kept in layers.items():
            at, (n, k) = f"{canonical(experts)}.{expert}.{layer}", stack.layers[layer]
            yield Share(at, source, n, k, rank, scale, expert, stack.experts, kept)
