"""Random requests that end the workers, random deaths besides, random arrivals."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surestep_scheduler.core.poison import (
    CANARY,
    OUTSIDE_LOSS,
    WHOLE_LOSS,
    PoisonSearch,
    Window,
)

_FRUITLESS_LOSSES = 24  # losses in vain, after which suspects are tried one by one
_CHUNK = 8  # tokens of a prompt that one step takes


@dataclass
class Job:
    """A request. Positions in tokens."""

    arrives: int  # step
    prompt: int
    length: int  # when it has finished
    fatal: int | None  # the workers end when they come to this position
    by_shape: bool = False  # and only in the usual shape
    known: int = 0
    committed: int = 0

    def __post_init__(self) -> None:
        self.known = self.prompt


@dataclass
class Plant:
    """Workers and a scheduler in miniature: plans in flight, replays from the first token."""

    jobs: dict[str, Job]
    num_slots: int
    depth: int
    deaths: set[int]  # steps at which the workers end for no reason of ours
    signals: float = 0.0  # share of the steps at which somebody kills the workers
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    victim: str = ""  # somebody kills the workers when this request comes to position `spot`
    spot: int = 0
    strikes: int = 0  # so many times
    broken_after: int | None = None  # executed steps of an epoch after which the machine fails
    poison: PoisonSearch = field(default_factory=PoisonSearch)
    failed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    step: int = 0
    losses: int = 0  # but for those by signals
    kills: int = 0

    def run(self, max_losses: int) -> None:
        while self.jobs and self.losses < max_losses:
            self.epoch()

    def epoch(self) -> None:
        running: dict[str, int] = {}  # and the length if everything in flight is committed
        plans: deque[dict[str, int]] = deque()
        for job in self.jobs.values():
            job.committed = 0
        self.jobs.pop(CANARY, None)
        for executed in range(10_000):
            self.admit(running)
            while len(plans) <= self.depth and (plan := self.plan(running)):
                plans.append(plan)
            self.step += 1
            if not self.jobs:
                return
            if not plans:
                continue
            killed = self.rng.random() < self.signals or self.is_struck(plans[0])
            if killed or self.dies(plans[0], executed):
                self.kills += killed
                self.losses += not killed
                under_way = {name for plan in plans for name in plan if name in self.jobs}
                windows = {n: Window(self.jobs[n].committed, running[n]) for n in sorted(under_way)}
                self.poison.lost(windows, OUTSIDE_LOSS if killed else WHOLE_LOSS)
                return
            self.apply(plans.popleft(), running)
        raise AssertionError("a request starves")

    def admit(self, running: dict[str, int]) -> None:
        if self.poison.needs_canary:
            self.jobs.setdefault(CANARY, Job(self.step, 1, 16, None))
        for name, job in self.jobs.items():
            free = len(running) < self.num_slots and name not in running
            if free and job.arrives <= self.step and self.poison.allows(name):
                running[name] = 0

    def plan(self, running: dict[str, int]) -> dict[str, int]:
        """How far each row goes."""
        plan = {}
        for name, upto in running.items():
            job = self.jobs[name]
            chunk = _CHUNK // 3 if self.poison.reshapes(name) else _CHUNK
            end = min(upto + chunk, job.known) if upto < job.known else upto + 1
            if end <= job.length:
                plan[name] = running[name] = end
        return plan

    def dies(self, plan: dict[str, int], executed: int) -> bool:
        fatal = any(self.is_fatal(name, end) for name, end in plan.items() if name in self.jobs)
        return fatal or self.step in self.deaths or executed == self.broken_after

    def is_struck(self, plan: dict[str, int]) -> bool:
        job, end = self.jobs.get(self.victim), plan.get(self.victim, 0)
        struck = self.strikes > 0 and job is not None and job.committed < self.spot <= end
        self.strikes -= struck
        return struck

    def is_fatal(self, name: str, end: int) -> bool:
        job = self.jobs[name]
        harmless = job.by_shape and self.poison.reshapes(name)
        return job.fatal is not None and job.committed < job.fatal <= end and not harmless

    def apply(self, plan: dict[str, int], running: dict[str, int]) -> None:
        for name, end in plan.items():
            if name not in self.jobs:
                continue
            job = self.jobs[name]
            job.committed, job.known = end, max(job.known, end + 1)
            if end >= job.length:
                self.close(name, self.finished, running)
        culprit = self.poison.applied({name: self.jobs[name].committed for name in running})
        if culprit is not None:
            self.close(culprit, self.failed, running)

    def close(self, name: str, where: list[str], running: dict[str, int]) -> None:
        del self.jobs[name]
        running.pop(name, None)
        self.poison.close(name)
        if name == CANARY:
            self.poison.canary_lived()
        else:
            where.append(name)


def jobs(rng: random.Random, num: int, num_fatal: int, spread: int) -> dict[str, Job]:
    made = {}
    for index in range(num):
        prompt, output = rng.randint(1, 60), rng.randint(1, 40)
        fatal = rng.randint(1, prompt + output) if index < num_fatal else None
        made[f"r{index}"] = Job(rng.randint(0, spread), prompt, prompt + output, fatal)
    names = list(made)
    rng.shuffle(names)
    return {name: made[name] for name in names}


def each(num: int, num_slots: int) -> int:
    """Most losses until one is found that ends the workers at some position."""
    return math.ceil(math.log2(min(num, num_slots))) + 4


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    num=st.integers(1, 40),
    num_fatal=st.integers(0, 3),
    num_slots=st.integers(1, 32),
    depth=st.integers(0, 2),
    spread=st.sampled_from([0, 0, 50, 300]),
    death=st.none() | st.integers(0, 400),
)
def test_only_fatal_requests_fail(
    seed: int, num: int, num_fatal: int, num_slots: int, depth: int, spread: int, death: int | None
) -> None:
    """Wherever one more death hits. The others finish, and the search takes logarithmic time."""
    made = jobs(random.Random(seed), num, num_fatal, spread)
    fatal = sorted(name for name, job in made.items() if job.fatal is not None)
    plant = Plant(made, num_slots, depth, deaths=set() if death is None else {death})
    plant.run(max_losses=1000)
    assert sorted(plant.failed) == fatal
    assert len(plant.finished) == num - len(fatal)
    most = 2 * each(num, num_slots) * max(len(fatal), 1)
    hiding = _FRUITLESS_LOSSES + 4 * len(fatal) if len(fatal) > 1 else 0
    assert plant.losses <= most + hiding + 2 * (death is not None)


@pytest.mark.parametrize(
    ("seed", "num", "num_fatal", "num_slots", "depth"),
    [
        (2810746478, 2, 2, 22, 2),
        (223456522, 3, 3, 4, 0),
        (168099949, 19, 3, 17, 1),
        (3725356588, 10, 3, 2, 2),
        (739397324, 16, 3, 23, 0),
    ],
)
def test_those_that_hide_each_other_are_found(
    seed: int, num: int, num_fatal: int, num_slots: int, depth: int
) -> None:
    """What one does moves the spot at which another seems to be lost, again and again."""
    plant = Plant(jobs(random.Random(seed), num, num_fatal, 0), num_slots, depth, set())
    plant.run(max_losses=1000)
    assert sorted(plant.failed) == [f"r{i}" for i in range(num_fatal)]
    assert (
        _FRUITLESS_LOSSES < plant.losses <= _FRUITLESS_LOSSES + 4 * num_fatal + each(num, num_slots)
    )


@pytest.mark.parametrize("seed", range(30))
def test_many_random_deaths_convict_nobody(seed: int) -> None:
    rng = random.Random(seed)
    deaths = {step for step in range(3000) if rng.random() < 0.03}
    plant = Plant(jobs(rng, 60, 0, 300), 16, 1, deaths)
    plant.run(max_losses=1000)
    assert plant.failed == []
    assert len(plant.finished) == 60


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    num=st.integers(1, 24),
    num_fatal=st.integers(0, 2),
    depth=st.integers(0, 2),
    signals=st.sampled_from([0.0, 0.02, 0.05]),
)
def test_others_signals_neither_convict_nor_acquit(
    seed: int, num: int, num_fatal: int, depth: int, signals: float
) -> None:
    """Somebody kills the workers every few steps: who is innocent finishes, who is not is found.

    Fewer than eight signals cost no loss more; each eight may have a search begin again.
    """
    made = jobs(random.Random(seed), num, num_fatal, 30)
    fatal = sorted(name for name, job in made.items() if job.fatal is not None)
    plant = Plant(made, 16, depth, set(), signals=signals, rng=random.Random(seed))
    plant.run(max_losses=500)
    assert sorted(plant.failed) == fatal
    assert len(plant.finished) == num - len(fatal)
    assert plant.losses <= 2 * each(num, 16) * len(fatal) * (1 + plant.kills // 8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    num=st.integers(1, 24),
    depth=st.integers(0, 2),
    strikes=st.integers(1, 31),
    at=st.floats(0, 1),
)
def test_signals_at_one_spot_fail_nobody(
    seed: int, num: int, depth: int, strikes: int, at: float
) -> None:
    """They make three losses of the four that a verdict takes of a request that is alone."""
    made = jobs(random.Random(seed), num, 0, 30)
    victim = next(iter(made))
    spot = 1 + int(at * (made[victim].length - 1))
    plant = Plant(made, 16, depth, set(), victim=victim, spot=spot, strikes=strikes)
    plant.run(max_losses=1)
    assert (plant.kills, plant.losses) == (strikes, 0)
    assert plant.failed == []
    assert len(plant.finished) == num


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num", [1, 2, 16])
def test_what_only_one_shape_of_a_step_cannot_do_is_not_the_requests_fault(
    num: int, depth: int
) -> None:
    made = {
        f"r{i}": Job(0, 20, 30, 25 if i == num // 2 else None, by_shape=True) for i in range(num)
    }
    plant = Plant(made, 16, depth, set())
    plant.run(max_losses=100)
    assert plant.failed == []
    assert len(plant.finished) == num
    assert plant.losses <= math.log2(num) + 4


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 4, 16, 32])
def test_one_among_many_is_found_in_logarithmic_time(num_slots: int, depth: int) -> None:
    for index in range(num_slots):
        made = {f"r{i}": Job(0, 20, 30, 25 if i == index else None) for i in range(num_slots)}
        plant = Plant(made, num_slots, depth, set())
        plant.run(max_losses=100)
        assert plant.failed == [f"r{index}"]
        assert plant.losses <= math.log2(num_slots) + 4


@pytest.mark.parametrize("broken_after", [0, 1, 5])
def test_a_broken_machine_convicts_nobody(broken_after: int) -> None:
    """Every epoch ends at once: the canary's too."""
    plant = Plant(jobs(random.Random(1), 12, 0, 0), 8, 1, set(), broken_after=broken_after)
    plant.run(max_losses=200)
    assert plant.losses == 200
    assert plant.failed == []
