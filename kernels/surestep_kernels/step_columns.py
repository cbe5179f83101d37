"""The columns of a step: arrays on the host, which fills them in, tensors on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import TypeVar

HostColumn = npt.NDArray[np.int32 | np.float32]

# What the named tuples of a step hold. Kernels see tensors: `StepRows` is StepRows[Tensor].
Column = TypeVar("Column", default=Tensor, covariant=True)
