"""Carry the kernels that Triton compiled to another machine with the same card and versions.

    python tools/carry_kernels.py pack FOLDER ARCHIVE     # Triton's cache -> ARCHIVE.00, ..01, ..
    python tools/carry_kernels.py unpack FOLDER ARCHIVE   # and back, into any folder

Triton names the files of a kernel by their whole paths, and keeps every stage of a compilation.
Packed are machine code and what launching it takes, a tenth of that, in parts of 15 MiB.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PART = 15 << 20
_KEPT = (".cubin", ".json", ".so")
_GROUP = "__grp__"  # begins the name of a file that lists those of a kernel


def pack(folder: Path, archive: Path) -> None:
    """Write the parts; an earlier archive of that name is replaced."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for path in sorted(p for p in folder.rglob("*") if p.suffix in _KEPT and p.is_file()):
                data = path.read_bytes()
                if path.name.startswith(_GROUP):
                    data = _group(name for name in _children(data) if Path(name).suffix in _KEPT)
                about = tarfile.TarInfo(str(path.relative_to(folder)))
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
        for part in _parts(archive):
            part.unlink()
        file.seek(0)
        for index, data in enumerate(iter(lambda: file.read(_PART), b"")):
            archive.with_name(f"{archive.name}.{index:02}").write_bytes(data)


def unpack(folder: Path, archive: Path) -> None:
    """Add the archive's kernels to the folder. Raises tarfile.TarError for one that is broken."""
    parts = _parts(archive)
    if not parts:
        return
    with tempfile.TemporaryFile() as file:
        for part in parts:
            with part.open("rb") as data:
                shutil.copyfileobj(data, file)
        file.seek(0)
        _extract(folder, file)


def _extract(folder: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="r:gz") as tar:
        tar.extractall(folder, filter="data")
    for path in folder.rglob(f"{_GROUP}*.json"):
        path.write_bytes(_group(_children(path.read_bytes()), path.parent))


def _children(data: bytes) -> Iterator[str]:
    names: dict[str, str] = json.loads(data)["child_paths"]
    yield from names


def _group(names: Iterator[str], folder: Path = Path()) -> bytes:
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def _parts(archive: Path) -> list[Path]:
    return sorted(archive.parent.glob(f"{archive.name}.[0-9][0-9]"))


def main() -> None:
    """See above."""
    command, *paths = sys.argv[1:]
    try:
        {"pack": pack, "unpack": unpack}[command](*map(Path, paths))
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
