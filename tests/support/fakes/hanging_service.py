"""A process with a health service and signs of life, for watchers: `hanging_service.py PORT`.

SIGUSR2 blocks its event loop; the exit status after SIGTERM is 7.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from surestep_common import rpc
from surestep_common.notify import Notifier
from surestep_common.process import dump_stacks_on_signal
from surestep_common.watchdog import wait_for_turn


def block_here() -> None:
    time.sleep(60)


async def serve(port: str) -> None:
    server = rpc.Server([])
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR2, block_here)
    await server.start(f"127.0.0.1:{port}")
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(Notifier().beat())
        await stop.wait()
        beating.cancel()
    await server.stop(0)


if __name__ == "__main__":
    dump_stacks_on_signal()
    wait_for_turn(sys.argv)
    asyncio.run(serve(sys.argv[1]))
    sys.exit(7)
