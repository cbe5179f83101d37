"""Attention of transformers' modules, over the paged cache."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from torch import Tensor, nn
from torch.nn import functional

from surestep_worker.cache.caches import Caches
from surestep_worker.layers.context import StepBatch

from .cuts import Heads

BACKEND = "surestep"  # its name among transformers' implementations
PAGED = "surestep_layers"  # attribute of a module that attends: a PagedLayer for each call

ALIBI_DIMS = 6  # elements behind those of a key: two digits of a position, each three times
ALIBI_POSITIONS = 1 << 16  # which two digits tell
_DIGIT = 256  # positions; the numbers below are exact in bfloat16
_HEAD_UNIT = 8  # elements of a head that a kernel reads at once
_HARMLESS = frozenset(("position_ids", "cache_position"))  # which say nothing besides


class AttentionFacts(NamedTuple):
    """A call of attention in a pass, as a layer asks for it."""

    module: str  # its name
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # positions that a token sees, itself included; 0: all
    softcap: float
    sinks: bool
    alibi: bool  # scores grow with the position, see `alibi`
    reads: int  # number of the call whose keys and values it reads: its own, or an earlier one

    @property
    def head_dim(self) -> int:
        """Elements of a head in the cache, which keys and values share."""
        keys = self.key_dim + ALIBI_DIMS * self.alibi
        return -(-max(keys, self.value_dim) // _HEAD_UNIT) * _HEAD_UNIT


class Calls(NamedTuple):
    """Calls of attention in a pass."""

    names: Mapping[nn.Module, str]
    facts: list[AttentionFacts]
    kept: list[tuple[Tensor, Tensor]]  # keys and values of each

    def reads(self, key: Tensor, value: Tensor, window: int) -> int:
        """Return the first call that had these keys and values, or the number of a new call."""
        for number, (facts, (k, v)) in enumerate(zip(self.facts, self.kept, strict=True)):
            if k is key and v is value and facts.window == window:
                return number
        return len(self.facts)


_RECORDED: ContextVar[Calls | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[list[AttentionFacts]]:
    """Have the calls of a model's modules noted, in the list that this yields."""
    calls = Calls({module: name for name, module in model.named_modules()}, [], [])
    token = _RECORDED.set(calls)
    try:
        yield calls.facts
    finally:
        _RECORDED.reset(token)


class Pass:
    """The forward pass that is under way on a rank."""

    __slots__ = ("_turns", "batch", "caches", "positions")
    batch: StepBatch
    caches: Caches
    positions: Tensor  # i64[T] of its tokens

    def begin(self, batch: StepBatch, caches: Caches) -> None:
        """Take up the next step."""
        self.batch, self.caches, self.positions = batch, caches, batch.positions
        self._turns = Counter[nn.Module]()

    def turn(self, module: nn.Module, layers: Sequence[PagedLayer]) -> PagedLayer:
        """Return the layer of a module's next call."""
        turn = self._turns[module]
        self._turns[module] += 1
        return layers[turn]


class PagedLayer(NamedTuple):
    """Attention of a module's call over the pages of a layer."""

    kernels: KernelSet
    now: Pass
    cache_layer: int
    keeps: bool  # it writes these pages, which are an earlier call's otherwise
    heads: Heads
    head_dim: int
    window: int
    softcap: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> Tensor:
        """Keep keys and values [1, Hkv, T, D]; return [1, T, H, Dv] for queries [1, H, T, D].

        They are the heads of all ranks, or of this one.
        """
        cache, pages = self.now.caches.kv.layer(self.cache_layer, self.now.batch.groups)
        width, whole = v.shape[3], self.heads.are_whole(q.shape[1])
        if slopes is not None:
            if cache.k.dtype is not k.dtype:
                raise InvalidRequest("ALiBi needs kv_cache_dtype auto", param="kv_cache_dtype")
            q, k = with_positions(q, k, slopes / scale, self.now.batch.positions)
        if whole:
            q = self.heads.own(q, dim=1)
            sinks = None if sinks is None else self.heads.own(sinks, dim=0)
        if self.keeps:
            keys, values = (self._by_token(self.heads.kept(x, whole=whole)) for x in (k, v))
            self.kernels.store_kv(keys, values, cache, pages.kv_slots)
        heads, missing = q.shape[1], -q.shape[1] % self.heads.in_cache.size
        if missing:  # without it, padding is a copy
            q = functional.pad(q, (0, 0, 0, 0, 0, missing))
        out = self.kernels.paged_attention(
            self._by_token(q),
            cache,
            pages.rows,
            scale,
            window=self.window,
            sinks=None if sinks is None else sinks.float(),
            softcap=self.softcap,
        )
        out = out[:, :heads, :width]
        return (self.heads.gathered(out) if whole else out)[None]

    def _by_token(self, x: Tensor) -> Tensor:
        """Return [T, H, D] of [1, H, T, D'], filled up with zeros."""
        missing = self.head_dim - x.shape[3]
        if missing:
            x = functional.pad(x, (0, missing))
        return x[0].transpose(0, 1).flatten(1).view(-1, x.shape[1], self.head_dim)


def with_positions(
    q: Tensor, k: Tensor, slopes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries [1, H, T, D] and keys [1, Hkv, T, D], with more elements of each head: their
    scores grow with the position of a key (ALiBi).

    A head's slope times a key's position is added to the score. So a key has its position behind
    its elements, and a query has the slope there. The slope times the query's own position is left
    out: it is the same for all keys, and softmax does not see it.
    `slopes` f32[H], divided by the scale of scores; `positions` i64[T]. A slope is the sum of three
    numbers, since one of bfloat16 is not precise enough.
    """
    digits = torch.stack((positions // _DIGIT, positions % _DIGIT), dim=1).to(k.dtype)
    digits = digits.repeat_interleave(3, dim=1).expand(1, k.shape[1], -1, -1)
    parts, left = [], slopes.float()
    for _ in range(3):
        parts.append(left.to(q.dtype))
        left = left - parts[-1].float()
    part = torch.stack(parts, dim=1)
    factors = torch.cat((part * _DIGIT, part), dim=1)[None, :, None]
    return (
        torch.cat((q, factors.expand(1, -1, q.shape[2], -1)), dim=3),
        torch.cat((k, digits), dim=3),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' implementations do; tokens see what the rows of a step say."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    calls = _RECORDED.get()
    if calls is None:
        layers: Sequence[PagedLayer] = getattr(module, PAGED)
        layer = layers[0].now.turn(module, layers)
        return layer(query, key, value, scale, s_aux, slopes), None
    _refuse(module, attention_mask, kwargs)
    window = sliding_window or 0
    reads = calls.reads(key, value, window)
    calls.kept.append((key, value))
    calls.facts.append(
        AttentionFacts(
            module=calls.names[module],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(scale),
            window=window,
            softcap=softcap or 0.0,
            sinks=s_aux is not None,
            alibi=slopes is not None,
            reads=reads,
        )
    )
    batch, heads, tokens = query.shape[:3]
    return query.new_empty((batch, tokens, heads, value.shape[3])), None


def _refuse(module: nn.Module, mask: Tensor | None, more: dict[str, Any]) -> None:
    """Raise InvalidRequest for attention that is not causal attention over a paged cache."""
    name = type(module).__name__
    if mask is not None:
        raise InvalidRequest(f"{name} makes masks of its own: not served", param="model")
    if more.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
        raise InvalidRequest(f"{name} attends in both directions: not served", param="model")
    unknown = sorted(
        name for name, value in more.items() if name not in _HARMLESS and torch.is_tensor(value)
    )
    if unknown:
        raise InvalidRequest(f"{name} attends with {', '.join(unknown)}: not served", param="model")
