"""Where the logs of a server go."""

from __future__ import annotations

from pathlib import Path

import pytest
from surestep_cli.serve import launcher
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
