"""A GPU's memory that is counted: real tensors of the CPU, as torch makes and drops them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from surestep_worker.startup.gpu_memory import MemorySnapshot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedCard(TorchDispatchMode):
    """Counts storage that is made while it is entered. As torch's allocator on a GPU does, it keeps
    what was freed until somebody has it release that; others hold what `others` says."""

    def __init__(self, total: int, others: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total, self.others = total, others
        self._sizes: dict[int, int] = {}  # of live storage, by address
        self.reserved = 0  # high water since the last release

    @property
    def live(self) -> int:
        """Bytes of tensors that are in use."""
        return sum(self._sizes.values())

    def snapshot(self) -> MemorySnapshot:
        """See GpuMemory."""
        return MemorySnapshot(self._total - self.others - self.reserved, self._total, self.reserved)

    def release(self) -> None:
        """See GpuMemory."""
        gc.collect()
        self.reserved = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every op of torch: what of its results is new."""
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _counts(leaf) and (key := _key(leaf)) not in inputs and key not in self._sizes:
                storage = leaf.untyped_storage()
                self._sizes[key] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, key, None)
        self.reserved = max(self.reserved, self.live)
        return out


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
