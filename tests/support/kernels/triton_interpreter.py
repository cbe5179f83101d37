"""What Triton's interpreter (3.9) does otherwise than a GPU, put right for the tests.

It truncates where the hardware rounds to nearest even, takes subnormal numbers of bfloat16 for
zeros, and its tl.dot multiplies the bit patterns of bfloat16 and FP8 as if they were numbers.

It also goes through all members of the language at every call of a device function, to exchange
those that it has not exchanged yet: a third of its time, and in vain after the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_FP8_MAX = 448.0  # beyond it the hardware's conversion saturates
_WIDENED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}  # kept as their bits


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test."""
    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    monkeypatch.setattr(interpreter, "_convert_float", _rounding(convert))
    monkeypatch.setattr(builder, "create_dot", _widening(builder.create_dot))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _numpy_type)
    patch_once(monkeypatch)


_find_type = interpreter._get_np_dtype  # which makes a table of all types whenever it is asked
_scalar_type = functools.cache(_find_type)


def _numpy_type(of: Any) -> Any:
    return _scalar_type(of) if type(of) is tl.dtype else _find_type(of)


def patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the language for a launch, but not again at each call of a device function in it."""
    patch = interpreter._patch_lang

    def patched(fn: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in _languages_of(fn)):
            return patch(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    monkeypatch.setattr(interpreter, "_patch_lang", patched)


@functools.cache
def _languages_of(fn: Any) -> list[ModuleType]:
    """Modules of the language that a kernel, or a function of Triton's library, refers to."""
    seen = [value for value in fn.__globals__.values() if isinstance(value, ModuleType)]
    return [module for module in (tl, tl.core) if module in seen]


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(data.copy()).bfloat16()
            return values.view(torch.uint16).numpy()
        if source in _WIDENED and target == tl.float32:
            return torch.from_numpy(data.copy()).view(_WIDENED[source]).float().numpy()
        if source == tl.float32 and target == tl.float8e4nv:
            values = torch.from_numpy(data.copy()).clamp(-_FP8_MAX, _FP8_MAX)
            return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(data, source, target, mode)

    return rounded


def _widening(dot: Callable[..., Any]) -> Callable[..., Any]:
    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar in _WIDENED:
            a, b = (_widen(factor, _WIDENED[a.dtype.scalar]) for factor in (a, b))
        return dot(self, a, b, *rest)

    return widened


def _widen(factor: Any, dtype: torch.dtype) -> Any:
    values = torch.from_numpy(factor.data.copy()).view(dtype).float().numpy()
    return interpreter.TensorHandle(values, tl.float32)
