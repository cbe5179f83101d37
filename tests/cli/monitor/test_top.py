"""What `surestep top` makes of two looks at a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from surestep_cli.api.metrics import Metrics
from surestep_cli.monitor.figures import Moment, Rates
from surestep_cli.monitor.top import Screen, line, lines
from surestep_common.errors import Unavailable

_TEXT = """# TYPE surestep:generation_tokens counter
surestep:generation_tokens_total{{engine="0"}} {tokens}
surestep:generation_tokens_total{{engine="1"}} {tokens}
# TYPE surestep:prompt_tokens counter
surestep:prompt_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 3
# TYPE surestep:worker_restarts counter
surestep:worker_restarts_total{{cause="worker_exit"}} 2
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {tokens}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {tokens}
"""
_SUPERVISOR = {
    "rank": 0,
    "rank_state": "READY",
    "pid": 3,
    "address": "v:3",
    "restarts": 2,
    "standby_pid": 0,
    "rank_pid": 4,
    "rank_address": "r:4",
    "failure": "",
    "exits": [],
}
_SCHEDULER = {
    "state": "SERVING",
    "pid": 2,
    "address": "s:2",
    "epoch": 3,
    "step": 9,
    "last_step_age_s": 0.2,
    "ranks": [],
    "num_open_requests": 3,
    "num_replaying_requests": 0,
    "waiting_for": "",
    "incidents": [],
    "supervisors": [_SUPERVISOR],
}
_STATUS: dict[str, Any] = {
    "gateway": {"pid": 1, "address": "g:1", "state": "SERVING", "version": "9"},
    "answers": {"answers": 0, "failed": {}, "failed_in_streams": 0},
    "schedulers": [{"url": "s:2", "circuit_breaker": "CLOSED", "status": _SCHEDULER}],
}


def moment(at: float, tokens: int) -> Moment:
    return Moment.of(at, _STATUS, Metrics(_TEXT.format(tokens=tokens, drafted=2 * tokens)))


def test_rates_are_sums_per_second() -> None:
    rates = Rates.between(moment(10, 100), moment(12, 150))
    assert (rates.output_tok_s, rates.prompt_tok_s) == (50, 25)
    assert (rates.drafts.drafted, rates.drafts.accepted, rates.drafts.rates()) == (100, 50, [1])


def test_a_server_that_was_started_again_has_no_negative_rates() -> None:
    rates = Rates.between(moment(10, 100), moment(12, 5))
    assert (rates.output_tok_s, rates.drafts.windows) == (0, 0)


def test_schedulers_that_come_back_are_no_burst() -> None:
    silent = Moment.of(11, _STATUS, Metrics(""))
    assert Rates.between(silent, moment(12, 1000)).output_tok_s == 0
    assert Rates.between(moment(10, 1000), silent).output_tok_s == 0


def test_a_line_has_everything() -> None:
    now = moment(12, 150)
    assert line(now, Rates.between(moment(10, 100), now)) == (
        "SERVING ranks 1/1 running 3 waiting 0 output 50.0 tok/s prompts 25.0 tok/s steps 0.0/s"
        " KV 25% accepted 50% restarts 2"
    )


@pytest.mark.parametrize(("most", "told"), [(0, False), (4, True)])
def test_drafts_are_shown_where_there_may_be_some(most: int, told: bool) -> None:
    scheduler = _SCHEDULER | {"ranks": [{"max_draft_tokens": most}]}
    status = _STATUS | {"schedulers": [{"url": "s:2", "status": scheduler}]}
    now = Moment.of(12, status, Metrics(""))
    assert now.speculates == told
    assert (" accepted " in line(now, Rates.between(now, now))) == told


def test_a_server_that_goes_away_is_waited_for() -> None:
    looks: Iterator[Moment | Unavailable] = iter(
        [moment(11, 110), Unavailable("no answer from u"), moment(13, 130)]
    )

    def look() -> Moment:
        found = next(looks)
        if isinstance(found, Unavailable):
            raise found
        return found

    told = list(lines(look, moment(10, 100), 0, range(3)))
    assert "output 20.0 tok/s" in told[0]
    assert told[1].endswith(" no answer from u")
    assert "output 20.0 tok/s" in told[2]  # over both intervals


def shown(what: Any, *, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(width=100, file=out, highlight=False).print(what)
    out.seek(0)
    return out.read()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_screen(encoding: str) -> None:
    screen = Screen(ascii_only=encoding == "ascii")
    first = shown(screen.show(moment(10, 100), None), encoding=encoding)
    assert "by position 100 %, since the start" in first
    told = shown(screen.next(moment(12, 150)), encoding=encoding)
    assert "50.0 tok/s" in told
    assert "by position 100 %" in told
    assert "since the start" not in told
    assert "rank 0" in told
    assert "s:2: 3 open requests" in told
    gone = shown(screen.trouble("no answer from u"), encoding=encoding)
    assert gone.startswith("no answer from u\n")
    assert "rank 0" in gone
    assert told.isascii() == (encoding == "ascii")


def test_what_is_no_metrics_is_told() -> None:
    with pytest.raises(Unavailable, match="no text for Prometheus"):
        Metrics("<html>")
