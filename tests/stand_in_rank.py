"""A process that looks like a rank from outside: binds, becomes healthy, waits.

Usage: python stand_in_rank.py HOST:PORT STACKS_FILE
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys

from surestep_common import rpc
from surestep_common.process import die_with_parent
from surestep_proto import engine_pb2 as pb


async def main(address: str) -> None:
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Worker"]])
    await server.start(address)
    await server.set_serving(True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    die_with_parent()
    with open(sys.argv[2], "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        asyncio.run(main(sys.argv[1]))
