"""Modules of transformers that ours replace: norms, embeddings of positions, and rotations."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from surestep_kernels import KernelSet
from torch import Tensor, nn

from .attention import BACKEND, Pass

_CHUNK = 4096  # positions of a rotary table that are computed at once
_SAMPLES = 8  # rows on which norms and rotations are compared
_ROTATED = 8  # elements of a head of theirs
_ALIKE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}  # relative: of rounding in another place
_TURNS = "surestep_turns"  # attribute of cosines: Turns of the same tokens


class Turns(NamedTuple):
    """Cosines and sines of the tokens of a step, as our op reads them."""

    cos_sin: Tensor  # f32[T, D']: D'/2 cosines, then D'/2 sines
    rows: Tensor  # i64[T]: 0, 1, ...


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
        made = _map(lambda table: table[at][None], self._tables[key])
        if isinstance(made, tuple) and len(made) == 2 and made[0].shape[-1] % 2 == 0:
            setattr(made[0], _TURNS, _turns(*made))
        return made

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


def _turns(cos: Tensor, sin: Tensor) -> Turns:
    """Return a step's cosines and sines [1, T, D'] as our op reads them."""
    halves = [x[0, :, : cos.shape[-1] // 2] for x in (cos, sin)]
    return Turns(torch.cat(halves, dim=1).float(), torch.arange(cos.shape[1], device=cos.device))


class OwnRotation:
    """Our op in the place of a function that rotates queries and keys and gives the same.

    Theirs is called where no cosines of a step are at hand, and while attention is theirs: a
    rehearsal compares the two.
    """

    def __init__(self, theirs: Callable[..., Any], kernels: KernelSet, config: Any) -> None:
        self._theirs, self._op, self._config = theirs, kernels.rotary, config

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return queries [1, Hq, T, D] and keys [1, Hkv, T, D], rotated."""
        turns: Turns | None = getattr(cos, _TURNS, None)
        if turns is None or self._config._attn_implementation != BACKEND:
            made: tuple[Tensor, Tensor] = self._theirs(q, k, cos, *args, **kwargs)
            return made
        return self.rotate(q, k, turns)

    def rotate(self, q: Tensor, k: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Return copies of q and k [1, H, T, D], rotated by our op."""
        q, k = (x[0].transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (q, k))
        self._op(q, k, turns.rows, turns.cos_sin)
        return q.transpose(0, 1)[None], k.transpose(0, 1)[None]

    def gives_the_same(self, like: Tensor) -> bool:
        """Compare the two on a few tokens, with heads that are rotated whole and in part."""
        angles = torch.linspace(0.1, 3.0, 4 * _SAMPLES, device=like.device).view(_SAMPLES, 4)
        cos, sin = (x.repeat(1, 2).to(like.dtype)[None] for x in (angles.cos(), angles.sin()))
        draws, near = torch.Generator().manual_seed(0), _ALIKE[like.dtype]
        for head_dim in (_ROTATED, _ROTATED + 4):
            shapes = ((1, heads, _SAMPLES, head_dim) for heads in (4, 2))
            q, k = (torch.randn(shape, generator=draws).to(like) for shape in shapes)
            try:
                wanted = self._theirs(q, k, cos, sin)
            except (TypeError, RuntimeError):  # it rotates something else, or no part of a head
                return head_dim > _ROTATED
            pairs = zip(self.rotate(q, k, _turns(cos, sin)), wanted, strict=True)
            if not all(torch.allclose(x, y, rtol=near, atol=4 * near) for x, y in pairs):
                return False
        return True


def replace_rotations(model: Any, kernels: KernelSet, like: Tensor) -> None:
    """Have modules that attend rotate by our op, where that gives the same.

    Each gets a forward function of its own. Classes and functions of transformers stay as they are.
    """
    chosen = dict[Callable[..., Any], OwnRotation | None]()
    for module in model.modules():
        forward = unwrap(type(module).forward)
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        names = (it for it in forward.__code__.co_names if it.startswith("apply_rotary"))
        theirs = forward.__globals__.get(name := next(names, ""))
        if theirs is None:
            continue
        if theirs not in chosen:
            own = OwnRotation(theirs, kernels, model.config)
            chosen[theirs] = own if own.gives_the_same(like) else None
        if (rotation := chosen[theirs]) is not None:
            module.forward = MethodType(_finding(forward, name, rotation), module)


def _finding(function: FunctionType, name: str, value: object) -> FunctionType:
    """Return the same function, which finds this value by a global name."""
    found = {**function.__globals__, name: value}
    defaults, closure = function.__defaults__, function.__closure__
    made = FunctionType(function.__code__, found, function.__name__, defaults, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


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
