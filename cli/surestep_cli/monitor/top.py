"""`surestep top`: a live view of a running server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime

from pydantic import SecretStr
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from surestep_common.errors import Unavailable

from surestep_cli.api.http import api_root, call, no_answer, read_text
from surestep_cli.api.metrics import Metrics
from surestep_cli.terminal.pictures import bar, sparkline

from .figures import Moment, Rates
from .status import remarks, table

_TIMEOUT_S = 5.0
_HISTORY = 60  # rates in the picture
_BAR_WIDTH = 20
_REMARKS = 8

Look = Callable[[], Moment]


def top(
    url: str, api_key: SecretStr | None, *, interval_s: float, updates: int | None, console: Console
) -> int:
    """Show the server until Ctrl-C, or `updates` times. Raise Unavailable if it does not
    respond.
    """

    def look() -> Moment:
        return look_at(url, api_key)

    first = look()
    rounds = range(updates) if updates is not None else itertools.count()
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            _live(look, first, interval_s, rounds, console)
        else:
            for line in lines(look, first, interval_s, rounds):
                console.print(line, markup=False, soft_wrap=True)
    return 0


def look_at(url: str, api_key: SecretStr | None) -> Moment:
    """Read status and metrics once. Raise Unavailable."""
    root = api_root(url)
    try:
        answer = call(f"{root}/status", api_key=api_key, timeout_s=_TIMEOUT_S)
        if answer.status != 200 or answer.body is None or "gateway" not in answer.body:
            raise Unavailable(f"{root}/status answered with HTTP {answer.status}")
        text = read_text(f"{root}/metrics", api_key=api_key, timeout_s=_TIMEOUT_S)
    except OSError as error:
        raise no_answer(url, error) from error
    return Moment.of(time.monotonic(), answer.body, Metrics(text))


def lines(
    look: Look, first: Moment, interval_s: float, rounds: Iterator[int] | range
) -> Iterator[str]:
    """Yield one line per reading, for pipes and logs."""
    before = first
    for _ in rounds:
        time.sleep(interval_s)
        now = f"{datetime.now():%H:%M:%S}"
        try:
            moment = look()
        except Unavailable as error:
            yield f"{now} {error}"
            continue
        yield f"{now} {line(moment, Rates.between(before, moment))}"
        before = moment


def line(moment: Moment, rates: Rates) -> str:
    """Return the main figures in one line."""
    ready, ranks = moment.ranks()
    accepted = f" accepted {_accepted(rates)}" if moment.speculates else ""
    return (
        f"{moment.state} ranks {ready}/{ranks} running {moment.running:.0f} waiting"
        f" {moment.waiting:.0f} output {rates.output_tok_s:.1f} tok/s prompts"
        f" {rates.prompt_tok_s:.1f} tok/s steps {rates.steps_s:.1f}/s KV"
        f" {100 * moment.kv_usage:.0f}%{accepted} restarts {moment.restarts:.0f}"
    )


def _live(
    look: Look, first: Moment, interval_s: float, rounds: Iterator[int] | range, console: Console
) -> None:
    screen = Screen(ascii_only=console.options.ascii_only)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(screen.show(first, None), refresh=True)
        for _ in rounds:
            time.sleep(interval_s)
            try:
                shown = screen.next(look())
            except Unavailable as error:
                shown = screen.trouble(str(error))
            live.update(shown, refresh=True)


class Screen:
    """The live view, updated with every reading."""

    def __init__(self, *, ascii_only: bool) -> None:
        self._ascii_only = ascii_only
        self._speeds: deque[float] = deque(maxlen=_HISTORY)
        self._last: Moment | None = None
        self._rates: Rates | None = None

    def next(self, moment: Moment) -> RenderableType:
        """Return the screen with the rates since the last reading."""
        rates = Rates.between(self._last, moment) if self._last is not None else None
        if rates is not None:
            self._speeds.append(rates.output_tok_s)
        return self.show(moment, rates)

    def show(self, moment: Moment, rates: Rates | None) -> RenderableType:
        """Return the whole screen."""
        self._last, self._rates = moment, rates
        gateway = moment.status["gateway"]
        title = Text(f"surestep {gateway['version']} {gateway['address']} ", style="bold")
        style = "green" if moment.state == "SERVING" else "red"
        title.append(moment.state, style=f"bold {style}")
        title.append(f"  {datetime.now():%H:%M:%S}  Ctrl-C ends", style="dim")
        told = itertools.islice(remarks(moment.status), _REMARKS)
        return Group(title, self._figures(moment, rates), table(moment.status), *map(Text, told))

    def trouble(self, why: str) -> RenderableType:
        """Return the last screen with the reason why there is no newer one."""
        assert self._last is not None
        self._speeds.append(0.0)
        return Group(Text(why, style="bold red"), self.show(self._last, self._rates))

    def _figures(self, moment: Moment, rates: Rates | None) -> Table:
        grid = Table.grid(padding=(0, 2))
        speeds = sparkline(self._speeds, ascii_only=self._ascii_only)
        output = "-" if rates is None else f"{rates.output_tok_s:.1f} tok/s"
        prompts = "-" if rates is None else f"{rates.prompt_tok_s:.1f} tok/s"
        steps = "-" if rates is None else f"{rates.steps_s:.1f} steps/s"
        grid.add_row("output", output, Text(speeds, style="green"))
        grid.add_row("prompts", prompts, steps)
        grid.add_row("requests", f"{moment.running:.0f} running", f"{moment.waiting:.0f} waiting")
        grid.add_row("KV cache", f"{100 * moment.kv_usage:.0f} %", self._bar(moment.kv_usage))
        if moment.speculates:
            grid.add_row("drafts", _accepted(rates), self._positions(moment, rates))
        grid.add_row("lost epochs", f"{moment.restarts:.0f}")
        return grid

    def _positions(self, moment: Moment, rates: Rates | None) -> str:
        """Return acceptance by position of the last interval, or of all time if nothing was
        drafted.
        """
        lately = rates is not None and rates.drafts.windows > 0
        shares = rates.drafts.rates() if rates is not None and lately else moment.drafts.rates()
        if not shares:
            return ""
        percent = " ".join(f"{100 * share:.0f}" for share in shares)
        return f"by position {percent} %{'' if lately else ', since the start'}"

    def _bar(self, share: float) -> str:
        return bar(share, _BAR_WIDTH, ascii_only=self._ascii_only)


def _accepted(rates: Rates | None) -> str:
    if rates is None or not rates.drafts.drafted:
        return "-"
    return f"{100 * rates.drafts.accepted / rates.drafts.drafted:.0f}%"
