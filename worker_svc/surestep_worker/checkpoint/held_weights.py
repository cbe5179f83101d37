"""The weights that outlive a rank: shared memory that its supervisor holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import InternalError, Unavailable

from surestep_worker.host import shared_memory as memory

DEFAULT = "default"  # version of the weights that a rank starts with


class StaleWeights(InternalError):
    """The held weights are of no use to the rank that received them: load them again."""


class WeightFds(NamedTuple):
    """Descriptors of shared memory: one for each checkpoint, one for what replaces parts, one for
    the caches, and one for adapters."""

    model: int
    draft_head: int  # that has a folder of its own; not used without one
    update: int  # tensors in place of those of the model's folder, as a safetensors file; or empty
    caches: int  # never sealed: see surestep_worker.cache.held_caches
    adapters: int  # never sealed either: see surestep_worker.adapters.pool


class Source(NamedTuple):
    """Origin of a version of the weights, besides the update among the descriptors."""

    folder: Path | None
    version: str = DEFAULT
    folder_version: str = DEFAULT  # of the folder without that update


class _Version(NamedTuple):
    """All that is held of one version."""

    fds: WeightFds
    source: Source
    checkpoint: str  # fingerprint of the weights; empty until a rank was ready
    of_folder: str  # the same without an update


class HeldWeights:
    """Filled by the first rank, which seals them once complete; mapped by the ranks after it.

    The caches beside them are written by every rank.
    """

    def __init__(self, folder: Path | None = None) -> None:
        adapters = memory.create("surestep-adapters")
        fds = WeightFds(_create(), _create(), _create(), _create_caches(), adapters)
        self._held = _Version(fds, Source(folder), "", "")
        self._previous: _Version | None = None  # until the one after it is known to serve

    @property
    def fds(self) -> WeightFds:
        """Descriptors for the next rank."""
        return self._held.fds

    @property
    def source(self) -> Source:
        """Origin of what is not in memory."""
        return self._held.source

    @property
    def checkpoint(self) -> str:
        """Fingerprint of the weights; empty until a rank was ready with them."""
        return self._held.checkpoint

    @property
    def of_folder(self) -> str:
        """Fingerprint of the folder, as it was when a rank loaded it; empty if none did."""
        return self._held.of_folder

    @property
    def sealed(self) -> bool:
        """Return whether the model's weights are complete."""
        return memory.is_sealed(self.fds.model)

    @property
    def nbytes(self) -> int:
        """Bytes that the next rank need not load."""
        return sum(os.fstat(fd).st_size for fd in self.fds[:2] if memory.is_sealed(fd))

    @property
    def has_update(self) -> bool:
        """Return whether tensors of the folder are replaced."""
        return os.fstat(self.fds.update).st_size > 0

    @property
    def unsettled(self) -> bool:
        """Return whether the version before this one can come back."""
        return self._previous is not None

    def ready(self, checkpoint: str) -> None:
        """Note the fingerprint that a rank has found."""
        of_folder = self.of_folder if self.has_update else checkpoint
        self._held = self._held._replace(checkpoint=checkpoint, of_folder=of_folder)

    def take_over(self, fds: WeightFds, source: Source, checkpoint: str) -> None:
        """Hold memory that another supervisor has held, instead of one's own, which is empty."""
        _close(self.fds)
        self._held = _Version(fds, source, checkpoint, "")

    def renew(self, *, all_of_it: bool) -> None:
        """Replace memory that was left incomplete, or all of it, by an empty one; ranks that have
        mapped the old one keep it until they end."""
        stores = self.fds[:2]
        renewed = [fd for fd in stores if all_of_it or not memory.is_sealed(fd)]
        model, draft_head = (_create() if fd in renewed else fd for fd in stores)
        checkpoint = self.checkpoint if model == self.fds.model else ""
        fds = self.fds._replace(model=model, draft_head=draft_head)
        self._held = self._held._replace(fds=fds, checkpoint=checkpoint)
        _close(renewed)
        if all_of_it:
            self.renew_caches()

    def renew_caches(self) -> None:
        """Give up what ranks have computed."""
        os.close(self.fds.caches)
        fds = self.fds._replace(caches=_create_caches())
        self._held = self._held._replace(fds=fds)

    def give_up(self) -> None:
        """Hold nothing, an update neither: what the folder has is the version that is left."""
        self.settle()
        self.renew(all_of_it=True)
        if self.has_update:
            os.close(self.fds.update)
            source = self.source._replace(version=self.source.folder_version)
            fds = self.fds._replace(update=_create())
            self._held = self._held._replace(fds=fds, source=source)

    def replace(self, source: Source, update: int) -> None:
        """Hold another version, still empty; the one before it stays until `settle`.

        What it has computed is given up: there may be no room for both.
        """
        self.settle()
        self.renew_caches()
        draft_head, caches, adapters = (
            os.dup(fd) for fd in (self.fds.draft_head, self.fds.caches, self.fds.adapters)
        )
        fds = WeightFds(_create(), draft_head, update, caches, adapters)
        kept = self.of_folder if source.folder == self.source.folder else ""
        self._previous, self._held = self._held, _Version(fds, source, "", kept)

    def roll_back(self) -> None:
        """Hold the version before this one again. Raises Unavailable if it was given up."""
        if self._previous is None:
            raise Unavailable(f"no version is held besides '{self.source.version}'")
        _close(self.fds)
        self._held, self._previous = self._previous, None

    def settle(self) -> None:
        """Give up the version before this one."""
        if self._previous is not None:
            _close(self._previous.fds)
            self._previous = None


def _create() -> int:
    return memory.create("surestep-weights")


def _create_caches() -> int:
    return memory.create("surestep-caches")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
