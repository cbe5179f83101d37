"""Tensors in shared memory that outlives the process: written once, sealed, then only mapped.

Layout: tensors at multiples of 64 bytes, the kernels' code, an index of all that as JSON, its
length in 8 bytes. The seal is the commit; memory that was left unsealed holds nothing.
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

from surestep_worker.host import shared_memory as memory

from .held_weights import StaleWeights

_ALIGNMENT = 64  # bytes: a cache line, and the longest vector
_MAPPED = 256 << 20  # bytes of address space mapped ahead, while the size is unknown
_LENGTH_BYTES = 8


class Record(NamedTuple):
    """Tensors and facts under one name."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]  # for JSON


class _Mapping(NamedTuple):
    """A part of the memory, read-only."""

    begin: int
    data: Tensor  # bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class WeightStore:
    """Every tensor it returns is mapped read-only: a stray write ends the process at once.

    While it is being filled it is mapped in pieces, each tensor whole in one piece.
    """

    def __init__(self, fd: int) -> None:
        """Open the content of memfd `fd`, or begin to fill it if it is not sealed.

        The store owns the descriptor, and closes it once it is sealed. Raises StaleWeights if the
        sealed content is not a store.
        """
        self._fd = fd
        self.sealed = memory.is_sealed(fd)
        self._mappings: list[_Mapping] = []
        self._end = 0
        self._index: dict[str, Any] = {}  # as in JSON
        self.facts: Mapping[str, Any] = {}
        self.kernels = b""  # code that the weights are laid out for; empty = none
        if self.sealed:
            self._map(0, os.fstat(fd).st_size)
            self._read_index()
            os.close(fd)

    @classmethod
    def private(cls) -> WeightStore:
        """Return a store that ends with the process."""
        return cls(memory.create("surestep-weights"))

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def names(self) -> set[str]:
        """Return the names of all records."""
        return set(self._index)

    def put(self, name: str, record: Record) -> None:
        """Write a record. A tensor that was read from this store is not written twice."""
        assert not self.sealed
        assert name not in self._index, f"{name} is written twice"
        places = {part: self._write(tensor) for part, tensor in record.tensors.items()}
        self._index[name] = {"tensors": places, "facts": dict(record.facts)}

    def get(self, name: str) -> Record:
        """Return a record, mapped."""
        entry = self._index[name]
        tensors = {part: self._tensor(*place) for part, place in entry["tensors"].items()}
        return Record(tensors, entry["facts"])

    def seal(self, facts: Mapping[str, Any], kernels: bytes = b"") -> None:
        """Write the index of the complete store, and make it immutable."""
        self._append(kernels)
        index = {"records": self._index, "facts": facts, "kernels": len(kernels)}
        text = json.dumps(index).encode()
        self._append(text)
        self._append(len(text).to_bytes(_LENGTH_BYTES, "little"))
        os.ftruncate(self._fd, self._end)
        memory.seal(self._fd)
        os.close(self._fd)
        self.sealed, self.facts, self.kernels = True, facts, kernels

    def _read_index(self) -> None:
        view = self._mappings[0].data.numpy()
        end = len(view) - _LENGTH_BYTES
        begin = end - int.from_bytes(view[end:].tobytes(), "little")
        try:
            index = json.loads(view[begin:end].tobytes())
            self._index, self.facts = index["records"], index["facts"]
            self.kernels = view[begin - index["kernels"] : begin].tobytes()
        except (ValueError, KeyError, TypeError) as error:
            raise StaleWeights("the weights in memory have no index") from error

    def _write(self, tensor: Tensor) -> tuple[int, str, list[int]]:
        """Write a tensor; return its offset, type and shape."""
        kind = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        offset = self._offset_of(tensor)
        if offset is None:
            offset = self._end = self._room(tensor.nbytes)
            if tensor.numel():
                data = tensor.contiguous().flatten().view(torch.uint8)
                self._append(memoryview(data.numpy()))  # type: ignore[arg-type]  # numpy's stubs
        return offset, *kind

    def _offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor that is in the store already, else None."""
        for mapping in self._mappings if tensor.is_contiguous() else ():
            offset = mapping.begin + tensor.data_ptr() - mapping.data.data_ptr()
            if mapping.begin <= offset < min(mapping.end, self._end):
                return offset
        return None

    def _room(self, nbytes: int) -> int:
        """Return an offset for a tensor of this size at which it can be mapped as a whole."""
        at = self._end + -self._end % _ALIGNMENT
        if not self._mappings or at + nbytes > self._mappings[-1].end:
            at += -at % mmap.ALLOCATIONGRANULARITY
            length = max(nbytes, _MAPPED)
            os.ftruncate(self._fd, at + length)
            self._map(at, length)
        return at

    def _append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:  # one call writes at most 2 GiB
            written = os.pwrite(self._fd, rest, self._end)
            self._end, rest = self._end + written, rest[written:]

    def _tensor(self, offset: int, dtype_name: str, shape: list[int]) -> Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        mapping = next(m for m in self._mappings if m.begin <= offset and end <= m.end)
        return mapping.data[offset - mapping.begin : end - mapping.begin].view(dtype).view(shape)

    def _map(self, begin: int, length: int) -> None:
        # Through a read-only descriptor: a writable one would prevent the seal.
        reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(reader, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
        finally:
            os.close(reader)
        mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump of a rank need not hold the model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # as intended
            self._mappings.append(_Mapping(begin, torch.frombuffer(mapped, dtype=torch.uint8)))
