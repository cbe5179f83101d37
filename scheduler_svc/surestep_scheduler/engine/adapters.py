"""Adapters that requests may name: loaded on all ranks or none, beside the steps.

The ranks' pools outlive ranks and schedulers, so a scheduler that comes later finds what is loaded.
Steps name a place only once every rank has the adapter there. An adapter that is given up keeps its
place as long as a request has it. Those of the folder of adapters are loaded when a request names
them, in place of the idle one of them that was named longest ago. Where none is idle the request
waits in line for a place; requests of adapters that are loaded do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from surestep_common.errors import (
    InvalidRequest,
    ModelNotFound,
    NotFound,
    QueueFull,
    SurestepError,
    Unavailable,
)
from surestep_common.request_params import check_name
from surestep_common.tenants import may_enter
from surestep_proto import worker_pb2 as pb

from surestep_scheduler.core.sequence import Adapter

from .workers import WorkerGroup

logger = logging.getLogger(__name__)

_MOST_PATH = 1024  # characters
_NAME = re.compile(r"[\w.\-/:@+]{1,200}")  # a comma parts names in metrics
_IN_FOLDER = re.compile(r"[\w\-:@+][\w.\-:@+]{0,199}")  # no path, and nothing hidden
RETRY_AFTER_S = 1.0

InUse = Callable[[Adapter], bool]


class PlacesTaken(QueueFull):
    """Refusal of an adapter for which no place is idle."""


class Ticket(NamedTuple):
    """Place in the line of those who wait for a place."""

    number: int
    name: str  # of the adapter
    tenant: str


class Adapters:
    """Adapters of one engine. Every change goes to the ranks first, one at a time."""

    def __init__(self, wanted: Mapping[str, str], folder: str = "") -> None:
        """Load the `wanted` folders, by name, as soon as there are ranks, and those in `folder`, if
        there is one, for requests."""
        self._wanted, self._folder = dict(wanted), folder
        self._named: dict[str, None] = {}  # by requests, the longest ago first
        self._calls = Counter[Adapter]()  # that have an adapter, whether they are queued yet or not
        self._line: list[Ticket] = []  # of requests that wait for a place
        self._tickets = count()
        self._moved = asyncio.Event()  # the line has, or a place may be idle
        self._loaded: dict[str, pb.Adapter] = {}  # by name
        self._leaving: list[pb.Adapter] = []  # open requests may have them
        self._num_places = 0
        self._adopted = False  # what ranks had before this scheduler
        self._turn = asyncio.Lock()

    @property
    def loaded(self) -> Sequence[pb.Adapter]:
        """Return what requests may name."""
        return [*self._loaded.values()]

    @property
    def leaving(self) -> Sequence[pb.Adapter]:
        """Return what only open requests have."""
        return self._leaving

    @property
    def loads(self) -> bool:
        """Return whether requests load adapters by naming them."""
        return bool(self._folder and self._num_places)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a place."""
        return len(self._line)

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name; None: the model itself. Raises ModelNotFound."""
        if not name:
            return None
        if name not in self._loaded:
            raise ModelNotFound(f"no adapter '{name}' is loaded", param="model")
        self._named.pop(name, None)
        self._named[name] = None
        return _as_core(self._loaded[name])

    async def resolve(self, group: WorkerGroup | None, name: str, in_use: InUse) -> Adapter | None:
        """Return what `find` does, after loading what only the folder has.

        Raises ModelNotFound, InvalidRequest for an adapter that does not fit, PlacesTaken where no
        place is idle or others wait for one, and Unavailable.
        """
        if self.loads and name and name not in self._loaded:
            async with self._turn:
                if name not in self._loaded:
                    self._loaded[name] = await self._load_named(group, name, in_use)
                    self._move()
                    logger.info("adapter '%s' is loaded for a request", name)
        return self.find(name)

    async def _load_named(self, group: WorkerGroup | None, name: str, in_use: InUse) -> pb.Adapter:
        unknown = ModelNotFound(f"the model '{name}' does not exist", param="model")
        if not _IN_FOLDER.fullmatch(name):
            raise unknown
        try:
            _check_names(name, self._path_of(name))
            if self._line and self._line[0].name != name:
                await _ranks(group).check_adapter(pb.Adapter(name=name, path=self._path_of(name)))
                raise self._full()
            return await self._load(group, name, self._path_of(name), in_use)
        except NotFound:
            raise unknown from None
        except InvalidRequest as error:
            raise InvalidRequest(f"adapter '{name}': {error.message}", param="model") from error

    def _path_of(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def check_line(self, tenant: str, most: int) -> None:
        """Raise PlacesTaken where `most` wait, but for a tenant that has less than its share."""
        mine = sum(ticket.tenant == tenant for ticket in self._line)
        tenants = {tenant, *(ticket.tenant for ticket in self._line)}
        if not may_enter(mine, 1, len(self._line), most, most / len(tenants)):
            raise self._full()

    @contextmanager
    def waiting(self, name: str, tenant: str) -> Iterator[Ticket]:
        """Keep a request in line for a place."""
        ticket = Ticket(next(self._tickets), name, tenant)
        self._line.append(ticket)
        try:
            yield ticket
        finally:
            self._line.remove(ticket)
            self._move()

    async def turn(self, ticket: Ticket, poll_s: float) -> None:
        """Return when a request in line should ask again: its adapter has come, or it is the first
        and a place may have become idle."""
        while ticket.name not in self._loaded:
            first = self._line[0] is ticket
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_s if first else None):
                    await self._moved.wait()
            if self._line[0] is ticket:
                return

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    @contextmanager
    def called(self, adapter: Adapter | None) -> Iterator[None]:
        """Keep the place of an adapter while a call has it."""
        if adapter is None:
            yield
            return
        self._calls[adapter] += 1
        try:
            yield
        finally:
            self._calls[adapter] -= 1
            if not self._calls[adapter]:
                del self._calls[adapter]
                self._move()

    def check(self, adapter: Adapter | None) -> None:
        """Raise ModelNotFound if an adapter has left its place since it was found."""
        held = map(_as_core, (*self.loaded, *self._leaving))
        if adapter is not None and adapter not in held:
            raise ModelNotFound(f"the adapter '{adapter.name}' was unloaded", param="model")

    async def settle(self, group: WorkerGroup, infos: Sequence[pb.WorkerInfo]) -> list[Adapter]:
        """Bring ranks in line that come for a new epoch; return what they could not get back.

        Raises InvalidRequest for a wanted folder that does not fit.
        """
        async with self._turn:
            self._num_places = infos[0].max_loras
            if self._wanted and not self._num_places:
                raise InvalidRequest("lora_modules need --enable-lora", param="lora_modules")
            if len(self._wanted) > self._num_places:
                message = f"{len(self._wanted)} adapters at the start, and --max-loras"
                raise InvalidRequest(f"{message} {self._num_places}", param="lora_modules")
            held = [{_key(adapter): adapter for adapter in info.adapters} for info in infos]
            if not self._adopted:
                common = set.intersection(*map(set, held))
                self._loaded = {held[0][key].name: held[0][key] for key in sorted(common)}
                self._adopted = True
            lost = [a for a in (*self.loaded, *self._leaving) if not await _again(group, a, held)]
            for adapter in lost:
                self._forget(adapter)
            known = {_key(adapter) for adapter in (*self.loaded, *self._leaving)}
            strays = {key: each[key] for each in held for key in each.keys() - known}
            for adapter in strays.values():
                if adapter.place not in self._taken:
                    await group.unload_adapter(adapter)
            for name, path in self._wanted.items():
                _check_names(name, path)
                if name not in self._loaded:
                    self._loaded[name] = await self._load(group, name, path, lambda _: False)
            self._wanted = {}
            return [_as_core(adapter) for adapter in lost]

    async def load(
        self,
        group: WorkerGroup | None,
        name: str,
        path: str,
        in_use: InUse,
        *,
        in_place: bool,
        digest: str = "",
    ) -> pb.Adapter:
        """Load a folder on all ranks; requests may name it then. A `digest` is what it must have.

        Raises ModelNotFound and InvalidRequest, which change nothing, QueueFull without a place,
        Unavailable.
        """
        _check_names(name, path)
        async with self._turn:
            if not self._num_places:
                raise InvalidRequest("adapters need --enable-lora", param="enable_lora")
            before = self._loaded.get(name)
            if before is not None and not in_place:
                message = f"an adapter '{name}' is loaded already: unload it, or load it in place"
                raise InvalidRequest(message, param="lora_name")
            loaded = await self._load(group, name, path, in_use, digest)
            if before is not None:
                self._leaving.append(before)
            self._loaded[name] = loaded
            logger.info("adapter '%s' is at place %d: %s", name, loaded.place, path)
            return loaded

    def unload(self, name: str) -> None:
        """Let no further request name an adapter. Raises ModelNotFound."""
        self.find(name)
        if name not in self._loaded:
            raise ModelNotFound("an adapter is unloaded by its name", param="lora_name")
        self._leaving.append(self._loaded[name])
        del self._loaded[name], self._named[name]
        logger.info("adapter '%s' is given up", name)

    async def sweep(self, group: WorkerGroup | None, in_use: InUse) -> None:
        """Free the places of what was given up and no request has any more."""
        async with self._turn:
            for adapter in [a for a in self._leaving if not in_use(_as_core(a))]:
                if group is not None:
                    await group.unload_adapter(adapter)
                    self._leaving.remove(adapter)

    async def _load(
        self, group: WorkerGroup | None, name: str, path: str, in_use: InUse, digest: str = ""
    ) -> pb.Adapter:
        group = _ranks(group)
        wanted = pb.Adapter(name=name, path=path, digest=digest)
        free = [place for place in range(self._num_places) if place not in self._taken]
        wanted.place = free[0] if free else await self._make_room(group, wanted, in_use)
        return await group.load_adapter(wanted)

    async def _make_room(self, group: WorkerGroup, wanted: pb.Adapter, in_use: InUse) -> int:
        """Unload the idle adapter of the folder that was named longest ago; return its place."""
        waits = any(ticket.name == wanted.name for ticket in self._line)
        if not waits:  # it was checked before it came in line
            await group.check_adapter(wanted)
        if (idle := self._idle(in_use)) is None:
            raise self._full()
        self._forget(idle)
        await group.unload_adapter(idle)
        return idle.place

    def _idle(self, in_use: InUse) -> pb.Adapter | None:
        order = {name: age for age, name in enumerate(self._named)}
        ours = [one for one in self.loaded if self.loads and one.path == self._path_of(one.name)]
        for one in sorted(ours, key=lambda one: order.get(one.name, -1)):
            if not (self._calls[_as_core(one)] or in_use(_as_core(one))):
                return one
        return None

    def _full(self) -> PlacesTaken:
        message = f"all {self._num_places} places for adapters are taken: see --max-loras"
        return PlacesTaken(message, retry_after=RETRY_AFTER_S)

    @property
    def _taken(self) -> set[int]:
        return {adapter.place for adapter in (*self.loaded, *self._leaving)}

    def _forget(self, adapter: pb.Adapter) -> None:
        if adapter in self._leaving:
            self._leaving.remove(adapter)
        else:
            del self._loaded[adapter.name]
            self._named.pop(adapter.name, None)


def _ranks(group: WorkerGroup | None) -> WorkerGroup:
    if group is None:
        raise Unavailable("the workers are not there", retry_after=RETRY_AFTER_S)
    return group


def _check_names(name: str, path: str) -> None:
    """Raise InvalidRequest for what no adapter is called, or no folder."""
    check_name("lora_name", name)
    if not _NAME.fullmatch(name) or len(path) > _MOST_PATH:
        message = "adapters have names of letters, digits and ./:@+_-, and paths of a usual length"
        raise InvalidRequest(message, param="lora_name")


_Key = tuple[str, int, str]


def _key(adapter: pb.Adapter) -> _Key:
    return adapter.name, adapter.place, adapter.digest


def _as_core(adapter: pb.Adapter) -> Adapter:
    return Adapter(*_key(adapter))


async def _again(
    group: WorkerGroup, adapter: pb.Adapter, held: Sequence[Mapping[_Key, pb.Adapter]]
) -> bool:
    """Load an adapter again on ranks that have lost it. Return whether all have it."""
    missing = [rank for rank, each in enumerate(held) if _key(adapter) not in each]
    try:
        if missing:
            await group.load_adapter(adapter, missing)
    except SurestepError as error:
        logger.warning("the adapter '%s' is lost with its ranks: %s", adapter.name, error)
        return False
    return True
