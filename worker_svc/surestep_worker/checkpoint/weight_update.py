"""Weights that come while a model is served, checked against those that they are to replace.

Names, shapes and types must be those of the checkpoint that the server was started with. It is read
without torch, since a supervisor reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_common.gguf import weights_of

from surestep_worker.host import shared_memory as memory
from surestep_worker.host.host_memory import free_memory

from .held_weights import HeldWeights, Source
from .model_folder import (
    ConfigFiles,
    Replacements,
    computed,
    fingerprint,
    fingerprint_of,
    read_entries,
    some,
)
from .safetensors_header import Entry, read_header

_LENGTH_BYTES = 8


class _Layout(NamedTuple):
    """Constants of all versions: the configuration, and type and shape of every tensor."""

    config: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(cls, folder: Path, replaced: Replacements) -> _Layout:
        if weights_of(folder) is not None:
            raise InvalidRequest("weights from a GGUF file are not updated", param="model")
        return cls(computed(folder, replaced), _described(read_entries(folder)))


def _described(entries: Mapping[str, Entry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


class Staged(NamedTuple):
    """Material of the next version."""

    num_tensors: int
    nbytes: int
    digest: str  # SHA-256 of all bytes that came; of a folder, its fingerprint


class WeightUpdates:
    """Next version of the weights that one supervisor holds, while it comes."""

    def __init__(self, held: HeldWeights, replaced: Replacements) -> None:
        self._held = held
        self._replaced = replaced
        self._layout: _Layout | None = None
        self._folder: Path | None = None  # to load from, instead of the one before
        self._parts: list[int] = []  # descriptors of safetensors files
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        """Forget what has come so far."""
        for fd in self._parts:
            os.close(fd)
        self._folder, self._parts, self._digest = None, [], hashlib.sha256()

    def stage(self, path: Path) -> Staged:
        """Take the weights of a folder, or the tensors of a safetensors file in place of theirs.

        Raises InvalidRequest unless they are like those before.
        """
        self.begin()
        if not path.is_absolute():
            raise InvalidRequest(f"'{path}' is no absolute path", param="model_path")
        return self._stage_folder(path) if path.is_dir() else self.add(_copy_of(path))

    def _stage_folder(self, folder: Path) -> Staged:
        layout, found = self._known(), _Layout.of(folder, self._replaced)
        if found.config != layout.config:
            message = f"{folder} has another config.json, generation_config.json or tokenizer"
            raise InvalidRequest(message, param="model_path")
        _check(found.tensors, layout, whole=True)
        self._folder = folder
        entries = read_entries(folder).values()
        nbytes = sum(entry.nbytes for entry in entries)
        return Staged(len(entries), nbytes, fingerprint_of(folder, self._replaced))

    def add(self, fd: int) -> Staged:
        """Take one more safetensors file, in shared memory of this process.

        Raises InvalidRequest, and closes it, unless it holds tensors of the model.
        """
        try:
            entries = read_header(_path(fd))
            _check(_described(entries), self._known(), whole=False)
        except BaseException:
            os.close(fd)
            raise
        self._parts.append(fd)
        _digest_of(fd, self._digest)
        nbytes = sum(entry.nbytes for entry in entries.values())
        return Staged(len(entries), nbytes, self._digest.hexdigest())

    def use(self, version: str) -> None:
        """Hold what has come as the next version.

        Raises InvalidRequest where nothing has, or where the folder, of which some tensors would
        be, has changed.
        """
        held = self._held
        if self._folder is not None:
            source = Source(self._folder, version, version)
            held.replace(source, memory.create("surestep-update"))
        else:
            if not self._parts:
                raise InvalidRequest("no weights have come that could be used", param="version")
            update = self._merged()
            try:
                self._check_rest(update)
            except BaseException:
                os.close(update)
                raise
            held.replace(held.source._replace(version=version), update)
        self.begin()

    def loadable(self) -> str:
        """Return the fingerprint of what a rank would load now. Raises InvalidRequest."""
        folder = self._held.source.folder
        assert folder is not None
        files, entries = ConfigFiles.read(folder, self._replaced), read_entries(folder)
        update = _path(self._held.fds.update) if self._held.has_update else None
        return fingerprint(files, with_update(entries, update))

    def _known(self) -> _Layout:
        if self._layout is None:
            folder = self._held.source.folder
            if folder is None:
                raise InvalidRequest("no model folder is given", param="model")
            self._layout = _Layout.of(folder, self._replaced)
        return self._layout

    def _merged(self) -> int:
        """Return one file of all parts, and of the update before where that has more."""
        earlier = [self._held.fds.update] if self._held.has_update else []
        entries: dict[str, Entry] = {}
        for fd in (*earlier, *self._parts):
            entries |= read_header(_path(fd))
        if len({entry.file for entry in entries.values()}) == 1 and len(self._parts) == 1:
            merged = os.dup(self._parts[0])
        else:
            merged = _write(entries)
        memory.seal(merged)
        return merged

    def _check_rest(self, update: int) -> None:
        """See to it that tensors which the update lacks are those of the folder of before."""
        if self._known().tensors.keys() == read_header(_path(update)).keys():
            return
        held, folder = self._held, self._held.source.folder
        assert folder is not None
        if not held.of_folder or fingerprint_of(folder, self._replaced) != held.of_folder:
            raise InvalidRequest(
                f"{folder} holds other weights than were loaded from it: send all tensors",
                param="model",
            )


def with_update(entries: Mapping[str, Entry], update: Path | None) -> dict[str, Entry]:
    """Return the tensors of a folder, some of which are replaced by those of an update."""
    return {**entries, **(read_header(update) if update is not None else {})}


def _check(
    found: Mapping[str, tuple[str, tuple[int, ...]]], layout: _Layout, *, whole: bool
) -> None:
    """Raise InvalidRequest, naming tensors, unless they are the model's; all of them if `whole`."""
    wanted = layout.tensors
    common = found.keys() & wanted.keys()
    problems: dict[str, Iterable[str]] = {
        "missing": wanted.keys() - common if whole else (),
        "unexpected": found.keys() - common,
        "of another type or shape": [
            f"{name} {found[name][0]}{[*found[name][1]]} instead of "
            f"{wanted[name][0]}{[*wanted[name][1]]}"
            for name in common
            if found[name] != wanted[name]
        ],
    }
    told = [f"{kind}: {some(names)}" for kind, names in problems.items() if names]
    if told:
        raise InvalidRequest(f"tensors {'; '.join(told)}", param="weights")


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _digest_of(fd: int, digest: hashlib._Hash) -> None:
    with open(_path(fd), "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)


def check_room(nbytes: int) -> None:
    """Raise InvalidRequest unless there is memory for so much of an update."""
    left = free_memory()
    if nbytes > left.nbytes:
        raise InvalidRequest(f"no room for these weights: {left}", param="weights")


def _copy_of(path: Path) -> int:
    """Return a copy of a safetensors file, in shared memory that its writer cannot change."""
    read_header(path)  # whose errors name the file
    fd = memory.create("surestep-update")
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size
            check_room(left)
            while left and (sent := os.sendfile(fd, file.fileno(), None, left)):
                left -= sent
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(entries: Mapping[str, Entry]) -> int:
    """Write tensors of several files into one, in shared memory; return its descriptor."""
    header, at = dict[str, object](), 0
    for name, entry in entries.items():
        offsets = [at, at + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header).encode()
    merged = memory.create("surestep-update")
    os.write(merged, len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for entry in entries.values():
        _copy(entry, merged)
    return merged


def _copy(entry: Entry, merged: int) -> None:
    with open(entry.file, "rb") as file:
        at = entry.begin
        while at < entry.end:
            at += os.sendfile(merged, file.fileno(), at, entry.end - at)
