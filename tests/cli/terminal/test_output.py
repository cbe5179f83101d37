"""Output that cannot be written is lost, and nothing else happens."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from surestep_cli.terminal.output import report_console, unbreakable


def test_what_can_be_written_is_written_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        Console(file=unbreakable(stream)).print("Zürich ✓")
        assert (tmp_path / "out").read_text() == "Zürich ✓\n"


def test_a_full_disk_is_no_error() -> None:
    with open("/dev/full", "w") as stream:
        out = unbreakable(stream)
        assert out.write("a line\n") == 7
        Console(file=out).print("another one")
        out.flush()


def test_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        Console(file=unbreakable(stream)).print("a line")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_no_descriptor_is_no_error(stream: io.StringIO | None) -> None:
    out = unbreakable(stream)
    assert not out.isatty()
    Console(file=out).print("a line")


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("address")
    table.add_row("x" * 500)
    report_console().print(table)
    assert "x" * 500 in capsys.readouterr().out
