"""The faults of the suite: how each is caused, and what shows that it happened."""

from __future__ import annotations

import itertools
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
from support.faults.server import Facts, FaultyServer, Targets

SEED = 20_261_121
_ALL = ("none", "ngram", "mtp")
FOREVER_S = 600  # longer than anyone waits: whoever blocks for it has to be killed
Inject = Callable[[FaultyServer, Targets, int], None]  # the server, and the rank to hurt
Proof = Callable[[Facts, Facts], bool]  # before and after


@dataclass(frozen=True, slots=True)
class Setup:
    """What a server of the matrix is started with."""

    speculation: str  # none, ngram, mtp; or glm, which is a model of its own with mtp
    ranks: int

    def __str__(self) -> str:
        return f"{self.speculation}-tp{self.ranks}"

    @property
    def drafter(self) -> str:
        """As in `drafters` of a fault."""
        return "mtp" if self == GLM else self.speculation


@dataclass(frozen=True, slots=True)
class Fault:
    """`setups` take turns; `drafters` are those for which it means something."""

    name: str
    inject: Inject
    proof: Proof
    pause_s: float  # no client waits longer for its next token
    setups: tuple[str, ...]
    drafters: tuple[str, ...] = _ALL
    causes: tuple[str, ...] = ()  # of the lost epoch, in the server's own words, if it knows any
    needs_ranks: bool = False  # several
    needs_drafts: bool = False  # speculation must not be suspended for an earlier fault
    waits_for: str = ""  # the part of the product that is not there yet


SETUPS = tuple(Setup(*pair) for pair in itertools.product(("none", "ngram", "mtp"), (1, 2)))
GLM = Setup("glm", 2)  # vllm-project/vllm#40926; meets the faults that name it, and no others
_GLM_ONE_IN, _GLM_TURN = 6, 1  # shares
# Two setups to a share, that a run starts two servers.
TURNS = (("none-tp1", "mtp-tp2"), ("ngram-tp2", "mtp-tp1"), ("none-tp2", "ngram-tp1"))
_DRAFTING = ("ngram", "mtp")


def turn_of(setup: str) -> int:
    """Return which third of the shares starts a server for this setup."""
    return next(turn for turn, setups in enumerate(TURNS) if setup in setups)


def cases(share: int | None) -> Iterator[tuple[Setup, Fault]]:
    """What to run, setup by setup: half the faults of this third once, or all of them everywhere."""
    for setup, fault in itertools.product(SETUPS, FAULTS):
        chosen = share is None or str(setup) == _setup_of(fault, share)
        if chosen and _concerns(fault, setup) and not fault.waits_for:
            yield setup, fault
    if share is None or share % _GLM_ONE_IN == _GLM_TURN:
        yield from ((GLM, fault) for fault in FAULTS if str(GLM) in fault.setups)


def _concerns(fault: Fault, setup: Setup) -> bool:
    return setup.drafter in fault.drafters and (setup.ranks > 1 or not fault.needs_ranks)


def _setup_of(fault: Fault, share: int) -> str | None:
    """Where a fault is met in this share; None if it is the turn of other setups."""
    times, turn = divmod(share, len(TURNS))
    setups = [name for name in fault.setups if name in TURNS[turn]]
    its_turn = (times + FAULTS.index(fault)) % 2 == 0
    return setups[times // 2 % len(setups)] if setups and its_turn else None


def shown(fault: Fault, before: Facts, after: Facts) -> bool:
    """Whether the server shows that the fault happened, and names one of its causes."""
    causes = {incident.cause for incident in after.since(before)}
    return fault.proof(before, after) and (not fault.causes or bool(causes & set(fault.causes)))


# -- what shows that it happened ---------------------------------------------------------------


def rank_replaced(before: Facts, after: Facts) -> bool:
    """A new process, and a new epoch in which open requests started again."""
    return before.rank_pids != after.rank_pids and after.replays > before.replays


def scheduler_replaced(before: Facts, after: Facts) -> bool:
    """A new process."""
    return before.scheduler_pid != after.scheduler_pid


def epoch_ended(before: Facts, after: Facts) -> bool:
    """Open requests started again."""
    return after.epoch > before.epoch and after.replays > before.replays


def nothing(before: Facts, after: Facts) -> bool:
    """Same processes, same epoch."""
    return (before.rank_pids, before.scheduler_pid, before.epoch) == (
        *(after.rank_pids, after.scheduler_pid),
        after.epoch,
    )


def adopted(before: Facts, after: Facts) -> bool:
    """Another supervisor looks after the same rank."""
    return before.supervisor_pids != after.supervisor_pids and nothing(before, after)


def drafter_blamed(before: Facts, after: Facts) -> bool:
    """Counted as a fault of the drafter, and nobody had to go.

    Ranks that draft together cannot know of each other's faults: there the epoch may end instead.
    """
    if len(after.rank_pids) > 1 and after.epoch > before.epoch:
        return True
    return after.drafter_faults > before.drafter_faults and nothing(before, after)


def anything(before: Facts, after: Facts) -> bool:
    """How it is answered is up to the server: a process that was stopped is told to go on."""
    return True


# -- how it is caused --------------------------------------------------------------------------


def _signal(number: signal.Signals) -> Inject:
    return lambda server, targets, rank: server.send(number, targets.ranks[rank])


def _signal_all(number: signal.Signals) -> Inject:
    return lambda server, targets, rank: server.send(number, *targets.ranks)


def _signal_scheduler(number: signal.Signals) -> Inject:
    return lambda server, targets, rank: server.send(number, targets.scheduler)


def _signal_supervisor(number: signal.Signals) -> Inject:
    return lambda server, targets, rank: server.send(number, targets.supervisors[rank])


def _order(place: str, do: str, **details: float) -> Inject:
    return lambda server, targets, rank: server.order(place, rank, do, **details)


def _order_first(place: str, do: str, **details: float) -> Inject:
    """For places that matter on rank 0 only."""
    return lambda server, targets, rank: server.order(place, 0, do, **details)


_IN_A_PROMPT = 16  # tokens of a sequence in a pass; one that decodes has fewer, drafts and all
Victim = Callable[[Targets, int], int]  # its pid, given a rank; 0 for whom the order meets


def _kill(place: str, victim: Victim, *, first: bool = False, **details: float) -> Inject:
    """For a place; `first`: one that matters on rank 0 only."""

    def inject(server: FaultyServer, targets: Targets, rank: int) -> None:
        met = 0 if first else rank
        server.order(place, met, "kill", pid=victim(targets, met), **details)

    return inject


def _kill_in_a_prompt(victim: Victim) -> Inject:
    """For a chunk of one more client's prompt, which has several; it is answered, too."""
    order = _kill("forward", victim, row=_IN_A_PROMPT)

    def inject(server: FaultyServer, targets: Targets, rank: int) -> None:
        order(server, targets, rank)
        prompt = f"{uuid.uuid4()} {' '.join(map(str, range(100, 250)))}"  # no part of it is cached
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        reply = httpx.post(f"{server.stack.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text

    return inject


def _kill_beside_the_successor(place: str, victim: Victim, row: int = 0) -> Inject:
    """For a place of the rank that replaces the one which is killed now, and is quick."""

    def inject(server: FaultyServer, targets: Targets, rank: int) -> None:
        old = targets.ranks[rank]
        _kill(place, victim, but=old, row=row)(server, targets, rank)
        server.send(signal.SIGKILL, old)

    return inject


def _kill_standby(server: FaultyServer, targets: Targets, rank: int) -> None:
    """Together with its rank."""
    server.send(signal.SIGKILL, targets.standbys[rank], targets.ranks[rank])


def _kill_template(server: FaultyServer, targets: Targets, rank: int) -> None:
    """Together with its copies, the standby and the rank: the next one starts from scratch."""
    assert targets.templates[rank], "no template"
    pids = targets.templates[rank], targets.standbys[rank], targets.ranks[rank]
    server.send(signal.SIGKILL, *pids)


def _kill_at_an_import(server: FaultyServer, targets: Targets, rank: int) -> None:
    """The supervisor, as soon as that next one has begun to import."""
    server.order("import", rank, "go on")
    _kill_template(server, targets, rank)
    server.stack.wait_until(lambda: not server.pending_orders(), "an import")
    server.send(signal.SIGKILL, targets.supervisors[rank])


def _itself(targets: Targets, rank: int) -> int:
    """The rank that meets the order."""
    return 0


def _timed(name: str, victim: Victim, met: Proof, causes: tuple[str, ...]) -> Iterator[Fault]:
    """A kill in each window in which a rank holds something that others wait for; `met` is what
    shows it where no rank is killed before.
    """
    loading = _kill_beside_the_successor("load", victim)
    replay = _kill_beside_the_successor("forward", victim, row=_IN_A_PROMPT)
    drafting = _kill("propose", victim, first=True)
    windows = (
        ("in-a-prompt", _kill_in_a_prompt(victim), met, ("mtp-tp2", "ngram-tp1"), _ALL),
        ("in-a-layer", _kill("layers", victim), met, ("none-tp1", "mtp-tp2"), _ALL),
        ("while-drafting", drafting, met, ("ngram-tp2", "mtp-tp1"), _DRAFTING),
        ("while-loading", loading, rank_replaced, ("ngram-tp1", "none-tp2"), _ALL),
        ("in-a-replay", replay, rank_replaced, ("mtp-tp1", "none-tp2"), _ALL),
    )
    for window, inject, proof, setups, drafters in windows:
        yield Fault(
            *(f"{name}-{window}", inject, proof, 30),
            setups=setups,
            drafters=drafters,
            causes=causes,
            needs_drafts=drafters == _DRAFTING,
        )


# A rank may be stopped in its drafter, and nobody can tell from outside that it is not to blame.
_EXIT, _HANG = ("worker_exit",), ("worker_hang", "drafter")
_STUCK = ("worker_hang",)  # where it is to blame, however many ranks wait for it
_ERROR = "worker_error", "connection"  # the stream of a failed step may be seen to break first

FAULTS = (
    Fault(
        *("rank-killed", _signal(signal.SIGKILL), rank_replaced, 20),
        setups=("none-tp1", "ngram-tp1", "ngram-tp2", "mtp-tp2", "glm-tp2"),
        causes=_EXIT,
    ),
    Fault(
        *("all-ranks-killed", _signal_all(signal.SIGKILL), rank_replaced, 20),
        setups=("mtp-tp2",),
        causes=_EXIT,
    ),
    Fault(
        *("rank-stopped", _signal(signal.SIGSTOP), rank_replaced, 30),
        setups=("mtp-tp1",),
        causes=_HANG,
    ),
    Fault(
        *("loop-blocked", _order("result", "sleep", s=FOREVER_S), rank_replaced, 30),
        setups=("ngram-tp1",),
        causes=_HANG,
    ),
    Fault(
        *("lock-held", _order("forward", "hold-the-lock", s=FOREVER_S), rank_replaced, 30),
        setups=("none-tp2",),
        causes=_HANG,
    ),
    Fault(
        *("kernel-never-ends", _order("layers", "compute", s=FOREVER_S), rank_replaced, 30),
        setups=("none-tp1", "glm-tp2"),
        causes=_STUCK,
    ),
    Fault(
        *("collective-skipped", _order("collective", "skip"), rank_replaced, 30),
        setups=("none-tp2", "glm-tp2"),
        causes=_STUCK,
        needs_ranks=True,
    ),
    Fault(
        *("collective-not-entered", _order("collective", "sleep", s=FOREVER_S)),
        *(rank_replaced, 30),
        setups=("mtp-tp2", "glm-tp2"),
        causes=_STUCK,
        needs_ranks=True,
    ),
    Fault(
        *("collective-not-left", _order("collective", "stay", s=FOREVER_S), rank_replaced, 30),
        setups=("ngram-tp2", "glm-tp2"),
        causes=_STUCK,
        needs_ranks=True,
    ),
    Fault(
        *("forward-raises", _order("forward", "raise"), epoch_ended, 20),
        setups=("mtp-tp2", "none-tp1"),
        causes=_ERROR,
    ),
    Fault(
        *("out-of-memory", _order("forward", "memory"), epoch_ended, 20),
        setups=("mtp-tp1",),
        causes=_ERROR,
    ),
    Fault(
        *("allocation-fails", _order("forward", "allocate"), epoch_ended, 20),
        setups=("ngram-tp1",),
        causes=_ERROR,
    ),
    Fault(
        *("row-not-finite", _order_first("logits", "nan", rows=1), anything, 20),
        setups=("none-tp1", "mtp-tp1"),
    ),
    Fault(
        *("all-rows-not-finite", _order_first("logits", "nan", rows=1 << 20), anything, 20),
        setups=("ngram-tp2",),
    ),
    Fault(
        *("drafter-raises", _order_first("propose", "raise"), drafter_blamed, 20),
        setups=("ngram-tp1", "mtp-tp2"),
        drafters=_DRAFTING,
        needs_drafts=True,
    ),
    Fault(
        *("drafter-not-finite", _order("head", "nan", rows=1 << 20), drafter_blamed, 20),
        setups=("mtp-tp1",),
        drafters=("mtp",),
        needs_drafts=True,
    ),
    Fault(
        *("drafts-out-of-range", _order_first("propose", "garbage"), drafter_blamed, 20),
        setups=("ngram-tp2",),
        drafters=_DRAFTING,
        needs_drafts=True,
    ),
    Fault(
        *("drafter-stalls", _order_first("propose", "sleep", s=FOREVER_S), rank_replaced, 30),
        setups=("ngram-tp2", "mtp-tp1", "glm-tp2"),
        drafters=_DRAFTING,
        causes=("drafter",),
        needs_drafts=True,
    ),
    Fault(
        *("result-lost", _order("result", "drop"), epoch_ended, 30),
        setups=("none-tp2", "mtp-tp1"),
        causes=("ledger", *_HANG),
    ),
    Fault(
        *("result-twice", _order("result", "duplicate"), anything, 20),
        setups=("ngram-tp1", "mtp-tp2"),
    ),
    Fault("result-late", _order("result", "late", s=0.5), nothing, 20, ("none-tp1",)),
    Fault("result-of-another-epoch", _order("result", "stale"), anything, 20, ("ngram-tp1",)),
    Fault(
        *("scheduler-killed", _signal_scheduler(signal.SIGKILL), scheduler_replaced, 20),
        setups=("none-tp1", "none-tp2", "ngram-tp2", "mtp-tp1"),
    ),
    Fault(
        *("scheduler-stopped", _signal_scheduler(signal.SIGSTOP), anything, 30),
        setups=("mtp-tp2",),
    ),
    Fault(
        *("scheduler-drained", _signal_scheduler(signal.SIGTERM), scheduler_replaced, 30),
        setups=("ngram-tp1",),
    ),
    Fault(
        *("supervisor-killed", _signal_supervisor(signal.SIGKILL), adopted, 10),
        setups=("none-tp2", "ngram-tp1"),
    ),
    *_timed("rank-killed", _itself, rank_replaced, _EXIT),
    *_timed("supervisor-killed", lambda targets, rank: targets.supervisors[rank], adopted, ()),
    *(
        Fault(name, inject, rank_replaced, 30, setups, causes=_EXIT)
        for name, inject, setups in (
            ("rank-killed-with-its-standby", _kill_standby, ("none-tp2", "mtp-tp1")),
            ("rank-killed-with-its-template", _kill_template, ("none-tp1", "mtp-tp2")),
            ("supervisor-killed-at-an-import", _kill_at_an_import, ("mtp-tp1", "ngram-tp2")),
        )
    ),
    Fault(
        *("supervisor-ended", _signal_supervisor(signal.SIGTERM), rank_replaced, 30),
        setups=("ngram-tp1",),
    ),
)
