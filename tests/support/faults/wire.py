"""A wire that can be cut: between a client and a server, both on this machine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from surestep_common import addresses

_CHUNK = 1 << 16


class Wire:
    """Forwards to `target`, a gRPC address. Use as an async context manager; `address` is its own."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._ends: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.num_cut = 0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection; new ones work. From any thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def silence(self) -> None:
        """Forward nothing more on the connections there are, and close none. From any thread.

        New ones work, as when a router has forgotten those that were open.
        """
        self._loop.call_soon_threadsafe(self._silence)

    def _cut(self) -> None:
        self.num_cut += len(self._ends) // 2
        for end in self._ends:
            end.transport.abort()

    def _silence(self) -> None:
        self.num_cut += len(self._ends) // 2
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._connect()
        except OSError:  # nobody listens there at the moment
            writer.transport.abort()
            return
        flowing, ends = self._flowing, {writer, far_writer}
        self._ends |= ends
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(reader, far_writer, flowing))
                tasks.create_task(_pump(far_reader, writer, flowing))
        finally:
            self._ends -= ends
            self._connections.discard(task)
            for end in ends:
                end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if (path := addresses.socket_path(self._target)) is not None:
            return await asyncio.open_unix_connection(path)
        return await asyncio.open_connection(*addresses.split(self._target))


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            await flowing.wait()
            writer.write(data)
            await writer.drain()
    writer.transport.abort()  # the other direction ends too
