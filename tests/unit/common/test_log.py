"""Log lines carry service, rank and request id."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi
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


def test_clients_of_http_log_no_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does that of the model hub, which has one of its own."""
    log.configure("launcher")
    client = importlib.import_module(HfApi.__module__).get_session()
    names = {"httpx", type(client).__module__.partition(".")[0]}
    for name in names:
        logging.getLogger(name).info("HTTP Request: GET http://127.0.0.1/")
    assert capsys.readouterr().err == ""


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
