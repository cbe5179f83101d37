"""Element types that the C kernels know."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in cpu/vec.h
