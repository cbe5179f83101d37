"""Tensors in shared memory that outlives the process: written once, sealed, then only mapped.

Layout: tensors at multiples of 64 bytes, an index of them as JSON, its length in 8 bytes. The seal
is the commit; memory that was left unsealed holds nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surestep_worker import memory

_ALIGNMENT = 64  # bytes: a cache line, and the longest vector
_RESERVED = 1 << 40  # bytes of addresses while the size is not known; memory is what is written
_LENGTH_BYTES = 8


class Record(NamedTuple):
    """Tensors and numbers under one name."""

    tensors: dict[str, Tensor]
    facts: dict[str, int]


class WeightStore:
    """Every tensor it returns is mapped read-only: a stray write ends the process at once."""

    def __init__(self, fd: int) -> None:
        """Open what lies in memfd `fd`, or begin to fill it when it is not sealed.

        The descriptor is the store's, to be closed when it is sealed.
        """
        self._fd = fd
        self.sealed = memory.is_sealed(fd)
        if not self.sealed:
            os.ftruncate(fd, _RESERVED)
        self._memory = _map(fd)
        self._end = 0
        self._index: dict[str, Any] = {}  # as JSON has it
        self.facts: Mapping[str, Any] = {}
        if self.sealed:
            self._read_index()
            os.close(fd)

    @classmethod
    def private(cls) -> WeightStore:
        """One that ends with the process."""
        return cls(memory.create("surestep-weights"))

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def names(self) -> set[str]:
        """Of all records."""
        return set(self._index)

    def put(self, name: str, record: Record) -> None:
        """Write a record. A tensor that came out of this store is not written twice."""
        assert not self.sealed
        assert name not in self._index, f"{name} is written twice"
        places = {part: self._write(tensor) for part, tensor in record.tensors.items()}
        self._index[name] = {"tensors": places, "facts": dict(record.facts)}

    def get(self, name: str) -> Record:
        """The record as it lies there."""
        entry = self._index[name]
        tensors = {part: self._tensor(*place) for part, place in entry["tensors"].items()}
        return Record(tensors, entry["facts"])

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Everything is there: write the index and make it final."""
        index = json.dumps({"records": self._index, "facts": facts}).encode()
        self._append(index)
        self._append(len(index).to_bytes(_LENGTH_BYTES, "little"))
        os.ftruncate(self._fd, self._end)
        memory.seal(self._fd)
        os.close(self._fd)
        self.sealed, self.facts = True, facts

    def _read_index(self) -> None:
        view = self._memory.numpy()
        end = len(view) - _LENGTH_BYTES
        length = int.from_bytes(view[end:].tobytes(), "little")
        index = json.loads(view[end - length : end].tobytes())
        self._index, self.facts = index["records"], index["facts"]

    def _write(self, tensor: Tensor) -> tuple[int, str, list[int]]:
        """Where the tensor lies, of which type and shape."""
        kind = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        offset = tensor.data_ptr() - self._memory.data_ptr()
        if not (0 <= offset < self._end and tensor.is_contiguous()):
            self._end += -self._end % _ALIGNMENT
            offset = self._end
            if tensor.numel():
                data = tensor.contiguous().flatten().view(torch.uint8)
                self._append(memoryview(data.numpy()))  # type: ignore[arg-type]  # numpy's stubs
        return offset, *kind

    def _append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:  # one call writes 2 GiB at most
            written = os.pwrite(self._fd, rest, self._end)
            self._end, rest = self._end + written, rest[written:]

    def _tensor(self, offset: int, dtype_name: str, shape: list[int]) -> Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + nbytes].view(dtype).view(shape)


def _map(fd: int) -> Tensor:
    """The whole memory as bytes, read-only."""
    # Through a descriptor that cannot write: with one that can, the mapping would prevent the seal.
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(reader, os.fstat(reader).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(reader)
    mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump of a rank need not hold the model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # as intended
        return torch.frombuffer(mapped, dtype=torch.uint8)
