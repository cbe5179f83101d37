"""Flash attention by other packages: flash-attn (2, 3 and 4), and torch's own interface to it.

Only adapters: our arguments under their names. The packages need a CUDA device, and none of these
adapters has run on one; tests/kernels calls them with stand-ins that have the documented
signatures.

How these packages split the KV positions, and which tiles they choose, depends on the batch. So
none of them is `invariant`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from surestep_kernels.store_kv import LayerCache

from .case import AttentionBackend, AttentionCase, refuse
from .reference import AttentionRows

_MAX_HEAD_DIM, _HEAD_MULTIPLE = 256, 8
_HALF = (torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """The arguments of one call of paged_attention."""

    q: Tensor
    cache: LayerCache  # [blocks, block_size, Hkv, D], the order of dimensions that all of them take
    rows: AttentionRows
    scale: float
    window: int
    sinks: Tensor | None
    softcap: float

    @property
    def lengths(self) -> Tensor:
        """Return the KV positions of each row i32[R]."""
        return self.rows.start + self.rows.cu_rows[1:] - self.rows.cu_rows[:-1]

    @property
    def tables(self) -> Tensor:
        """Return the pages i32[R, B] of each row: these packages have no slots."""
        return self.rows.block_tables[self.rows.slots]

    @property
    def max_length(self) -> int:
        """Return an upper bound of the KV positions of a row."""
        return self.rows.block_tables.shape[1] * self.cache.k.shape[1]

    def window_or(self, unlimited: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        """Return the numbers of positions seen before and after a token's own."""
        return (self.window - 1, 0) if self.window else unlimited


def call_fa2(module: Any, call: Call) -> Tensor:
    """Call `flash_attn_varlen_func`, which takes the rows' lengths from cu_seqlens_k."""
    out: Tensor = module.flash_attn_varlen_func(
        call.q,
        call.cache.k,
        call.cache.v,
        cu_seqlens_q=call.rows.cu_rows,
        cu_seqlens_k=functional.pad(call.lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=call.rows.max_tokens,
        max_seqlen_k=call.max_length,
        softmax_scale=call.scale,
        causal=True,
        window_size=call.window_or((-1, -1)),
        softcap=call.softcap,
        block_table=call.tables,
    )
    return out


def call_fa3(module: Any, call: Call) -> Tensor:
    """Call `flash_attn_with_kvcache`, whose queries are ragged by cu_seqlens_q."""
    out: Tensor = module.flash_attn_with_kvcache(
        call.q,
        call.cache.k,
        call.cache.v,
        cache_seqlens=call.lengths,
        page_table=call.tables,
        cu_seqlens_q=call.rows.cu_rows,
        max_seqlen_q=call.rows.max_tokens,
        softmax_scale=call.scale,
        causal=True,
        window_size=call.window_or((-1, -1)),
        softcap=call.softcap,
    )
    return out


def call_fa4(module: Any, call: Call) -> Tensor:
    """Call `flash_attn_varlen_func` of flash_attn.cute, which chooses the splits (num_splits 0)."""
    out: Tensor
    out, _ = module.flash_attn_varlen_func(
        call.q,
        call.cache.k,
        call.cache.v,
        cu_seqlens_q=call.rows.cu_rows,
        max_seqlen_q=call.rows.max_tokens,
        max_seqlen_k=call.max_length,
        seqused_k=call.lengths,
        page_table=call.tables,
        softmax_scale=call.scale,
        causal=True,
        window_size=call.window_or((None, None)),
        learnable_sink=None if call.sinks is None else call.sinks.to(torch.bfloat16),
        softcap=call.softcap or None,
        num_splits=0,
    )
    return out


def call_torch(module: Any, call: Call) -> Tensor:
    """Call `varlen_attn` of torch.nn.attention.varlen; (-1, 0) is causal without a window."""
    out: Tensor = module.varlen_attn(
        call.q,
        call.cache.k,
        call.cache.v,
        call.rows.cu_rows,
        None,
        call.rows.max_tokens,
        call.max_length,
        scale=call.scale,
        window_size=call.window_or((-1, 0)),
        enable_gqa=True,
        seqused_k=call.lengths,
        block_table=call.tables,
    )
    return out


class Package(NamedTuple):
    """Generation of flash-attn."""

    title: str
    module: str
    capabilities: range  # where it attends to pages
    page_multiple: int  # of positions
    sinks: bool
    call: Callable[[Any, Call], Tensor]  # the imported module, and the arguments


FA4 = Package("FA4", "flash_attn.cute.interface", range(100, 110), 1, True, call_fa4)
FA3 = Package("FA3", "flash_attn_interface", range(90, 100), 1, False, call_fa3)
FA2 = Package("FA2", "flash_attn", range(80, 130), 256, False, call_fa2)


def flash_attn(case: AttentionCase) -> AttentionBackend:
    """Return the newest installed generation that supports the case, or raise InvalidRequest."""
    _check("flash_attn", case)
    reasons = []
    for package in (FA4, FA3, FA2):
        reason = _why_unsupported(package, case)
        if reason is None:
            module = importlib.import_module(package.module)
            return backend(f"flash_attn ({package.title})", partial(package.call, module))
        reasons.append(f"{package.title} {reason}")
    raise refuse("flash_attn", ", ".join(reasons))


def torch_varlen(case: AttentionCase) -> AttentionBackend:
    """Return torch.nn.attention.varlen, whose block table needs FA3 or FA4 activated for it."""
    _check("torch_varlen", case)
    if case.sinks:
        raise refuse("torch_varlen", "it knows no sinks")
    if case.softcap:
        raise refuse("torch_varlen", "it knows no soft cap of scores")
    try:
        from torch.nn.attention import activate_flash_attention_impl, varlen
    except ImportError as error:
        raise refuse("torch_varlen", f"this torch is too old: {error}") from error
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        raise refuse("torch_varlen", "this torch is too old for block tables")
    reasons = []
    for package in (FA4, FA3):
        reason = _why_unsupported(package, case)
        if reason is None:
            activate_flash_attention_impl(package.title)
            return backend(f"torch_varlen ({package.title})", partial(call_torch, varlen))
        reasons.append(f"{package.title} {reason}")
    raise refuse("torch_varlen", ", ".join(reasons))


def _check(name: str, case: AttentionCase) -> None:
    if case.capability == 0:
        raise refuse(name, "it needs a CUDA device")
    if case.invariant:
        raise refuse(name, "a token's bits would depend on its batch")
    if case.dtype not in _HALF or case.cache_dtype not in (None, case.dtype):
        raise refuse(name, "it computes in 16 bits, queries and cache alike")
    if case.head_dim > _MAX_HEAD_DIM or case.head_dim % _HEAD_MULTIPLE:
        raise refuse(name, f"head_dim {case.head_dim} is over 256 or no multiple of 8")


def _why_unsupported(package: Package, case: AttentionCase) -> str | None:
    """Return why a package does not support the case, or None."""
    if not _is_installed(package.module):
        return "is not installed"
    if case.capability not in package.capabilities:
        return f"does not attend to pages on sm_{case.capability}"
    if case.block_size % package.page_multiple:
        return f"needs a block size that is a multiple of {package.page_multiple}"
    return "knows no sinks" if case.sinks and not package.sinks else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def backend(name: str, attend: Callable[[Call], Tensor]) -> AttentionBackend:
    """Return a backend of one of these packages and our own writing of the cache."""
    from surestep_kernels.store_kv.triton import store_kv

    def paged_attention(
        q: Tensor,
        cache: LayerCache,
        rows: AttentionRows,
        scale: float,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        if window and rows.wider is not None:
            raise refuse(name, "it knows no windows that look ahead")
        return attend(Call(q, cache, rows, scale, window, sinks, softcap))

    def store(k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
        store_kv(k, v, LayerCache(cache.k.transpose(1, 2), cache.v.transpose(1, 2)), kv_slots)

    return AttentionBackend(name, _cache_shape, store, paged_attention)


def _cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Return the shape as kv_cache_shape, but position by position instead of head by head."""
    return (num_blocks, block_size, num_kv_heads, head_dim)
