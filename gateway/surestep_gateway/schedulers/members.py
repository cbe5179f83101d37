"""The schedulers of a model while some come and others leave: their clients, and how these end.

One that no list names any more gets requests only where no other does; what it has goes on to its
end, and then it is let go. One that is found at run time gets requests once it has said that it
serves, and what: a list may name what is not ours. It is given the adapters that others have, and
gets no requests for one before that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence

from surestep_common.errors import DeadlineExceeded, SurestepError, Unavailable
from surestep_proto.scheduler_pb2 import LoadAdapterRequest
from surestep_proto.worker_pb2 import Adapter

from surestep_gateway.schedulers.discovery import Discovery
from surestep_gateway.schedulers.scheduler_client import SchedulerClient
from surestep_gateway.settings.scheduler_urls import place

logger = logging.getLogger(__name__)

SWEEP_S = 1.0  # between two looks for those that may be let go


class Members:
    """The clients of the schedulers of one model. `run` must be running."""

    def __init__(self, urls: Sequence[str], on_change: Callable[[], None]) -> None:
        """`urls` are addresses, or places that keep lists of some. Needs a running event loop."""
        self._on_change = on_change
        self._tasks = asyncio.TaskGroup()
        self._running: dict[SchedulerClient, asyncio.Task[None]] = {}
        self._foreign: set[SchedulerClient] = set()  # that serve another model, which was logged
        places = {url: found for url in urls if (found := place(url)) is not None}
        self._lists: dict[str, Collection[str]] = {"": [url for url in urls if url not in places]}
        self._discoveries = [
            Discovery(url, found, self._put_from(url)) for url, found in places.items()
        ]
        self.adapters_turn = asyncio.Lock()  # of those that load or unload some
        self.all: tuple[SchedulerClient, ...] = tuple(
            SchedulerClient(address, on_change, number)
            for number, address in enumerate(dict.fromkeys(self._lists[""]))
        )

    async def run(self) -> None:
        """Follow the lists, and the health of the schedulers, until cancelled."""
        async with self._tasks as tasks:
            for client in self.all:
                self._running[client] = tasks.create_task(client.run())
            for discovery in self._discoveries:
                tasks.create_task(discovery.run())
            tasks.create_task(self._follow_adapters())
            while self._discoveries:
                await asyncio.sleep(SWEEP_S)
                await self._let_go()

    async def close(self) -> None:
        """Close the channels, which cancels open calls."""
        for client in self.all:
            await client.close()

    @property
    def trouble(self) -> str:
        """Why there may be others than are known; empty when nothing is wrong."""
        found = [one.trouble for one in self._discoveries if one.trouble]
        return "; ".join(found) if found or self.all else "none is known yet"

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters that any has, by name."""
        known = [one for one in self.all if one.proven]
        return {adapter.name: adapter for one in known for adapter in one.adapters}

    def usable(
        self, model: str = "", avoid: Collection[SchedulerClient] = (), adapter: str = ""
    ) -> list[SchedulerClient]:
        """Return those that may be sent a request now, with the fingerprint of a `model` those that
        may serve it, with the name of an `adapter` those that have it; one that leaves only where
        there is no other.
        """
        now = time.monotonic()
        admitting = [client for client in self.all if client.admits(now)]
        self._vet([client for client in admitting if not client.leaving])
        fit = [one for one in admitting if one.proven and one not in avoid and one.may_have(model)]
        if adapter and (known := self.adapters.get(adapter)) is not None:
            fit = [one for one in fit if _has(one, known)]
        return [client for client in fit if not client.leaving] or fit

    def helpless(self) -> list[SchedulerClient]:
        """Return those without workers whose requests others may go on with."""
        now = time.monotonic()
        return [one for one in self.all if one.is_helpless(now) and self.usable(one.model or "")]

    def _vet(self, admitting: Collection[SchedulerClient]) -> None:
        """Take on those that came at run time and serve the model of the others."""
        models = {one.model for one in admitting if one.proven and one.model}
        for client in admitting:
            if client.proven or client.model is None:
                continue
            if not models or client.model in {"", *models}:
                client.proven = True
                models |= {client.model} - {""}
            elif client not in self._foreign:
                self._foreign.add(client)
                logger.warning(
                    "scheduler %s serves another model than the others, and gets no requests",
                    client.address,
                )

    def _put_from(self, url: str) -> Callable[[Collection[str]], None]:
        def put(addresses: Collection[str]) -> None:
            self._lists[url] = addresses
            self._follow_lists()

        return put

    def _follow_lists(self) -> None:
        """Let those join that are new in a list, and those leave that are in none any more."""
        listed = dict.fromkeys(itertools.chain.from_iterable(self._lists.values()))
        for client in self.all:
            if client.leaving == (client.address in listed):
                client.leaving = not client.leaving
                what = "is to leave" if client.leaving else "stays"
                logger.info("scheduler %s %s", client.address, what)
        known = {client.address for client in self.all}
        for address in listed:
            if address not in known:
                self._join(address)
        self._on_change()

    def _join(self, address: str) -> None:
        taken = {client.number for client in self.all}
        number = next(n for n in itertools.count() if n not in taken)
        client = SchedulerClient(address, self._on_change, number, proven=False)
        self.all = tuple(sorted((*self.all, client), key=lambda one: one.number))
        self._running[client] = self._tasks.create_task(client.run())
        logger.info("scheduler %s joins", address)

    async def _let_go(self) -> None:
        """Close the clients of those that leave and are not needed."""
        for client in self.all:
            if client.leaving and client.idle and client not in self.usable():
                self.all = tuple(one for one in self.all if one is not client)
                self._foreign.discard(client)
                await _end(client, self._running.pop(client))
                logger.info("scheduler %s has left", client.address)
        self._on_change()

    async def _follow_adapters(self) -> None:
        """Load at those that have begun to serve what others have."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for client in [one for one in self.all if one.is_new and one.admits(now)]:
                if client.proven and client.info is not None:
                    async with self.adapters_turn:
                        client.is_new = False
                        await self._bring_in_line(client)

    async def _bring_in_line(self, client: SchedulerClient) -> None:
        others = [one for one in self.all if one is not client and one.proven and one.serving]
        for one in (client, *others):
            await one.learn()
        theirs = {adapter.name: adapter for one in others for adapter in one.adapters}
        for adapter in theirs.values():
            if _has(client, adapter):
                continue
            try:
                await client.load_adapter(
                    LoadAdapterRequest(name=adapter.name, path=adapter.path, digest=adapter.digest)
                )
                logger.info("scheduler %s has adapter '%s' now, too", client.address, adapter.name)
            except SurestepError as error:
                if isinstance(error, Unavailable | DeadlineExceeded):
                    client.is_new = True  # and is tried again
                await client.learn()  # another gateway may have loaded it
                if not _has(client, adapter):
                    what = client.address, adapter.name, error.message
                    logger.warning("scheduler %s lacks adapter '%s' of the others: %s", *what)


def _has(client: SchedulerClient, adapter: Adapter) -> bool:
    """Return whether requests may name an adapter there, which may load it for them."""
    loads = client.info is not None and client.info.loads_adapters
    in_folder = loads and adapter.path.endswith(f"/{adapter.name}")
    return in_folder or any(one.name == adapter.name for one in client.adapters)


async def _end(client: SchedulerClient, running: asyncio.Task[None]) -> None:
    """Close a client whose tasks have ended: on a closed channel they would fail."""
    client.closed = True
    running.cancel()
    try:
        await asyncio.wait([running])
    finally:
        await client.close()
