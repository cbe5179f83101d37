"""A rank without tensors that misbehaves on demand; everything around the step is the real thing.

Usage, by a supervisor: python rank.py STACKS_FILE [LOADING]

LOADING says how it loads: "fills" its weights (the default), "crashes" while it does, or "dozes".
A file with the name of STACKS_FILE and ".refuse" makes it fail, whatever it has: it holds the name
of an error and a reason. Into one with ".nice." and its process id it writes the priority with which
it prepares. A step does what the plan's only block id stands for. SIGUSR2 blocks the event loop.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_proto import sampling_pb2, supervisor_pb2
from surestep_proto import worker_pb2 as pb
from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.checkpoint.held_weights import StaleWeights, WeightFds
from surestep_worker.checkpoint.model_folder import fingerprint_of
from surestep_worker.config import WorkerSettings
from surestep_worker.host import shared_memory as memory
from surestep_worker.process import child
from surestep_worker.process.child import is_spare
from surestep_worker.process.rank import Build, run
from surestep_worker.step.heartbeat import Heartbeat
from surestep_worker.tiers.moves import Moves

MEMO = b"measured"
WEIGHTS = b"weights"
NOTHING, SLEEP, SLEEP_IN_NATIVE_CODE = range(1, 4)
LONG_S = 60


class Done(NamedTuple):
    """A step that was over when it was launched."""

    result: pb.StepResult
    done: bool = True

    def wait(self) -> None:
        """Nothing is under way."""

    def finish(self) -> pb.StepResult:
        """The result."""
        return self.result


class Runner:
    """Does what plans say."""

    num_late_compilations = 0
    captured = 0, 0

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self.moves: Moves | None = None

    def open(self, epoch: int) -> None:
        pass

    def capture_next(self) -> None: ...

    def compile(self, grammar: sampling_pb2.Grammar) -> Future[None]:
        raise NotImplementedError

    @property
    def adapters(self) -> AdapterPool:
        raise NotImplementedError

    def check_peers(self) -> None:
        pass

    def launch(self, plan: pb.StepPlan) -> Done:
        self._heartbeat.enter(supervisor_pb2.FORWARD)
        if SLEEP in plan.block_ids:
            time.sleep(LONG_S)
        if SLEEP_IN_NATIVE_CODE in plan.block_ids:
            ctypes.PyDLL(None).sleep(LONG_S)  # keeps the interpreter lock
        return Done(pb.StepResult(epoch=plan.epoch, step=plan.step))


class BuiltRank(NamedTuple):
    runner: Runner
    facts: pb.WorkerInfo
    profile_result: bytes
    checkpoint: str = ""


ERRORS = {error.__name__: error for error in (InvalidRequest, StaleWeights, RuntimeError)}


def refuse(orders: Path) -> None:
    if orders.exists():
        name, _, reason = orders.read_text().partition(" ")
        raise ERRORS[name](reason)


def build_as(loading: str, orders: Path) -> Build:
    def build(
        settings: WorkerSettings, heartbeat: Heartbeat, fds: WeightFds, profile_result: bytes
    ) -> BuiltRank:
        weights_fd = fds.model
        heartbeat.progress(supervisor_pb2.LOADING)
        refuse(orders)
        facts = pb.WorkerInfo(weight_bytes=0, model_path=profile_result.decode())
        if not memory.is_sealed(weights_fd):
            with open(weights_fd, "wb", closefd=False) as weights:
                weights.write(WEIGHTS)
                if settings.model is not None:
                    weights.write(fingerprint_of(settings.model).encode())
            if loading == "crashes":
                raise RuntimeError("crashes while loading")
            if loading == "dozes":
                time.sleep(LONG_S)
            memory.seal(weights_fd)
        checkpoint = os.pread(weights_fd, 100, len(WEIGHTS)).decode()
        return BuiltRank(Runner(heartbeat), facts, MEMO, checkpoint)

    return build


if __name__ == "__main__":
    spare = is_spare(sys.argv)
    loading = sys.argv[2] if len(sys.argv) > 2 else "fills"

    def preload(settings: WorkerSettings) -> Build:
        Path(f"{sys.argv[1]}.nice.{os.getpid()}").write_text(str(os.nice(0)))  # of this thread
        if loading == "has threads":
            threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True).start()
        if loading == "holds a GPU":
            child._GPUS = sys.argv[1]  # which is opened now
        stacks = open(sys.argv[1], "w")  # noqa: SIM115  # until the end of the process
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)
        return build_as(loading, Path(sys.argv[1] + ".refuse"))

    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(LONG_S))
    run(WorkerSettings.load([]), preload, spare=spare)
