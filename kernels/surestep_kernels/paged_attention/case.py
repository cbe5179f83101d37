"""The attention that a model needs (AttentionCase), and the backends that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from surestep_common.errors import InvalidRequest

from surestep_kernels.store_kv import FP8, INT8, StoreKV

from .reference import PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Demands on a backend."""

    device: str
    capability: int  # of the device: 90 is sm_90; 0 = no CUDA device is present
    dtype: torch.dtype = torch.bfloat16  # of queries
    cache_dtype: torch.dtype | None = None  # None: that of the queries
    head_dim: int = 128
    group: int = 1  # queries that share a key
    block_size: int = 16
    window: bool = False
    sinks: bool = False
    softcap: bool = False
    latent: bool = False  # no backend of attention is needed, but LatentOps
    # A token's bits must not depend on its neighbours, nor on the window in which it is verified.
    # Otherwise a step with drafts may choose another token than one without where two logits are
    # almost equal.
    invariant: bool = True

    @classmethod
    def on(cls, device: str) -> AttentionCase:
        """Return the default case on "cpu", "cuda" or "cuda:0"."""
        capability = 0
        if device.startswith("cuda") and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        return cls(device=device, capability=capability)

    @property
    def fp8(self) -> bool:
        """Return whether the cache is FP8."""
        return self.cache_dtype is FP8

    @property
    def int8(self) -> bool:
        """Return whether the cache is INT8."""
        return self.cache_dtype is INT8


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """The ops of one backend. Shapes and dtypes are those of each op's reference."""

    name: str
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    store_kv: StoreKV
    paged_attention: PagedAttention


def refuse(name: str, reason: str) -> InvalidRequest:
    """Return the error for a case that a backend does not support."""
    return InvalidRequest(f"no {name}: {reason}", param="attention_backend")


def refuse_int8(case: AttentionCase) -> None:
    """Raise InvalidRequest for an INT8 cache where no backend has one."""
    if not case.int8:
        return
    if case.device != "cpu":
        raise InvalidRequest("kv_cache_dtype int8 is for CPUs alone", param="kv_cache_dtype")
    if case.latent:
        raise InvalidRequest(
            "kv_cache_dtype int8 is for keys and values; this model caches latents: auto or fp8",
            param="kv_cache_dtype",
        )
