"""Quantised checkpoints that are damaged at random, in a way that a seed tells."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from support.checkpoints.compressed import PRESETS
from torch import Tensor

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 8, 16, 32, 64, 128, -1, 7.5, "", "x", [], {}, [16, 16]),
    *("tensor", "channel", "group", "block", "tensor_group", "int", "float", "gptq_v2", "static"),
    *(form for form in set(PRESETS.values())),
)


def change_config(quantization: dict[str, Any], rng: random.Random) -> str:
    """Give a value, anywhere in it, another one, or leave it out; say which."""
    places: list[tuple[dict[str, Any], str]] = []

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            places.append((values, key))
            if isinstance(value, dict):
                walk(value)

    walk(quantization)
    values, key = rng.choice(places)
    if rng.random() < 0.3:
        return f"{key} missing: {values.pop(key)}"
    before, values[key] = values[key], rng.choice(VALUES)
    return f"{key}: {before} -> {values[key]}"


def twice(tensor: Tensor) -> Tensor:
    words = tensor.reshape(-1, *tensor.shape[1:]).view(torch.uint8)
    return torch.cat((words, words)).view(tensor.dtype)


TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "twice": twice,
    "half": lambda tensor: tensor[: len(tensor) // 2] if tensor.dim() else tensor[None, None],
    "16 bits": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.short(),
    "flat": lambda tensor: tensor.flatten(),
}


def change_tensors(tensors: dict[str, Tensor], rng: random.Random, part: str = "_proj") -> str:
    """Give a tensor whose name has a part another shape or type, or leave it out; say which."""
    name = rng.choice(sorted(name for name in tensors if part in name))
    how = rng.choice(sorted(TENSOR_CHANGES))
    changed = TENSOR_CHANGES[how](tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.clone()
    return f"{name} {how}"
