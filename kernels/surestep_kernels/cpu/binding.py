"""ctypes bindings of the C kernels, and the element types they support."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in cpu/vec.h


def bind(library: CDLL, op: str, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
    """Return the C function of an op, by the ctypes of its arguments and result (None = void)."""
    function = getattr(library, f"surestep_{op}")
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]
