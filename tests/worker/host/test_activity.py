"""What a process is seen doing: it runs, rests, or waits for a core that others have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from surestep_proto import supervisor_pb2 as pb
from surestep_worker.host.activity import observe

_BEGUN = "import os; os.write(1, b'.')\n"
_BUSY = f"{_BEGUN}while True: pass"
_STILL = f"{_BEGUN}import time; time.sleep(600)"
_BUSY_THREAD = f"import threading; threading.Thread(target=lambda: exec({_BUSY!r})).start()"
_BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_BUSY!r}])"
_WATCH_S = 0.3


@contextmanager
def python(code: str) -> Iterator[int]:
    """A process of its own group, whose `code` has said that it begins; gives its id."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def own_core() -> Iterator[int]:
    """The first core of this process, on which it is not itself; gives its number."""
    cores = os.sched_getaffinity(0)
    first = min(cores)
    os.sched_setaffinity(0, cores - {first} or cores)
    yield first
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("code", [_BUSY, _BUSY_THREAD, _BUSY_CHILD])
async def test_what_computes_is_not_at_rest(code: str) -> None:
    with python(code) as pid:
        doing = {await observe(pid, _WATCH_S) for _ in range(3)}
    assert doing <= {pb.RUNNING, pb.WAITING}  # of which the second shows that others compute too


@pytest.mark.parametrize("code", [_STILL, _BUSY])
async def test_what_sleeps_or_was_stopped_is_at_rest(code: str) -> None:
    with python(code) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert await observe(pid, _WATCH_S) == pb.AT_REST
    with python(_STILL) as pid:
        assert await observe(pid, _WATCH_S) == pb.AT_REST


async def test_what_others_keep_from_its_core_waits(own_core: int) -> None:
    with ExitStack() as stack:
        pids = [stack.enter_context(python(_BUSY)) for _ in range(5)]
        for pid in pids:
            os.sched_setaffinity(pid, {own_core})
        assert [await observe(pid, _WATCH_S) for pid in pids] == [pb.WAITING] * 5


async def test_what_is_gone_is_at_rest() -> None:
    with python(_STILL) as pid:
        pass
    assert await observe(pid, _WATCH_S) == pb.AT_REST
