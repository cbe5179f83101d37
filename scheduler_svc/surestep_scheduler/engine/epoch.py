"""Epoch: plans go to the workers, results are applied, until the epoch is lost."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from surestep_common.errors import DeadlineExceeded, ModelFault, SurestepError
from surestep_common.invariants import LAST_TOKEN
from surestep_proto import sampling_pb2
from surestep_proto import supervisor_pb2 as pb

from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.messages import Outcome
from surestep_scheduler.core.poison import CANARY, Window
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.policy.schedule import schedule
from surestep_scheduler.policy.tiering import settle

from .incidents import IncidentLog
from .open_requests import OpenRequests, Outbox
from .steps import StepMonitor
from .wire import to_proto
from .workers import WorkerGroup

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 5.0
CANARY_INTERVAL_S = 10.0  # without a token, after which one shows whether the workers live
_CANARY_TOKENS = 16  # of a canary that is to show that the workers live
_SEND_S = 1.0  # that workers get at least to take a plan
_GREEDY = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1)
_DOING = {  # what the ranks are doing, in the reason of a loss
    pb.AT_REST: "the ranks are at rest",
    pb.RUNNING: "the ranks are running",
    pb.WAITING: "the ranks wait for a core or a disk",
    pb.AWAITING_COMPILER: "a kernel is compiled",
    pb.ACTIVITY_UNKNOWN: "what the ranks do is not known",
}
_OVERSLEPT_S = 0.25  # a timeout noticed so late shows a pause of this process, not of the workers


class Epoch:
    """Everything on one event loop; nothing awaits while a step is planned or committed, so
    requests come and go between steps.

    `activity` is asked before workers that are late are given up. `incidents` that no step has
    followed yet end with the first step. While it is `paused` nothing is planned.
    """

    def __init__(
        self,
        state: SchedulerState,
        requests: OpenRequests,
        monitor: StepMonitor,
        incidents: IncidentLog,
        *,
        wake: asyncio.Event,
        clock: Callable[[], float],
        activity: Callable[[], Coroutine[Any, Any, pb.Activity]],
        paused: Callable[[], bool],
    ) -> None:
        self._state = state
        self._requests = requests
        self._monitor = monitor
        self._incidents = incidents
        self._wake = wake
        self._clock = clock
        self._activity = activity
        self._paused = paused
        # Whether workers that were lost are well again is not known yet.
        self._recovering = incidents.pending
        self._token_at = -math.inf if self._recovering else clock()
        self._interruption: SurestepError | None = None

    def interrupt(self, error: SurestepError) -> None:
        """End the epoch for this reason."""
        self._interruption = error
        self._wake.set()

    async def run(self, group: WorkerGroup) -> SurestepError:
        """Step until the epoch is lost; returns why."""
        self._monitor.open_epoch()
        try:
            async with asyncio.TaskGroup() as tasks:
                group.start(tasks, self._wake.set, self._state.epoch)
                if self._state.limits.has_tiers:
                    group.tiers.start(tasks, self._wake.set, self._state.epoch)
                    self._open_tiers()
                await self._drive(group)
        except* SurestepError as lost:
            errors = [error for error in lost.exceptions if isinstance(error, SurestepError)]
        if isinstance(errors[0], DeadlineExceeded):
            self._monitor.missed()
        return errors[0]

    async def _drive(self, group: WorkerGroup) -> None:
        while True:
            await self._send_plans(group)
            await self._wait(group)
            if self._interruption is not None:
                raise self._interruption
            for outcome in group.take():
                self._apply(outcome)
            for answer in group.tiers.take():
                settle(self._state, answer)

    async def _send_plans(self, group: WorkerGroup) -> None:
        state = self._state
        while len(state.in_flight) <= state.limits.pipeline_depth:
            now = self._clock()
            plan = None if self._paused() else schedule(state, now)
            if state.limits.has_tiers:
                group.tiers.send(state.tiers.take_unsent(), state.limits.block_size)
            if plan is None:
                self._monitor.nothing_to_send()
                return
            self._requests.admitted(plan.admissions, now)
            sent = self._monitor.sent(plan, state.speculation.expected, now)
            # Workers that hang take no more plans either: this wait is part of the oldest step's.
            timeout_s = max(self._monitor.lost_at - now, _SEND_S)
            message = to_proto(plan, round(1000 * sent.budget_s)).SerializeToString()
            self._monitor.times.planned(self._clock() - now)
            await group.send(message, timeout_s)

    async def _wait(self, group: WorkerGroup) -> None:
        """Wait until something happens. Raises DeadlineExceeded when the oldest step is late."""
        due_at, canary_at = self._monitor.due_at, self._canary_at()
        wait_s = min(min(due_at, canary_at) - self._clock(), _LONGEST_WAIT_S)
        try:
            async with asyncio.timeout(max(wait_s, 0)):
                await self._wake.wait()
        except TimeoutError:
            now = self._clock()
            if now >= due_at:
                await self._look_at(group, now - due_at)
            elif now >= canary_at:
                self._send_canary(now)
        self._wake.clear()

    async def _look_at(self, group: WorkerGroup, late_s: float) -> None:
        """Find out whether the workers hang. Raises DeadlineExceeded if they do."""
        if late_s > _OVERSLEPT_S and self._monitor.extend_deadline(self._clock()):
            return
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._activity())
            asking.add_done_callback(lambda _: self._wake.set())
            while not (asking.done() or group.has_outcome or self._interruption):
                self._wake.clear()
                await self._wake.wait()
            asking.cancel()
        if group.has_outcome or self._interruption:
            return
        doing = asking.result()
        now = self._clock()
        if not self._monitor.has_more_time(doing, now):
            silent_s = self._monitor.silent_s(now)
            raise DeadlineExceeded(f"no result within {silent_s:.1f} s; {_DOING[doing]}")

    def _apply(self, outcome: Outcome) -> None:
        state, now = self._state, self._clock()
        if outcome.epoch != state.epoch:
            state.counters.fenced_messages += 1
            return
        outputs = commit_result(state, outcome)
        before = self._monitor.last_step_at
        sent, took_s = self._monitor.answered(1e-6 * outcome.times[0].gap_us, now)
        since_s = now - before if sent.follows and before is not None else took_s
        self._monitor.times.answered(took_s, outcome.times, follows=sent.follows)
        self._monitor.recent.add(outcome, sent.mode, now, took_s)
        if sent.expected.us:
            state.speculation.took(
                sent.expected, 1e6 * took_s, 1e6 * since_s, outcome.times[0].took, outcome.rows
            )
        if any(output.token_ids or output.pooled for output in outputs):
            self._monitor.last_token_at = self._token_at = now
        self._requests.deliver(outputs)
        self._monitor.times.applied(self._clock() - now)
        if self._recovering:
            self._recovered(now)
        if state.poison.active:
            self._fail_culprit()

    def _recovered(self, now: float) -> None:
        """Close the incidents that no step had followed."""
        self._recovering = False
        for incident in self._incidents.recovered(now):
            logger.info(
                "recovered from the loss of epoch %d in %.1f s: %d requests, %d tokens replayed, "
                "%d of them kept",
                incident.epoch,
                incident.recover_s,
                *incident.replay,
                incident.num_kept,
            )

    def _fail_culprit(self) -> None:
        """Fail the request that is found to end the workers, if there is one by now."""
        state = self._state
        committed = state.slots.committed
        lengths = {t.seq.request.id: int(committed[t.slot]) for t in state.running}
        culprit = state.poison.applied(lengths)
        if culprit is None:
            return
        num_losses, seq = state.poison.num_losses(culprit), state.open[culprit]
        message = f"this request ended the workers {num_losses} times, at last alone"
        logger.error("request %s is given up: %s", culprit, message)
        state.counters.poisoned_requests += 1
        state.end(seq, "error")
        self._requests.fail(seq, ModelFault(message))

    # -- canaries ------------------------------------------------------------------------------

    def _canary_at(self) -> float:
        """Return when the workers should be asked for a token that no client reads."""
        if self._paused():
            return math.inf
        if self._state.poison.needs_canary:
            return math.inf if CANARY in self._state.open else -math.inf
        if self._state.open:
            return math.inf
        return self._token_at + CANARY_INTERVAL_S

    def _open_tiers(self) -> None:
        """Have a first step: workers take orders to their tiers from then on."""
        if CANARY not in self._state.open:
            self._send_canary(self._clock())

    def _send_canary(self, now: float) -> None:
        """Queue an ordinary request, so that what it shows holds for the others."""
        length = _CANARY_TOKENS if self._state.poison.needs_canary else 1
        headless = self._state.limits.headless
        request = Request(
            id=CANARY,
            prompt_ids=[0] * (length if headless else 1),
            emitted_ids=[],
            max_tokens=1 if headless else length,
            pooling=LAST_TOKEN if headless else 0,
            draft_cap=0,
            sampling=None if headless else _GREEDY,
        )
        self._requests.open(self._state.add(request, now), Outbox())  # without a reader
        self._token_at = now  # one at a time


def under_way(state: SchedulerState) -> dict[str, Window]:
    """Return the open requests with rows in unanswered plans, and where these may have come to."""
    slots = state.slots
    named = {slot for plan in state.in_flight for slot in plan.rows.slot.tolist()}
    slot = np.array(sorted(named), dtype=np.int64)
    slot = slot[slots.open[slot]]
    windows = map(Window, slots.committed[slot].tolist(), slots.len_hi[slot].tolist())
    return dict(zip((t.seq.request.id for t in slots.tenancy[slot]), windows, strict=True))
