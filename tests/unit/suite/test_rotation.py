"""Shares of large matrices: together they are everything, and a run says which it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from support.suite import rotation
from support.suite.rotation import commits, has_turn, share_of

IDS = [f"{drafter}-{k}-{where}" for drafter in "abcd" for k in range(5) for where in ("x", "y")]
TURN = re.compile(r"rotates\((\d+), turn=(\d+)\)")
TESTS = """
import pytest
@pytest.mark.parametrize("x", range(12))
@pytest.mark.rotates(4, always=("7",))
def test_matrix(x): assert x < 100
@pytest.mark.parametrize("x", range(3))
def test_small(x): assert x != 1
@pytest.mark.rotates(3, turn=1)
def test_in_turn(): pass
"""


@pytest.mark.parametrize("one_in", [1, 3, 4])
def test_as_many_shares_as_there_are_hold_every_case_once(one_in: int) -> None:
    shares = [share_of(IDS, share, one_in) for share in range(7, 7 + one_in)]
    assert sum(len(share) for share in shares) == len(IDS)
    assert set().union(*shares) == set(IDS)


def test_the_core_is_in_every_share() -> None:
    core = {name for name in IDS if "b-4" in name}
    assert all(core <= share_of(IDS, share, 5, ("b-4",)) for share in range(5))


def test_a_share_is_no_row_of_the_matrix() -> None:
    for share in range(4):
        chosen = share_of(IDS, share, 4)
        assert {name[0] for name in chosen} == set("abcd")
        assert {name[-1] for name in chosen} == set("xy")


def test_a_turn_comes_once_in_so_many_shares() -> None:
    assert [share for share in range(6, 12) if has_turn(share, 3, 1)] == [7, 10]
    with pytest.raises(AssertionError, match="never comes"):
        has_turn(6, 3, 3)


def test_turns_are_shared_out() -> None:
    """In every share of so many some module has its turn, or another share would be the longer."""
    tests = Path(__file__).parents[2]
    found = defaultdict[str, set[int]](set)
    for path in set(tests.rglob("test_*.py")) - {Path(__file__)}:
        for one_in, turn in TURN.findall(path.read_text()):
            found[one_in].add(int(turn))
    assert found
    assert {one_in: sorted(turns) for one_in, turns in found.items()} == {
        one_in: list(range(int(one_in))) for one_in in found
    }


def test_what_has_no_history_has_a_share_all_the_same(tmp_path: Path) -> None:
    assert commits(tmp_path) == 0


def run(folder: Path, *arguments: str, source: str = TESTS) -> str:
    """What pytest says of tests."""
    (folder / "test_made_up.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", rotation.__name__]
    environ = os.environ | {
        "PYTHONPATH": str(Path(rotation.__file__).parents[2]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environ, capture_output=True, text=True
    )
    return done.stdout + done.stderr


NAMED = tuple(f"test_made_up.py::test_matrix[{x}]" for x in range(12))


@pytest.mark.parametrize(
    ("arguments", "ends", "num_told"),
    [
        (("--share", "0"), "1 failed, 6 passed, 9 deselected", 2),  # 7, and 3 of the other 11
        (("--full",), "1 failed, 15 passed", 0),
        (("--share", "0", *NAMED), "12 passed", 1),
        (("--share", "0", "test_made_up.py"), "1 failed, 7 passed, 8 deselected", 2),
    ],
    ids=["share", "full", "named", "file"],
)
def test_what_is_run_and_how_it_is_repeated(
    tmp_path: Path, arguments: tuple[str, ...], ends: str, num_told: int
) -> None:
    told = run(tmp_path, *arguments)
    assert f"{ends} in" in told
    assert told.count("share 0; --share 0 repeats it, --full runs every case") == num_told


def test_what_failed_is_run_again_whatever_its_place_in_the_matrix(tmp_path: Path) -> None:
    """Alone in a run it is the whole matrix: of share 0, whichever share it failed in."""
    source = TESTS.replace("assert x < 100", "assert x != 5")
    assert "2 failed, 14 passed in" in run(tmp_path, "--full", source=source)
    again = run(tmp_path, "--share", "1", "--last-failed", source=source)
    assert "2 failed in" in again, again
