"""What a case of compile_launchers.py is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

META = "meta"
BF16, FP32 = torch.bfloat16, torch.float32


class Launch(NamedTuple):
    """Of an op; it may launch several kernels."""

    op: str
    name: str
    run: Callable[[], object]
