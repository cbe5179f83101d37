"""Modules of transformers that ours replace: norms and embeddings of positions."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from surestep_kernels import KernelSet
from torch import Tensor, nn

from .attention import Pass

_CHUNK = 4096  # positions of a rotary table that are computed at once
_SAMPLES = 8  # rows on which norms are compared
_ALIKE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}  # relative: of rounding in another place


class TableRotary(nn.Module):
    """Rotary embeddings of a module, for every position of the longest sequence.

    A module may choose other frequencies for sequences beyond a length. Sequences of one server
    all have those of the longest, since what is cached of one must stay as it is.
    """

    def __init__(self, module: Any, length: int, like: Tensor) -> None:
        super().__init__()
        self._module, self._length, self._like = module, length, like
        self._tables: dict[Any, Any] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for positions i64[1, T]; of text, if each of several axes
        has some."""
        key = (*args, *kwargs.items())
        if key not in self._tables:
            self._tables[key] = self._table(args, kwargs)
        at = position_ids.reshape(-1, position_ids.shape[-1])[0]
        return _map(lambda table: table[at][None], self._tables[key])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def _table(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._like.device
        last, parts = torch.tensor([self._length - 1], device=device), []
        for begin in range(0, self._length, _CHUNK):
            end = min(begin + _CHUNK, self._length)
            positions = torch.cat((torch.arange(begin, end, device=device), last))
            made = self._module(self._like, positions[None], *args, **kwargs)
            parts.append(_map(lambda x: x[0, :-1], made))
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class StepPositions(nn.Module):
    """Embeddings of positions in a decoder that counts them itself, as those of Bart do: of the
    tokens of a step instead."""

    def __init__(self, module: Any, now: Pass) -> None:
        super().__init__()
        self._module, self._now = module, now

    def forward(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings of the tokens' positions."""
        return self._module(ids, position_ids=self._now.positions)


def replace_counted_positions(decoder: nn.Module, now: Pass) -> None:
    """Tell a decoder that is not told positions where the tokens of a step are."""
    if "position_ids" in signature(decoder.forward).parameters:
        return
    for parent in list(decoder.modules()):
        for name, module in list(parent._modules.items()):
            told = signature(module.forward).parameters if module is not None else ()
            if "position_ids" in told and "cache_length" in told:
                parent._modules[name] = StepPositions(module, now)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return tuple(map(function, value))


class OwnNorm(nn.Module):
    """Our op in the place of a norm that gives the same."""

    def __init__(self, kernels: KernelSet, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._op, self.factors, self._eps = kernels.rms_norm, weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., H], normalised."""
        rows = x.reshape(-1, x.shape[-1])
        return self._op(rows, self.factors, self._eps).view(x.shape)


def own_norm(module: Any, kernels: KernelSet, dtype: torch.dtype) -> OwnNorm | None:
    """Return a module that computes the same by our op; None: it is no such norm."""
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None
    )
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or len(weight) % 8:
        return None
    x = torch.randn((_SAMPLES, len(weight)), generator=torch.Generator().manual_seed(0)).to(
        weight.device, dtype
    )
    wanted = module(x)
    for factors in (weight.float(), 1.0 + weight.float()):
        norm = OwnNorm(kernels, factors.contiguous(), eps)
        if torch.allclose(norm(x), wanted, rtol=_ALIKE[dtype], atol=_ALIKE[dtype]):
            return norm
    return None


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module makes rotary embeddings."""
    return "RotaryEmbedding" in type(module).__name__


def settle_rotary(model: nn.Module) -> None:
    """Have rotary embeddings of the type `dynamic` look at no length: up to the positions of the
    model, which are the most that are served, their frequencies are the usual ones."""
    for module in filter(is_rotary, model.modules()):
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            settled: Any = {layers: _settled(it) for layers, it in kind.items()}
        else:
            settled = _settled(kind)
        if kind is not None:
            vars(module)["rope_type"] = settled


def _settled(kind: str | None) -> str | None:
    return "default" if kind == "dynamic" else kind


def replace_modules(model: Any, length: int, kernels: KernelSet, like: Tensor) -> None:
    """Put ours in the place of norms and rotary embeddings; `like` [1] is of the model's type and
    device."""
    for parent in list(model.modules()):
        for name, module in list(parent._modules.items()):
            if module is None:
                continue
            kind = type(module).__name__
            own: nn.Module | None = None
            if "RMSNorm" in kind:
                own = own_norm(module, kernels, like.dtype)
            elif is_rotary(module):
                own = TableRotary(module, length, like)
            if own is not None:
                parent._modules[name] = own
