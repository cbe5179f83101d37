"""The report in a terminal, or in a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cases import ALONE, CaseResult, Sampling
from .report import FaultResult, Verdict, VerifyReport, differences_of

_NONE = "-"
_NAMES = 2  # columns that identify the case
_STYLES = {Verdict.EQUAL: "bold green", Verdict.DIFFERENT: "bold red"}
HEADINGS = (
    *("answers", "company", "equal without", "equal with", "tok/s without", "tok/s with"),
    *("times as fast", "longest pause"),
)
BAR_WIDTH = 30


def show(report: VerifyReport, out: Console) -> None:
    def say(line: str, style: str = "") -> None:
        out.print(Text(line, style=style), soft_wrap=True)

    where = f" at {report.url}" if report.url is not None else ""
    say(f"{report.model}{where}: {len(report.questions)} prompts, {report.took_s:.0f} s", "bold")
    table = Table(*HEADINGS, box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in table.columns[:_NAMES]:
        column.no_wrap = True
    for row in rows(report):
        table.add_row(*row)
    out.print(table)
    say(f"ref.: what all others are compared with. Sampled at temperature {report.temperature:g}.")
    for line in remarks(report):
        say(line)
    for result, text in differences_of(report.results):
        say(f"{label(result)}: {text}", "red")
    for note in report.notes:
        say(f"Note: {note}")
    say(report.summary, _STYLES.get(report.verdict, "bold yellow"))


def rows(report: VerifyReport) -> Iterator[tuple[str, ...]]:
    """Yield a row per sampling and company, with and without speculation side by side."""
    for sampling in Sampling:
        for company in report.companies():
            without, with_drafts = (
                report.find(sampling, company, speculation=on) for on in (False, True)
            )
            speedup = report.speedup(sampling, company)
            pauses = [r.longest_pause_s for r in (without, with_drafts) if r is not None]
            reference = company == ALONE
            yield (
                *(str(sampling), company, "ref." if reference else _equal(without)),
                *(_equal(with_drafts), _speed(without), _speed(with_drafts)),
                _NONE if speedup is None else f"{speedup:.2f}",
                f"{max(pauses):.2f} s" if pauses else _NONE,
            )


def remarks(report: VerifyReport) -> Iterator[str]:
    """Yield a line for each fact about drafts and faults."""
    drafts = report.drafts
    if drafts.windows:
        share = 100 * drafts.accepted / max(1, drafts.drafted)
        yield (
            f"Drafts: {drafts.drafted} verified in {drafts.windows} steps of requests, "
            f"{drafts.accepted} accepted ({share:.0f} %)"
        )
        for position, rate in enumerate(drafts.rates(), 1):
            bar = "#" * round(rate * BAR_WIDTH)
            yield f"  accepted at position {position}: {100 * rate:3.0f} % {bar}".rstrip()
    for fault in report.faults:
        yield fault_line(fault)


def fault_line(fault: FaultResult) -> str:
    """Return a line about a fault and the server's recovery."""
    if fault.problem is not None:
        return f"Worker {fault.name}: not shown: {fault.problem}"
    line = f"Worker {fault.name}: rank {fault.rank}, {fault.num_open} streams in the middle"
    for incident in fault.incidents[-1:]:
        line += f"; noticed after {incident.detect_s:.1f} s ({incident.cause})"
        if incident.recover_s:
            line += f", computing again after {incident.recover_s:.1f} s"
        line += f", {incident.num_replayed_requests} requests went on"
    return line


def label(result: CaseResult) -> str:
    """Return the name of a case."""
    case = result.case
    drafts = "with" if case.speculation else "without"
    return f"{case.sampling}, {case.company}, {drafts} speculation"


def _equal(result: CaseResult | None) -> str:
    return _NONE if result is None else f"{result.num_equal} of {result.num_answers}"


def _speed(result: CaseResult | None) -> str:
    speed = None if result is None else result.output_tok_s
    return _NONE if speed is None else f"{speed:.1f}"
