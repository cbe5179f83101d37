"""A server that is broken on purpose: its processes, its triggers, and what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from support.processes.stack import Stack, serve

INJECT = Path(__file__).with_name("inject")
SECRET = "one that several servers share"  # a gateway of two needs to know both
STEP_CEILING_S = 10
# For servers that lose a part amid an answer: a tiny model is done before a busy client has seen half of it.
PACED = {"PYTHONPATH": str(INJECT), "FAULT_PACE_S": "0.01"}
_FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--kv-cache-memory", "0.05"),
    *("--max-num-seqs", "24", "--max-num-batched-tokens", "128"),
    *("--step-deadline-floor-s", "3", "--step-deadline-ceiling-s", f"{STEP_CEILING_S}"),
    *("--step-warmup-s", "10"),
)


_TRACEBACK = re.compile(
    r"^( *)\S*Traceback \(most recent call last\):\n(?:\1 .*\n|\n)*.*\n", re.MULTILINE
)
_ORDERED = (  # in the tracebacks that the faults of the suite cause, directly or in gRPC
    ", in suffer",  # of sitecustomize.py
    "gloo/transport/tcp/",  # of a rank whose partner has ended
    "InternalError: the drafter proposed an id outside the vocabulary",
    "InternalError: the drafter of rank 0 failed",  # as the other ranks are told
    # gRPC's server prints it where a call ends as cancelled: at times when a supervisor ends.
    "in grpc._cython.cygrpc._schedule_rpc_coro\nasyncio.exceptions.CancelledError",
)


@dataclass(frozen=True)
class Holdings:
    """Processes and descriptors, as many after a fault as before."""

    processes: int  # all that the launcher has started, whoever started them
    gateway_fds: int
    scheduler_fds: int


class Incident(NamedTuple):
    """A lost epoch."""

    epoch: int
    cause: str
    detect_s: float  # as the server says: in which nobody had noticed
    recover_s: float  # and from then to the next step


class Targets(NamedTuple):
    """Processes that a fault may hurt."""

    scheduler: int
    ranks: list[int]
    supervisors: list[int]
    standbys: list[int]
    templates: list[int]  # of which standbys are copies; 0 without one


@dataclass(frozen=True)
class Facts:
    """Facts that a fault changes, or must not change."""

    rank_pids: tuple[int, ...]
    supervisor_pids: tuple[int, ...]
    scheduler_pid: int
    epoch: int
    replays: float
    drafter_faults: float
    incidents: tuple[Incident, ...]

    def since(self, before: Facts) -> list[Incident]:
        """What has happened since then, by epoch and cause."""
        known = {incident[:2] for incident in before.incidents}
        return [incident for incident in self.incidents if incident[:2] not in known]


class FaultyServer:
    """`surestep serve` with ways to hurt it."""

    def __init__(self, stack: Stack, triggers: Path) -> None:
        self.stack = stack
        self._triggers = triggers

    def status(self) -> Any:
        """The /status document."""
        return self.stack.status()

    # -- hurting it ----------------------------------------------------------------------------

    def targets(self) -> Targets:
        """Look up what can be hurt: ahead of streams, as that takes seconds on a busy machine."""
        scheduler = self.stack.scheduler()
        supervisors = scheduler["supervisors"]
        ranks = [each["rank_pid"] for each in supervisors]
        standbys = [each["standby_pid"] for each in supervisors]
        pids = [each["pid"] for each in supervisors]
        children = [{child.pid for child in psutil.Process(pid).children()} for pid in pids]
        templates = [min(each.difference(ranks, standbys), default=0) for each in children]
        return Targets(scheduler["pid"], ranks, pids, standbys, templates)

    def send(self, number: signal.Signals, *pids: int) -> None:
        """Signals to processes, of which the first one's end may end the others."""
        os.kill(pids[0], number)
        for pid in pids[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def order(self, place: str, rank: int, do: str, **details: Any) -> None:
        """Have the next call of a place do something: see inject/sitecustomize.py."""
        path = self._triggers / f"{place}-{rank}"
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({"do": do, **details}))
        scratch.rename(path)

    def pending_orders(self) -> list[str]:
        """Those that nobody has obeyed yet."""
        return [path.name for path in self._triggers.iterdir()]

    # -- looking at it -------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """Raises when the server does not answer or has a zombie."""
        children = set(psutil.Process(self.stack.process.pid).children(recursive=True))
        # A rank whose first supervisor was killed is nobody's child any more.
        children |= set(map(psutil.Process, self.facts().rank_pids))
        zombies = [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
        assert not zombies, f"nobody waits for {zombies}"
        return Holdings(
            processes=len(children),
            gateway_fds=psutil.Process(self.status()["gateway"]["pid"]).num_fds(),
            scheduler_fds=psutil.Process(self.stack.scheduler()["pid"]).num_fds(),
        )

    def facts(self) -> Facts:
        """Raises when the server does not answer."""
        scheduler = self.stack.scheduler()
        return Facts(
            rank_pids=tuple(each["rank_pid"] for each in scheduler["supervisors"]),
            supervisor_pids=tuple(each["pid"] for each in scheduler["supervisors"]),
            scheduler_pid=scheduler["pid"],
            epoch=int(scheduler["epoch"]),
            replays=self.stack.metric("surestep:replayed_requests_total"),
            incidents=tuple(
                Incident(i["epoch"], i["cause"], i["detect_s"], i["recover_s"])
                for i in scheduler["incidents"]
            ),
            drafter_faults=self.stack.metric("surestep:drafter_faults_total"),
        )

    def tracebacks(self) -> list[str]:
        """Those in its logs that are not what a fault of the suite was to cause."""
        logs = [*sorted(self.stack.logs.rglob("*.log")), self.stack.logs.parent / "console.log"]
        return [
            f"{path.name}: {found[0]}"
            for path in logs
            for found in _TRACEBACK.finditer(path.read_text(errors="replace"))
            if not any(words in found[0] for words in _ORDERED)
        ]

    def has_standbys(self) -> bool:
        """The scheduler, and each rank, have a process that waits to replace it."""
        scheduler = self.status()["scheduler"]
        if scheduler is None or not all(each["standby_pid"] for each in scheduler["supervisors"]):
            return False
        watchdog = psutil.Process(scheduler["pid"]).parent()
        return watchdog is not None and len(watchdog.children()) > 1

    def draft_again(self) -> None:
        """Speculation that an earlier fault has suspended goes on: a new scheduler forgets."""
        if self.stack.metric("surestep:speculation_suspended"):
            old = self.facts().scheduler_pid
            self.send(signal.SIGKILL, old)
            self.stack.wait_until(lambda: self._is_served_by_another(old), "a new scheduler", 60)

    def _is_served_by_another(self, scheduler_pid: int) -> bool:
        scheduler = self.status()["scheduler"]
        return (
            scheduler is not None
            and scheduler["pid"] != scheduler_pid
            and self.stack.is_ready()
            and self.has_standbys()
        )

    def idle(self) -> bool:
        """No request is open anywhere and nothing is held for one."""
        names = (
            *("vllm:num_requests_running", "vllm:num_requests_waiting"),
            *("vllm:kv_cache_usage_perc", "surestep:slots_used"),
        )
        with contextlib.suppress(AssertionError):  # no metrics: the scheduler is not back
            held = [self.stack.metric(name) for name in names]
            return held == [0, 0, 0, 0] and self.stack.get("/load")["server_load"] == 0
        return False

    def whole(self, before: Holdings) -> bool:
        """As many processes as before, and no growing number of files."""
        with contextlib.suppress(psutil.NoSuchProcess, TypeError, AssertionError):
            now = self.holdings()
            return (
                now.processes == before.processes
                and now.gateway_fds <= before.gateway_fds + 4
                and now.scheduler_fds <= before.scheduler_fds + 4
            )
        return False

    def recovered(self, before: Holdings) -> None:
        """Ready, idle and whole within a minute, no error unexplained, or the test fails."""
        stack = self.stack
        stack.wait_until(stack.is_ready, "readiness", timeout_s=60)
        stack.wait_until(self.idle, "idleness", timeout_s=30)
        stack.wait_until(lambda: self.whole(before), f"the state of before, {before}", timeout_s=30)
        assert not (found := self.tracebacks()), "\n".join(found)


@contextlib.contextmanager
def serve_for_faults(
    model: Path,
    folder: Path,
    *flags: str,
    within: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[FaultyServer]:
    """Start, wait until ready, yield, stop. The rest is for `serve`."""
    triggers = folder / "triggers"
    triggers.mkdir(parents=True)
    surroundings = {
        **PACED,
        "FAULT_TRIGGERS": str(triggers),
        "SURESTEP_GRPC_SECRET": SECRET,
        **(variables or {}),
    }
    with serve(
        model,
        folder / "logs",
        *_FLAGS,
        *flags,
        variables=surroundings,
        within=within,
        console=folder / "console.log",
    ) as stack:
        yield FaultyServer(stack, triggers)
