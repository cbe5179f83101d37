"""GGUF files in parts, as llama-gguf-split makes them: NAME-00001-of-00003.gguf and so on.

The first part has all of the metadata; each has tensors of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from .header import Header, read_header, refuse, shown

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


def whole_name(path: Path) -> str:
    """Return what a file is called without its suffix, and without which part it is."""
    part = _PART.fullmatch(path.stem)
    return part[1] if part else path.stem


def part_files(path: Path) -> list[Path]:
    """Return the files of all parts in their order: by its name a file may be one of several."""
    part = _PART.fullmatch(path.stem)
    if part is None:
        return [path]
    name, count = part[1], int(part[3])
    return [
        path.with_name(f"{name}-{i:05}-of-{count:05}{path.suffix}") for i in range(1, count + 1)
    ]


def read_whole(path: Path) -> Header:
    """Read the header of a file with the tensors of all of its parts, of which it is the first.

    Raises InvalidRequest naming the file at fault, and what is wrong in it.
    """
    first = read_header(path)
    count = first.number("split.count", 1)
    if count <= 1:
        return first
    files = part_files(path)
    if len(files) != count:
        wanted = f"NAME-00001-of-{count:05}.gguf and so on"
        refuse(path, f"it is one of {count} parts, which must be called {wanted}")
    if first.number("split.no") != 0 or path != files[0]:
        refuse(path, f"it is not the first of {count} parts: name {files[0].name}")
    tensors = dict(first.tensors)
    for number, file in enumerate(files[1:], start=1):
        part = read_header(file)
        if (part.number("split.no"), part.number("split.count")) != (number, count):
            refuse(file, f"it is not part {number + 1} of {count}")
        if twice := tensors.keys() & part.tensors.keys():
            refuse(file, f"tensor {shown(min(twice))} stands in another part, too")
        tensors |= part.tensors
    expected = first.number("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        refuse(path, f"its parts hold {len(tensors)} tensors of {expected}")
    return first._replace(tensors=tensors)
