"""The safetensors files of a checkpoint: opened, and compared with what a model expects in them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from surestep_common.errors import InvalidRequest
from torch import Tensor

from .config import read_json
from .quantization import Stored

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4}  # of all that are read
_NAMES_SHOWN = 6


class Checkpoint:
    """Tensors by name; their data is read where a part of one is asked for."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        """Open the files in folder `path` until `stack` closes.

        Raises InvalidRequest when one cannot be read or a tensor is in several.
        """
        self._holders: dict[str, Any] = {}
        repeated: list[str] = []
        for filename in _filenames(path):
            try:
                file = stack.enter_context(safe_open(path / filename, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InvalidRequest(
                    f"cannot read {path / filename}: {error}", param="model"
                ) from error
            repeated += self._holders.keys() & file.keys()
            self._holders.update(dict.fromkeys(file.keys(), file))
        if repeated:
            raise InvalidRequest(f"in more than one file: {_some(repeated)}", param="model")

    def __contains__(self, name: str) -> bool:
        return name in self._holders

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def dtype(self, name: str) -> str:
        """As safetensors calls it: "BF16"."""
        dtype: str = self._header(name).get_dtype()
        return dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._header(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Of the whole tensor, which must be of a served type."""
        return math.prod(self.shape(name)) * _ITEM_BYTES[self.dtype(name)]

    def read(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """A part of a tensor."""
        part: Tensor = self._header(name)[index]
        return part

    def check(self, expected: Mapping[str, Stored], ignore: Iterable[str]) -> dict[str, list[str]]:
        """Kind of problem -> the tensors that have it; `ignore` holds regular expressions of whole
        names that may be there or not."""
        ignored = re.compile("|".join(ignore) or "(?!)")
        common = expected.keys() & self._holders.keys()
        return {
            "missing": list(expected.keys() - common),
            "unexpected": [
                name for name in self if name not in common and not ignored.fullmatch(name)
            ],
            "of another shape": [
                f"{name} {list(self.shape(name))} instead of {list(expected[name].shape)}"
                for name in common
                if self.shape(name) != expected[name].shape
            ],
            "of another type": [
                f"{name} {self.dtype(name)} instead of {' or '.join(expected[name].dtypes)}"
                for name in common
                if self.dtype(name) not in expected[name].dtypes
            ],
        }

    def _header(self, name: str) -> Any:
        return self._holders[name].get_slice(name)


def checkpoint_names(path: Path) -> frozenset[str]:
    """Names of all tensors of the checkpoint in folder `path`."""
    with contextlib.ExitStack() as stack:
        return frozenset(Checkpoint(path, stack))


def refuse(problems: Mapping[str, list[str]]) -> None:
    """Raise InvalidRequest naming the tensors of every kind of problem, unless there are none."""
    found = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise InvalidRequest(f"checkpoint tensors {'; '.join(found)}", param="model")


def _filenames(path: Path) -> list[str]:
    """Of a single-file checkpoint, or of one with an index."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    if (path / "model.safetensors").exists():
        return ["model.safetensors"]
    raise InvalidRequest(f"no model.safetensors and no {index.name} in {path}", param="model")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
