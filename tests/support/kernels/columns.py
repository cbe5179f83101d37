"""A device's ops on tensors of the CPU, so that a test reads alike for every column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from surestep_kernels import KernelSet
from surestep_kernels.table import LatentOps, StepOps
from torch import Tensor

_Ops = TypeVar("_Ops", KernelSet, StepOps, LatentOps)
_HOST_OPS = {"set_num_threads", "kv_cache_shape"}  # no tensors


def triton_kernels(device: str) -> KernelSet:
    """Return every op that there is in Triton."""
    from surestep_kernels.dispatch import load_triton
    from surestep_kernels.paged_attention.triton import paged_attention
    from surestep_kernels.store_kv.triton import store_kv

    kernels = replace(load_triton(), store_kv=store_kv, paged_attention=paged_attention)
    return on_device(kernels, device)


def on_device(kernels: KernelSet, device: str) -> KernelSet:
    """Return ops that take and return tensors on the CPU, and run on the device."""
    if device == "cpu":
        return kernels
    return replace(
        _moving(kernels, device),
        step=_moving(kernels.step, device),
        latent=_moving(kernels.latent, device),
    )


def _moving(table: _Ops, device: str) -> _Ops:
    ops = {field.name: getattr(table, field.name) for field in fields(table)}
    moving = {n for n, op in ops.items() if callable(op)} - _HOST_OPS
    made: dict[str, Any] = {n: partial(_call, ops[n], device) for n in moving}
    return replace(table, **made)


def _call(op: Callable[..., Any], device: str, *args: Any, **options: Any) -> Any:
    """Call the op on copies, and bring back whatever it may have written."""
    memory = dict[int, tuple[Tensor, Tensor]]()

    def moved(x: Tensor) -> Tensor:
        """Where it lies in a copy of its whole memory: a slice stays one."""
        at = x.untyped_storage().data_ptr()
        if at not in memory:
            here = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            memory[at] = here, here.to(device)
        there = memory[at][1].view(x.dtype)
        return there.as_strided(x.shape, x.stride(), x.storage_offset())

    made = op(*_mapped(args, moved), **_mapped(options, moved))
    for here, there in memory.values():
        here.copy_(there)
    return _mapped(made, Tensor.cpu)


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with its tensors changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(part, change) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [_mapped(part, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        own = {field.name: getattr(tree, field.name) for field in fields(tree)}
        return replace(tree, **_mapped(own, change))
    return tree
