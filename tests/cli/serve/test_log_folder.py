"""Where the logs of a server go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from surestep_cli.serve import launcher
from surestep_common import log
from surestep_common.errors import Unavailable


class _StoppedClock:
    """Stands for `datetime`: every start happens in the same second."""

    @staticmethod
    def now() -> _StoppedClock:
        return _StoppedClock()

    def __format__(self, spec: str) -> str:
        return "20260131-120000"


def test_starts_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(launcher, "datetime", _StoppedClock)
    folders = [launcher.log_folder(None) for _ in range(3)]
    names = ["20260131-120000", "20260131-120000-2", "20260131-120000-3"]
    assert folders == [tmp_path / "logs" / name for name in names]
    assert all(folder.is_dir() for folder in folders)


def test_a_folder_that_was_asked_for_is_used_again(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "logs"
    assert launcher.log_folder(wanted) == launcher.log_folder(wanted) == wanted


@pytest.mark.parametrize("asked_for", [False, True])
def test_new_folders_and_files_are_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    """Whatever the umask; folders and files that are there already stay as they are."""
    monkeypatch.setattr(launcher, "state_dir", lambda: tmp_path / "state" / "surestep")
    before = os.umask(0)
    try:
        folder = launcher.log_folder(tmp_path / "a" / "logs" if asked_for else None)
        kept = folder / "kept.log"
        kept.touch(0o640)
        for path in (folder / "gateway.log", folder / "removed" / "worker0.log", kept):
            log.open_file(path).close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes.pop("kept.log") == 0o640
    assert modes.pop("gateway.log") == modes.pop("worker0.log") == 0o600
    assert set(modes.values()) == {0o700}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="--log-dir"):
        launcher.log_folder(tmp_path / "file" / "logs")


def test_without_a_place_for_logs_the_server_starts_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()
    monkeypatch.setattr(launcher, "state_dir", lambda: tmp_path)
    launcher.log_folder(None)
    assert "no folder for logs" in caplog.text
