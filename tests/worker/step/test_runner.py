"""The number of threads of steps: what is quicker stays, fewer where they are as quick."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from surestep_worker.step.runner import StepThreads

STEPS = 2000


class Machine:
    """Steps whose time follows from their threads; there is no other clock."""

    def __init__(self, most: int, seconds: Mapping[int, float]) -> None:
        self.now = 0.0
        self.seconds = dict(seconds)
        self.used = [most]
        self.threads = StepThreads(most, self.used.append, lambda: self.now)

    def run(self, num_tokens: int = 1, steps: int = STEPS) -> list[int]:
        """The threads that each of so many steps had."""
        had = []
        for _ in range(steps):
            with self.threads.of_step(num_tokens):
                self.now += self.seconds[self.used[-1]]
            had.append(self.used[-1])
        return had


@pytest.mark.parametrize(
    ("most", "seconds", "best"),
    [
        (2, {1: 1.0, 2: 1.0}, 1),  # the core that is left is of use to others
        (2, {1: 0.8, 2: 1.0}, 1),
        (2, {1: 1.3, 2: 1.0}, 2),
        (8, {1: 4.0, 2: 2.0, 4: 1.0, 8: 1.0}, 4),
        (8, {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}, 1),
        (8, {1: 4.0, 2: 2.0, 4: 1.5, 8: 1.0}, 8),
        (6, {1: 1.0, 2: 1.05, 3: 1.1, 6: 1.2}, 1),
    ],
)
def test_what_is_quicker_stays(most: int, seconds: Mapping[int, float], best: int) -> None:
    had = Machine(most, seconds).run()[STEPS // 2 :]
    assert had.count(best) > 0.95 * len(had)


def test_a_machine_that_changes_is_followed() -> None:
    machine = Machine(2, {1: 1.0, 2: 1.0})
    assert machine.run()[-1] == 1
    machine.seconds[2] = 0.5
    assert machine.run()[-1] == 2
    machine.seconds[1] = 0.5
    assert machine.run()[-1] == 1


def test_sizes_are_told_apart_and_large_steps_have_all() -> None:
    machine = Machine(2, {1: 1.0, 2: 1.0})
    machine.run(1)
    machine.seconds[1] = 3.0
    assert machine.run(4)[-1] == 2
    assert set(machine.run(8)) == {2}
    assert set(machine.run(512)) == {2}
    assert machine.run(1, steps=1) == [1]


def test_one_thread_is_never_changed() -> None:
    machine = Machine(1, {1: 1.0})
    assert set(machine.run()) == {1}
    assert machine.used == [1]


def test_a_step_that_fails_says_nothing_of_its_threads() -> None:
    machine = Machine(2, {1: 1.0, 2: 1.0})
    for _ in range(STEPS):
        with pytest.raises(ValueError, match="broken"), machine.threads.of_step(1):
            raise ValueError("broken")
    assert set(machine.used) == {2}
