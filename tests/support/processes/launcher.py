"""Stand-ins for services, in the care of the launcher's own classes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from support.fakes import service as stand_in_service
from support.processes.commands import children
from support.processes.ports import free_address
from surestep_cli.serve.child import Child, Command
from surestep_cli.serve.launcher import EngineServices, Launcher, Service, Services
from surestep_cli.serve.ports import free_addresses
from surestep_cli.serve.startup import Starting, Startup, Worker
from surestep_common.notify import Listener

SCRIPT = stand_in_service.__file__
QUIET = Console(quiet=True)
ENVIRON = {"PYTHONPATH": os.pathsep.join(sys.path)}


class Bench:
    """Builds stand-ins that write one journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.port = free_addresses({"gateway": 1})["gateway"].rpartition(":")[2]
        self.supervisors: Sequence[str] = ()

    def child(self, name: str, behaviour: str) -> Child:
        """A stand-in; "talker" is the name of one that says why it fails."""
        argv = (sys.executable, SCRIPT, behaviour, name, str(self.journal), self.port)
        return Child(
            Command(name=name, argv=argv, environ=ENVIRON, log_path=self.folder / f"{name}.log")
        )

    def services(
        self, gateway: str = "serve", scheduler: str = "run", supervisors: Sequence[str] = ()
    ) -> Services:
        """Supervisors are those that the launcher asks; nobody listens at the default ones."""
        self.supervisors = supervisors or [free_address(), free_address()]
        names = {"gateway": gateway, "scheduler": scheduler, "worker0": "run", "worker1": "run"}
        one, two, *workers = (Service(self.child(*name), Listener()) for name in names.items())
        return Services(one, (EngineServices(two, tuple(workers)),))

    def launcher(
        self,
        services: Services,
        startup_timeout_s: float = 20,
        *,
        scheduler: str = "127.0.0.1:1",
        must_write: bool = False,
    ) -> Launcher:
        url = f"http://127.0.0.1:{self.port}"
        logs = [worker.child.command.log_path for worker in services.workers]
        startup = Startup(
            url,
            [
                Starting(
                    "tiny",
                    list(map(Worker, self.supervisors, logs)),
                    scheduler=scheduler,
                    must_write=must_write,
                )
            ],
            QUIET,
        )
        return Launcher(
            services, startup, needs_key=False, startup_timeout_s=startup_timeout_s, drain_s=5
        )

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    async def up(self, services: Services) -> None:
        """Every service runs and the launcher has said so."""
        await self.until(lambda: all(child.proven for child in services.children))
        await self.until(lambda: len(self.lines()) == len(services.all))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # other processes make it true
                await asyncio.sleep(0.02)


def leftovers() -> list[psutil.Process]:
    """Stand-ins that this process has started and nobody has ended."""
    return children(SCRIPT, recursive=True)
