"""Find non-finite weights, for a model whose output is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from .safetensors_header import Entry, shown
from .tensors import Checkpoint

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_CHUNK = 1 << 24  # elements checked at once
_MAX_NAMED = 3  # tensors to name


def non_finite_tensors(entries: Mapping[str, Entry], progress: Callable[[], None]) -> list[str]:
    """Return file, name and count of NaN and infinities of the first tensors that have any.

    `progress` is called repeatedly. A checkpoint that has been deleted meanwhile has none.
    """
    found: list[str] = []
    with contextlib.ExitStack() as stack, contextlib.suppress(InvalidRequest):
        checkpoint = Checkpoint(entries, stack)
        for name, entry in entries.items():
            if entry.dtype in _FLOATS and len(found) < _MAX_NAMED:
                bad = sum(_count(part) for part in _chunks(checkpoint, name, entry, progress))
                if bad:
                    message = f"{bad} elements of {shown(name)} are NaN or infinite"
                    found.append(f"{entry.file}: {message}")
    return found


def _chunks(
    checkpoint: Checkpoint, name: str, entry: Entry, progress: Callable[[], None]
) -> Iterator[Tensor]:
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, _CHUNK * rows // max(entry.nbytes, 1))
    for begin in range(0, rows, step):
        progress()
        yield checkpoint.read(name, (slice(begin, begin + step),) if entry.shape else ())


def _count(part: Tensor) -> int:
    return int((~torch.isfinite(part.float())).sum())
