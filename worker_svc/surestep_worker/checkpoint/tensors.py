"""The weight files of a checkpoint: open them, and compare them with what a model expects."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from surestep_common.errors import InvalidRequest
from surestep_common.gguf import is_gguf
from torch import Tensor

from .formats import Stored
from .gguf_parts import read_part
from .model_folder import some
from .safetensors_header import Entry

_ReadPart = Callable[[str, Entry, tuple[int | slice, ...]], Tensor]  # of a file


class Checkpoint:
    """Tensors by name; data is read only for the requested parts."""

    def __init__(self, entries: Mapping[str, Entry], stack: contextlib.ExitStack) -> None:
        """Open the files of these tensors until `stack` closes.

        Raises InvalidRequest if one cannot be read.
        """
        self._entries = entries
        self._files: dict[Path, _ReadPart] = {}
        for path in sorted({entry.file for entry in entries.values()}):
            try:
                self._files[path] = _opened(path, stack)
            except (OSError, SafetensorError) as error:
                raise InvalidRequest(f"cannot read {path}: {error}", param="model") from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def dtype(self, name: str) -> str:
        """Return the type as safetensors calls it: "BF16"."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self._entries[name].shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of the whole tensor."""
        return self._entries[name].nbytes

    def read(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        entry = self._entries[name]
        return self._files[entry.file](name, entry, index)

    def check(self, expected: Mapping[str, Stored], ignore: Iterable[str]) -> dict[str, list[str]]:
        """Return the tensors that have each kind of problem; `ignore` holds regular expressions of
        whole names of optional tensors."""
        ignored = re.compile("|".join(ignore) or "(?!)")
        common = expected.keys() & self._entries.keys()
        return {
            "missing": list(expected.keys() - common),
            "unexpected": [
                name for name in self if name not in common and not ignored.fullmatch(name)
            ],
            "of another shape": [
                f"{name} {list(self.shape(name))} instead of {list(expected[name].shape)}"
                for name in common
                if not expected[name].fits(self.shape(name))
            ],
            "of another type": [
                f"{name} {self.dtype(name)} instead of {' or '.join(expected[name].dtypes)}"
                for name in common
                if self.dtype(name) not in expected[name].dtypes
            ],
        }


def _opened(path: Path, stack: contextlib.ExitStack) -> _ReadPart:
    """Open a file until `stack` closes. Raises OSError and SafetensorError."""
    if is_gguf(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        return lambda name, entry, index: read_part(descriptor, entry, _slices(index))
    file: Any = stack.enter_context(safe_open(path, framework="pt"))
    return lambda name, entry, index: file.get_slice(name)[index]


def _slices(index: tuple[int | slice, ...]) -> tuple[slice, ...]:
    """Return an index that picks no item, as those of files without stacked matrices."""
    assert all(isinstance(part, slice) for part in index)
    return tuple(part for part in index if isinstance(part, slice))


def refuse(problems: Mapping[str, list[str]]) -> None:
    """Raise InvalidRequest naming the tensors of every kind of problem, unless there are none."""
    found = [f"{kind}: {some(names)}" for kind, names in problems.items() if names]
    if found:
        raise InvalidRequest(f"checkpoint tensors {'; '.join(found)}", param="model")
