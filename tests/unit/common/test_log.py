"""Log lines carry service, rank and request id."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from surestep_common import log


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("worker", rank=1)
    logging.getLogger("part").info("loaded %d", 7)
    logging.getLogger("part").debug("not shown")
    time, rest = capsys.readouterr().err.split(" ", 1)
    assert time.endswith("Z")
    assert rest == "INFO worker.1 part loaded 7\n"


def test_the_request_id_is_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("gateway")
    token = log.request_id.set("abc")
    logging.getLogger("part").warning("slow")
    log.request_id.reset(token)
    assert capsys.readouterr().err.endswith("WARNING gateway part [abc] slow\n")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("gateway", as_json=True)
    try:
        raise ValueError("reason")
    except ValueError:
        logging.getLogger("part").exception("it\nbroke")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields["message"] == "it\nbroke"
    assert fields["service"] == "gateway"
    assert fields["exception"].endswith("ValueError: reason")
    assert "request_id" not in fields
