"""The schedulers behind this gateway: which one a request goes to, and when.

Those of a pool are replicas of one model, each with its own workers. A request goes to the one that
has seen its prefix, unless it would wait there, or that one is overloaded. Rendezvous hashing
(Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): every scheduler
has a rank for every prefix, and one that goes away moves only its own. Away from home it goes to
the less loaded of two drawn from the next ranks. All gateways would run to the least loaded at
once, for loads are up to a second old (Mitzenmacher, "How useful is old information?", 2000). The
sequences of one request are admitted as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from surestep_common.errors import ModelChanged, ModelNotLoaded, Unavailable
from surestep_proto.scheduler_pb2 import SchedulerInfo
from surestep_proto.worker_pb2 import Adapter

from surestep_gateway.schedulers.losses import IsolationQueue
from surestep_gateway.schedulers.members import Members
from surestep_gateway.schedulers.scheduler_client import RETRY_AFTER_S, SchedulerClient

logger = logging.getLogger(__name__)

_PREFIX_TOKENS = 256  # system prompts differ by then
SLACK = 4  # requests, and
FACTOR = 1.5  # times the least load: what a prefix cache hit is worth
OTHERS = 4  # schedulers that have room and less to do than a prefix's home; two of them are drawn


class SchedulerPool:
    """Chooses the scheduler for each request. `run` must be running."""

    def __init__(
        self, urls: Sequence[str], name: str = "the model", *, comes_and_goes: bool = False
    ) -> None:
        """`urls` are those of --scheduler-url; `name` is the model's.

        `comes_and_goes`: requests wake the model, if others see to what `on_want` tells. Needs a
        running event loop.
        """
        self.name = name
        self.comes_and_goes = comes_and_goes
        self.on_want: Callable[[], None] = lambda: None
        self.num_waiting = 0  # requests
        self.used_at = time.monotonic()  # when it was last seen with a request
        self.loading = False
        self.no_room = False  # to load it
        self.retry_at = -math.inf  # before that it is not loaded again
        self._fault: ModelNotLoaded | None = None  # the reason
        self._changed = asyncio.Event()
        self._lost_at: float | None = -math.inf  # since when none serves; None while one does
        self.isolation = IsolationQueue()
        self._info: SchedulerInfo | None = None  # of the scheduler that told it last
        self._members = Members(urls, self._notify)

    @property
    def schedulers(self) -> tuple[SchedulerClient, ...]:
        """The ones that there are now. Others may come, and they leave, while one waits."""
        return self._members.all

    async def run(self) -> None:
        """Follow the schedulers, and the lists of them, until cancelled."""
        await self._members.run()

    async def close(self) -> None:
        """Close the channels, which cancels open calls."""
        await self._members.close()

    @property
    def serving(self) -> bool:
        """Return whether any scheduler would accept a request now."""
        return bool(self._members.usable())

    @property
    def is_known(self) -> bool:
        """Return whether `info` has facts."""
        return self._known_info() is not None

    @property
    def asleep(self) -> bool:
        """Return whether a request has to wake the model."""
        there_are = self.comes_and_goes and bool(self.schedulers)
        return there_are and all(scheduler.asleep for scheduler in self.schedulers)

    @property
    def busy(self) -> bool:
        """Return whether there are requests for the model, as far as known."""
        return self.num_waiting > 0 or any(scheduler.load for scheduler in self.schedulers)

    @property
    def residence(self) -> str:
        """Place of the model, in llama.cpp's words."""
        if self._fault is not None and time.monotonic() < self.retry_at:
            return "failed"
        if self.asleep and not self.loading:
            return "sleeping" if self.is_known else "unloaded"
        return "loaded" if self.serving else "loading"

    def is_well(self, bound_s: float) -> bool:
        """Return whether it serves, or did `bound_s` seconds ago, or rests as it is meant to."""
        if self.serving or self.comes_and_goes or any(one.paused for one in self.schedulers):
            return True
        return self._lost_at is None or time.monotonic() - self._lost_at < bound_s

    def why_not(self, stall_s: float) -> str:
        """Return why a request sent now would not be served; empty where it would.

        Schedulers whose requests got no token for `stall_s` seconds do not count.
        """
        admitting = self._members.usable()
        if not admitting and not self._may_come:
            return f"the model is not ready{self.trouble}"
        if admitting and all(scheduler.stalled(stall_s) for scheduler in admitting):
            return f"requests run, but no token came for {stall_s:g} s"
        return ""

    @property
    def _may_come(self) -> bool:
        """Return whether waiting for the model is worth while, for as long as it takes."""
        return (self.asleep or self.loading) and not self.no_room

    def begin_loading(self) -> None:
        """Have requests wait for the model."""
        self.loading, self._fault = True, None

    def end_loading(self) -> None:
        """Have them wait no longer than for any other."""
        self.loading = False
        self._notify()

    def fail(self, fault: ModelNotLoaded, pause_s: float) -> None:
        """Refuse requests for so many seconds."""
        self._fault, self.retry_at = fault, time.monotonic() + pause_s

    def _check_fault(self) -> None:
        """Raise ModelNotLoaded while the model is left alone."""
        left_s = self.retry_at - time.monotonic()
        if self._fault is not None and left_s > 0:
            raise ModelNotLoaded(self._fault.message, retry_after=math.ceil(left_s))

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[None]:
        self.num_waiting += 1
        self.on_want()
        try:
            yield
        finally:
            self.num_waiting -= 1
            self.used_at = time.monotonic()

    async def known(self, timeout_s: float) -> SchedulerInfo:
        """Return facts of the model, which is woken for them if it comes and goes.

        Raise Unavailable before they are known, after `timeout_s` without hope for them.
        """
        with self._wanted():
            began = time.monotonic()
            while self.comes_and_goes and not self.is_known:
                self._check_fault()
                if self._may_come:
                    began = time.monotonic()
                await self._wait_for_change(began + timeout_s)
        return self.info

    @property
    def info(self) -> SchedulerInfo:
        """Facts of the served model. Raise Unavailable before they are known."""
        if (found := self._known_info()) is not None:
            return found
        raise Unavailable(f"the model is not ready yet{self.trouble}", retry_after=RETRY_AFTER_S)

    def _known_info(self) -> SchedulerInfo | None:
        """Return what a scheduler says that serves, else one that did, if it has left meanwhile."""
        known = [one for one in self.schedulers if one.info is not None and one.proven]
        if known:
            first = min(known, key=lambda one: (not one.serving, one.leaving))
            self._info = first.info
            names = {adapter.name for adapter in first.adapters}
            others = [one for one in self.adapters.values() if one.name not in names]
            if self._info is not None and others:
                self._info = SchedulerInfo.FromString(self._info.SerializeToString())
                self._info.adapters.extend(others)
        return self._info

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters that requests may name, by name."""
        return self._members.adapters

    @property
    def adapters_turn(self) -> asyncio.Lock:
        """The lock of those who load or unload adapters."""
        return self._members.adapters_turn

    @property
    def trouble(self) -> str:
        """Why schedulers do not serve, to append to a message; empty when nothing is known."""
        if self.no_room:
            return ": as many models as fit are awake, and all have requests"
        known = dict.fromkeys(
            told
            for told in (*(one.trouble for one in self.schedulers), self._members.trouble)
            if told
        )
        return f": {'; '.join(known)}" if known else ""

    def pick(
        self,
        key: bytes,
        avoid: Collection[SchedulerClient] = (),
        model: str = "",
        adapter: str = "",
    ) -> SchedulerClient | None:
        """Return the scheduler for a prefix (see `prefix_key`), None if none accepts requests.

        With the fingerprint of a `model`, or the name of an `adapter`, only schedulers that may
        serve it are considered.
        """
        usable = self._members.usable(model, avoid, adapter)
        candidates = [
            RoutingCandidate(one.address, one.load, one.stats.num_slots_total, one.full)
            for one in usable
        ]
        return usable[choose(key, candidates)] if usable else None

    async def acquire(
        self, key: bytes, timeout_s: float, model: str = "", adapter: str = ""
    ) -> SchedulerClient:
        """Wait until `pick` has a scheduler and return it.

        Raise Unavailable after `timeout_s`, which begin anew when a scheduler has drained, whose
        successor comes then, or is paused no more; and at once where all refuse requests meanwhile.
        Raise ModelChanged when every scheduler serves another model.
        """
        scheduler = self.pick(key, (), model, adapter)
        if scheduler is None:
            with self._wanted():
                scheduler = await self._wait_for_one(key, timeout_s, model, adapter)
        self.used_at = time.monotonic()
        return scheduler

    async def _wait_for_one(
        self, key: bytes, timeout_s: float, model: str, adapter: str
    ) -> SchedulerClient:
        began = time.monotonic()
        while (scheduler := self.pick(key, (), model, adapter)) is None:
            self._check_fault()
            known = self.schedulers
            if known and not any(scheduler.may_have(model) for scheduler in known):
                raise ModelChanged("the request was begun with another model than is served now")
            if known and all(scheduler.refuses for scheduler in known):
                raise Unavailable(f"no scheduler serves{self.trouble}", retry_after=RETRY_AFTER_S)
            paused = any(scheduler.paused for scheduler in known)
            if self._may_come if self.comes_and_goes else paused:
                began = time.monotonic()
            drained_at = max([began, *(scheduler.drained_at for scheduler in known)])
            await self._wait_for_change(drained_at + timeout_s)
        return scheduler

    async def until_admits(self, scheduler: SchedulerClient, timeout_s: float) -> None:
        """Wait until this scheduler accepts requests. Raise Unavailable after `timeout_s`, or when
        it leaves.
        """
        deadline = time.monotonic() + timeout_s
        while not scheduler.admits(time.monotonic()):
            if scheduler not in self.schedulers:
                raise Unavailable(f"scheduler {scheduler.address} has left")
            await self._wait_for_change(deadline)

    async def _wait_for_change(self, deadline: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise Unavailable(f"no scheduler serves{self.trouble}", retry_after=RETRY_AFTER_S)
        waits = [
            wait
            for scheduler in self.schedulers
            if (wait := scheduler.breaker.waits_s(now)) is not None
        ]
        changed = self._changed
        try:
            async with asyncio.timeout(min([deadline - now, *waits])):
                await changed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        """Wake all tasks that wait now; later ones wait for the next change."""
        for scheduler in self._members.helpless():
            scheduler.hand_over()
        if self.serving:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()


class RoutingCandidate(NamedTuple):
    """A scheduler that would accept the request."""

    address: str
    load: int  # requests that it works on or has waiting, whichever gateway sent them
    num_slots: int = 0  # requests that it runs at once; 0: not known
    full: bool = False  # it has no room in its queue

    @property
    def waits(self) -> bool:
        """Return whether one more request would wait there."""
        return 0 < self.num_slots <= self.load


def prefix_key(root: bytes, prompt_ids: Sequence[int]) -> bytes:
    """Return a key, equal for requests that may share the start of their prompts in a prefix
    cache. They have one `root`, see cache_root.
    """
    prefix = array("I", prompt_ids[:_PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(prefix, key=root, digest_size=16).digest()


def session_key(root: bytes, session: str) -> bytes:
    """Return a key that the requests of a session have in common."""
    return hashlib.blake2b(session.encode(), key=root, digest_size=16).digest()


def choose(key: bytes, candidates: Sequence[RoutingCandidate]) -> int:
    """Return the index of the candidate for a prefix, of those with room if there are any; there
    must be a candidate.
    """
    fit = [i for i, one in enumerate(candidates) if not one.full] or range(len(candidates))
    ranked = sorted(fit, key=lambda i: _rank(key, candidates[i]), reverse=True)
    least = min(ranked, key=lambda i: candidates[i].load)
    limit = SLACK + FACTOR * candidates[least].load
    home, all_wait = candidates[ranked[0]], candidates[least].waits
    if home.load <= limit and (all_wait or not home.waits):
        return ranked[0]
    others = [
        i
        for i in ranked
        if candidates[i].load < home.load and (all_wait or not candidates[i].waits)
    ][:OTHERS]
    drawn = random.sample(others, min(2, len(others)))
    return min(drawn, key=lambda i: candidates[i].load)


def _rank(key: bytes, candidate: RoutingCandidate) -> bytes:
    return hashlib.blake2b(candidate.address.encode(), key=key, digest_size=8).digest()


class Siblings:
    """While one sequence is at a scheduler, the others may wait for room in its queue.

    So a request of more sequences than a queue has room for is served, and one that finds no room
    at all is refused at once. The sequences wait in line, and the first of them retries now and
    then.
    """

    def __init__(self) -> None:
        self._calls = 0  # that are open
        self._started = False  # some scheduler has run one
        self._line = asyncio.Lock()
        self._room = asyncio.Semaphore(0)  # one more try for each that has left a queue

    @property
    def accepted(self) -> bool:
        """Return whether any sequence of the request has been accepted."""
        return self._calls > 0 or self._started

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count the call of one sequence as open."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def started(self) -> None:
        """Record that one sequence has left the queue."""
        self._started = True
        self._room.release()

    async def wait_for_room(self, retry_after_s: float) -> None:
        """Wait in line until another attempt may succeed."""
        async with self._line:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_after_s):
                    await self._room.acquire()
