"""Shares of large matrices: together they are everything, and a run says which it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from support.suite import rotation
from support.suite.rotation import THINNED, share_of

IDS = [f"{drafter}-{k}-{where}" for drafter in "abcd" for k in range(5) for where in ("x", "y")]
TURN = re.compile(r"rotates\((\d+), turn=(\d+)\)")
TESTS = """
import pytest
@pytest.mark.parametrize("x", range(9))
@pytest.mark.rotates(2, always=("7",))
def test_matrix(x): assert x < 100
@pytest.mark.rotates(3, turn=1)
def test_in_turn(): pass
"""


def test_as_many_shares_as_there_are_hold_every_case_once() -> None:
    shares = [share_of(IDS, share, 4) for share in range(7, 11)]
    assert sum(len(share) for share in shares) == len(IDS)
    assert set().union(*shares) == set(IDS)


def test_turns_are_shared_out() -> None:
    """In every share of so many some module has its turn, or another share would be the longer."""
    tests = Path(__file__).parents[1]
    found = defaultdict[str, set[int]](set)
    for path in set(tests.rglob("test_*.py")) - {Path(__file__)}:
        for one_in, turn in TURN.findall(path.read_text()):
            found[one_in].add(int(turn))
    assert found
    assert {one_in: sorted(turns) for one_in, turns in found.items()} == {
        one_in: list(range(int(one_in))) for one_in in found
    }


def test_a_run_has_its_share_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(TESTS)
    done = _run(tmp_path, "--share", "0")
    assert "2 passed, 8 deselected in" in done  # 7, and one of the other 8
    assert "share 0; --share 0 repeats it, --full runs every case" in done


def test_heavy_folders_take_turns_without_a_mark(tmp_path: Path) -> None:
    """Each test is run in one share, and wherever its file is named."""
    names = ["tests/e2e/test_one.py", "tests/promises/any/test_two.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("def test_a(): assert 1\ndef test_b(): assert 1\n")
    shares = [_run(tmp_path, "--share", str(share), "-v") for share in range(THINNED)]
    ids = [f"{name}::test_{letter} PASSED" for name in names for letter in "ab"]
    assert [sum(one in share for share in shares) for one in ids] == [1] * len(ids)
    assert any(all(one in share for one in ids[:2]) for share in shares)  # a module is whole
    assert "4 passed in" in _run(tmp_path, "--share", "0", *names)


def _run(folder: Path, *arguments: str) -> str:
    """Return what a run of pytest in a folder prints."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", rotation.__name__, *arguments]
    environ = os.environ | {
        "PYTHONPATH": str(Path(rotation.__file__).parents[2]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True).stdout
