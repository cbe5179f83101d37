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


CONTROLS = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0))),
    *("\u2028", "\u2029", "\u202e", "\u2066", "\u200f", "\udc9b"),
]


@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_no_text_begins_a_line_or_steers_a_terminal(
    capsys: pytest.CaptureFixture[str], control: str, as_json: bool
) -> None:
    """Whether a client's text is in the message, the request id or the error."""
    log.configure("gateway", as_json=as_json)
    text = f"a{control}FORGED{control}[31m"
    token = log.request_id.set(text)
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("part").exception("model %s", text)
    log.request_id.reset(token)
    written = capsys.readouterr().err
    assert "FORGED" in written
    assert control not in written.replace("\n", "")
    first, *others = written.splitlines()
    assert not others if as_json else all(line.startswith("    ") for line in others)
    if as_json:
        assert json.loads(first)["message"] == f"model {text}"


def test_text_that_is_no_control_stays(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("gateway")
    logging.getLogger("part").info("%s", r"C:\temp «ünïcode» 日本 👋")
    assert capsys.readouterr().err.endswith(" part C:\\temp «ünïcode» 日本 👋\n")
