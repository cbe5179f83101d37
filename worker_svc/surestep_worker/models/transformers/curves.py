"""Exponentials and their kin, the same wherever in a tensor a number stands.

The loops of torch compute what is left over of whole vectors by other code, whose exponentials
differ in the last bit. So tensors are filled up to whole vectors. Sums, products and roots are
exact in either code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

VECTOR = 64  # elements: what two vectors of bfloat16 hold, the most that a loop takes at once
_NAMES = (
    "sigmoid silu gelu tanh exp exp2 expm1 log log1p softplus mish elu selu celu erf logsigmoid pow"
    " sin cos"
)
_CURVES = frozenset(
    getattr(place, name)
    for place in (torch, Tensor, functional)
    for name in _NAMES.split()
    if hasattr(place, name)
)


class Aligned(nn.Module):
    """An activation, of tensors that are filled up."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.inner = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x, whatever its shape."""
        return x.clone() if x.is_meta else aligned(self.inner, x)


def aligned(curve: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an elementwise function of x."""
    left = x.numel() % VECTOR
    if not left and x.is_contiguous():
        return curve(x, *args, **kwargs)
    made = curve(functional.pad(x.reshape(-1), (0, -x.numel() % VECTOR)), *args, **kwargs)
    return made[: x.numel()].view(x.shape)


class Recorded(TorchFunctionMode):
    """Watch over curves that a pass computes outside of activations and of some modules."""

    def __init__(self, apart: Iterable[nn.Module]) -> None:
        super().__init__()
        self.any, self._depth = False, 0
        for module in apart:
            module.register_forward_pre_hook(lambda *_: self._step(1))
            module.register_forward_hook(lambda *_: self._step(-1))

    def _step(self, depth: int) -> None:
        self._depth += depth

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.any |= not self._depth and _is_curve(func, args)
        return func(*args, **(kwargs or {}))


def _is_curve(func: Any, args: Sequence[Any]) -> bool:
    square = len(args) == 2 and type(args[1]) is int and args[1] == 2
    return func in _CURVES and isinstance(args[0], Tensor) and not square


class WholeVectors(TorchFunctionMode):
    """Fills up what curves are computed of."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_curve(func, args):
            return aligned(func, args[0], *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def align_activations(model: nn.Module) -> None:
    """Put aligned activations in the place of those of torch and transformers."""
    homes = "transformers.activations", "torch.nn.modules.activation"
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module).__module__.startswith(homes) and not list(module.parameters()):
                setattr(parent, name, Aligned(module))
