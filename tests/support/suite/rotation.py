"""What takes long in shares: each commit runs one share of it, and in turn all of it is run.

    @pytest.mark.rotates(4, always=("ngram-4",))   # below the marks that make the cases

runs those cases whose id holds one of `always`, and a sixteenth of the others; a test without cases
is run in every sixteenth share. Which it is follows from the number of the commit and the test's
name, so that a run can be repeated and sixteen commits run every case.

    pytestmark = pytest.mark.rotates(3, turn=1)

runs all tests of a module, which have a server in common, in every twelfth share: 1, 13, 25 and so
on, or 4, 16, 28, or another one. Marks say how much of the suite a test takes beside others; the
whole of it is thinned here, so that it ends in time on two slow cores. What has no mark in a folder
of heavy tests is run as with `rotates(1)`, in modules that have servers as with a turn.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

THINNED = 4  # times as many shares as the marks say
_HAVE_SERVERS = ("tests/abuse/", "tests/e2e/")
_HEAVY = (*_HAVE_SERVERS, "tests/promises/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of the matrices is run."""
    text = "every case of every matrix; without it the large ones are run in shares"
    parser.addoption("--full", action="store_true", help=text)
    text = "which share of the large matrices to run; default: the number of the commit"
    parser.addoption("--share", type=int, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Settle which share it is; the workers of pytest-xdist are told by their options."""
    what = "rotates(one_in, always=(), turn=None): run a share of the cases, or all in its turn"
    config.addinivalue_line("markers", what)
    if config.option.share is None:
        config.option.share = commits(config.rootpath)


def pytest_report_header(config: pytest.Config) -> str:
    """What was run belongs to every report."""
    return "matrices: in full" if config.option.full else _share(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How a failure is repeated, where the header is not shown or far away."""
    if terminalreporter.getreports("failed") and not terminalreporter.config.option.full:
        terminalreporter.write_line(_share(terminalreporter.config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of other shares, but no case that is named, nor what has a turn or no mark
    in a file that is.

    What failed before is named by --last-failed.
    """
    if config.option.full:
        return
    share, left_out, matrices = config.option.share, set[pytest.Item](), defaultdict(list)
    failed = _failed_before(config)
    for item in items:
        if (mark := _mark(item)) is None:
            continue
        takes_turns = "turn" in mark.kwargs
        as_a_file = takes_turns or item.get_closest_marker("rotates") is None
        name = item.nodeid.partition("::")[0] if as_a_file else item.nodeid
        if item.nodeid in failed or any(name in argument for argument in config.args):
            continue
        if not takes_turns:
            matrices[item.nodeid.partition("[")[0]].append(item)
        elif not has_turn(share, name, *mark.args, **mark.kwargs):
            left_out.add(item)
    left_out.update(item for cases in matrices.values() for item in _others(cases, share))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _mark(item: pytest.Item) -> pytest.Mark | None:
    """Return the nearest mark of a test, or the one for its folder; None: every share has it."""
    if (mark := item.get_closest_marker("rotates")) is None and item.nodeid.startswith(_HEAVY):
        turn = {"turn": 0} if item.nodeid.startswith(_HAVE_SERVERS) else {}
        return pytest.mark.rotates(1, **turn).mark
    return mark


def _failed_before(config: pytest.Config) -> Collection[str]:
    """The ids of the tests that --last-failed asks for; none without it."""
    if not getattr(config.option, "lf", False) or config.cache is None:
        return ()
    failed: dict[str, bool] = config.cache.get("cache/lastfailed", {})
    return failed


def _others(cases: list[pytest.Item], share: int) -> Iterable[pytest.Item]:
    """The cases of one matrix that are not to be run."""
    mark = _mark(cases[0])
    assert mark is not None
    name, ids = (
        cases[0].nodeid.partition("[")[0],
        [case.nodeid.partition("[")[2][:-1] for case in cases],
    )
    one_in, *others = mark.args
    chosen = share_of(ids, share + _number(name), THINNED * one_in, *others, **mark.kwargs)
    return (case for case, name in zip(cases, ids, strict=True) if name not in chosen)


def has_turn(share: int, name: str, one_in: int, turn: int) -> bool:
    """Return whether it is the turn of a module, which runs whole in one share of so many."""
    assert 0 <= turn < one_in, f"turn {turn} of {one_in} never comes"
    return share % (THINNED * one_in) == turn + one_in * (_number(f"{name} {turn}") % THINNED)


def share_of(ids: Sequence[str], share: int, one_in: int, always: tuple[str, ...] = ()) -> set[str]:
    """Of the cases `ids` those to run.

    The others are dealt out in an order that has nothing to do with the matrix, or a share could
    be one of its rows. Shares `share` to `share + one_in - 1` hold every case.
    """
    core = {name for name in ids if any(part in name for part in always)}
    others = sorted(set(ids) - core, key=_number)
    return core | set(others[share % one_in :: one_in])


def _number(name: str) -> int:
    """Return a number that looks drawn, the same in every run."""
    return int.from_bytes(sha256(name.encode()).digest())


def commits(root: Path) -> int:
    """How many commits lead to this tree; 0 where that is not known."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout)


def _share(config: pytest.Config) -> str:
    share = config.option.share
    return f"matrices: share {share}; --share {share} repeats it, --full runs every case"
