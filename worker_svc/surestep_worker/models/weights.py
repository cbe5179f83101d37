"""Reads safetensors checkpoints strictly: nothing missing, nothing left over, nothing twice.

A model declares a table: parameter of this rank -> the checkpoint tensors (or slices of them) that
fill it from the top. The table is compared with the headers of all files before any weight is read,
so a wrong checkpoint fails at once and with every name. Parameters are then taken one at a time, to
be packed before the next is read.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from surestep_common.errors import InvalidRequest
from torch import Tensor

from .config import read_json

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read in all

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_NAMES_SHOWN = 6


class Source(NamedTuple):
    """One checkpoint tensor, and the slice of its dimension `dim` that this rank keeps.

    With an `item` it is the part of the tensor at that place of its first dimension, which `dim`
    then does not count.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    keep: slice
    dim: int = 0
    item: int | None = None

    @property
    def numel(self) -> int:
        """Elements kept."""
        shape = self.shape if self.item is None else self.shape[1:]
        kept = self.keep.stop - self.keep.start
        return math.prod(shape) // shape[self.dim] * int(kept)

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Where it lies in the tensor."""
        first = () if self.item is None else (self.item,)
        return (*first, *(slice(None),) * self.dim, self.keep)


class Parameter(NamedTuple):
    """One tensor of this rank: its sources stacked along dimension 0; rows without source are 0."""

    shape: tuple[int, ...]
    sources: tuple[Source, ...]


Table = Mapping[str, Parameter]


class Weights:
    """The parameters of a checked checkpoint, each to be taken exactly once.

    Use as a context manager; leaving it without an error asserts that all were taken.
    """

    def __init__(
        self,
        path: Path,
        table: Table,
        *,
        ignore: Iterable[str] = (),
        dtype: torch.dtype,
        device: str,
        progress: Progress | None = None,
    ) -> None:
        """Open the checkpoint in folder `path` and compare it with `table`.

        `ignore` holds regular expressions of whole names of tensors that are not wanted. Raises
        InvalidRequest naming missing, unexpected, repeated, misshapen and quantized tensors.
        """
        self._left = dict(table)
        self._dtype = dtype
        self._device = device
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self.bytes_taken = 0  # of the parameters as this rank keeps them
        with contextlib.ExitStack() as stack:
            self._files = _open_all(path, stack)
            sources = [source for parameter in table.values() for source in parameter.sources]
            _check(self._files, sources, ignore)
            self._total = sum(self._bytes(source) for source in sources)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        assert kind or not self._left, f"parameters never taken: {sorted(self._left)}"

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one parameter, on this reader's device and in its dtype unless another is given."""
        shape, sources = self._left.pop(name)
        parameter = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        row = 0
        for source in sources:
            if source.numel > 0:
                part = self._read(source)
                parameter[row : row + len(part)] = part
                row += len(part)
            self._done += self._bytes(source)
            self._progress(self._done, self._total)
        parameter[row:] = 0
        self.bytes_taken += parameter.nbytes
        return parameter

    def _read(self, source: Source) -> Tensor:
        part: Tensor = self._files[source.name].get_slice(source.name)[source.place]
        return part

    def _bytes(self, source: Source) -> int:
        return (
            source.numel * _ITEM_BYTES[self._files[source.name].get_slice(source.name).get_dtype()]
        )


def checkpoint_names(path: Path) -> frozenset[str]:
    """Names of all tensors of the checkpoint in folder `path`."""
    with contextlib.ExitStack() as stack:
        return frozenset(_open_all(path, stack))


def _open_all(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that holds it."""
    holders: dict[str, Any] = {}
    repeated: list[str] = []
    for filename in _filenames(path):
        try:
            file = stack.enter_context(safe_open(path / filename, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"cannot read {path / filename}: {error}", param="model"
            ) from error
        repeated += holders.keys() & file.keys()
        holders.update(dict.fromkeys(file.keys(), file))
    if repeated:
        raise InvalidRequest(f"in more than one file: {_some(repeated)}", param="model")
    return holders


def _filenames(path: Path) -> list[str]:
    """Of a single-file checkpoint, or of one with an index."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    if (path / "model.safetensors").exists():
        return ["model.safetensors"]
    raise InvalidRequest(f"no model.safetensors and no {index.name} in {path}", param="model")


def _check(files: Mapping[str, Any], sources: list[Source], ignore: Iterable[str]) -> None:
    expected = {source.name: source for source in sources}
    places = [f"{source.name}{source.place}" for source in sources if source.numel]
    assert len(set(places)) == len(places), "a slice fills two places"
    ignored = re.compile("|".join(ignore) or "(?!)")
    common = sorted(expected.keys() & files.keys())
    headers = {name: files[name].get_slice(name) for name in common}
    problems = {
        "missing": expected.keys() - files.keys(),
        "unexpected": [n for n in files.keys() - expected.keys() if not ignored.fullmatch(n)],
        "of another shape": [
            f"{name} {headers[name].get_shape()} instead of {list(expected[name].shape)}"
            for name in common
            if tuple(headers[name].get_shape()) != expected[name].shape
        ],
        "neither float32, bfloat16 nor float16": [
            name for name in common if headers[name].get_dtype() not in _ITEM_BYTES
        ],
    }
    found = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise InvalidRequest(f"checkpoint tensors {'; '.join(found)}", param="model")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
