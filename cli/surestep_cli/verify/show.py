"""The report in a terminal or a pipe, and as one HTML file without scripts or other resources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cases import CaseResult, Sampling
from .faults import COMPANIES
from .report import Claim, FaultResult, Spread, Verdict, VerifyReport, differences_of

_NONE = "-"
_NAMES = 2  # columns that identify the case
_STYLES = {Verdict.EQUAL: "bold green", Verdict.DIFFERENT: "bold red"}
HEADINGS = ("answers", "company", "equal without", "equal with", "windows", "longest pause")
BAR_WIDTH = 30
_CSS = """
:root { color-scheme: light dark; --good: #0a7d33; --bad: #c02222; --open: #9a6700 }
@media (prefers-color-scheme: dark) { :root { --good: #4cc774; --bad: #ff7b72; --open: #e3b341 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.5 ui-monospace, monospace }
.verdict { font-size: 1.4rem; font-weight: 600; border-left: 0.4rem solid; padding-left: 0.8rem }
.equal { color: var(--good) } .different { color: var(--bad) } .not.shown { color: var(--open) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: 0.25em 1em 0.25em 0; border-bottom: 1px solid #8884 }
.bar { display: inline-block; height: 0.8em; background: currentColor; opacity: 0.6 }
li.bad { color: var(--bad) }
"""
_HOW = (
    "Every prompt is asked alone and without speculation first: that answer is the reference. Then "
    "it is asked again with and without speculation in turns, alone, together with all others, and "
    "while a process is killed or stopped in mid-stream. Answers are equal if all token ids and "
    "the reason to end are. Speed counts the tokens behind the first of each greedy answer: the "
    "median of all rounds and, for how many times as fast, the least and the most. A pause is the "
    "time between two arrivals of an answer. Sampled answers have fixed seeds."
)


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
    say(f"Sampled at temperature {report.temperature:g}.")
    for line in remarks(report):
        say(line)
    for result, text in differences_of(report.results):
        say(f"{label(result)}: {text}", "red")
    for note in report.notes:
        say(f"Note: {note}")
    for claim in report.claims:
        say(claim_line(claim), _style(claim.verdict))
    say(report.summary, _STYLES.get(report.verdict, "bold yellow"))


def rows(report: VerifyReport) -> Iterator[tuple[str, ...]]:
    """Yield a row per sampling and company, with and without speculation side by side."""
    for sampling in Sampling:
        for company in report.companies():
            without, with_drafts = (
                report.find(sampling, company, speculation=on) for on in (False, True)
            )
            results = [each for each in (without, with_drafts) if each is not None]
            if results:
                pause = max(each.longest_pause_s for each in results)
                yield (
                    str(sampling),
                    company,
                    _equal(without),
                    _equal(with_drafts),
                    _windows(with_drafts),
                    f"{pause:.2f} s",
                )


def remarks(report: VerifyReport) -> Iterator[str]:
    """Yield a line for each fact about speed, drafts and faults."""
    yield from _speeds(report)
    drafts = report.counts.drafts
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
    name = COMPANIES[fault.name]
    name = name[:1].upper() + name[1:]
    if fault.problem is not None:
        return f"{name}: not shown: {fault.problem}"
    rank = "" if fault.name == "scheduler" else f"rank {fault.rank}, "
    line = f"{name}: {rank}{fault.num_open} streams in the middle"
    for incident in fault.incidents[-1:]:
        line += f"; noticed after {incident.detect_s:.1f} s ({incident.cause})"
        if incident.recover_s:
            line += f", computing again after {incident.recover_s:.1f} s"
    return f"{line}, {fault.num_went_on} requests went on"


def claim_line(claim: Claim) -> str:
    """Return a promise with its verdict and why."""
    verdict = "not asked" if claim.verdict is None else claim.verdict
    return f"{verdict.upper():<9} {claim.name}: {claim.evidence}"


def _style(verdict: Verdict | None) -> str:
    return "" if verdict is None else _STYLES.get(verdict, "bold yellow").removeprefix("bold ")


def label(result: CaseResult) -> str:
    """Return the name of a case."""
    case = result.case
    drafts = "with" if case.speculation else "without"
    return f"{case.sampling}, {case.company}, {drafts} speculation"


def _equal(result: CaseResult | None) -> str:
    return _NONE if result is None else f"{result.num_equal} of {result.num_answers}"


def _windows(result: CaseResult | None) -> str:
    return _NONE if result is None or not result.windows else str(result.windows)


def _speeds(report: VerifyReport) -> Iterator[str]:
    """Yield a line for each case that was repeated often enough, and had tokens enough."""
    for sampling in Sampling:
        for company in report.companies():
            ratio = report.speedup(sampling, company)
            without, with_drafts = (
                found and Spread.of(found.output_tok_s)
                for found in (
                    report.find(sampling, company, speculation=on) for on in (False, True)
                )
            )
            if ratio and without and with_drafts:
                yield (
                    f"Speed, {sampling}, {company}: {ratio.median:.2f} times as fast with drafts "
                    f"({ratio.least:.2f} to {ratio.most:.2f}), {without.median:.0f} and "
                    f"{with_drafts.median:.0f} tok/s"
                )


def to_html(report: VerifyReport) -> str:
    title = f"surestep verify: {report.model}"
    body = "".join(_body(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _body(report: VerifyReport) -> Iterator[str]:
    yield f'<p class="verdict {report.verdict}">{escape(report.summary)}</p>'
    yield _table(("", ""), _facts(report), head=False)
    lines = (escape(claim_line(claim)) for claim in report.claims)
    yield "<h2>Promises</h2>" + _list(lines)
    yield "<h2>Answers</h2>" + _table(HEADINGS, rows(report))
    wrong = differences_of(report.results)
    if wrong:
        lines = (f"<b>{escape(label(result))}</b>: {escape(text)}" for result, text in wrong)
        yield "<h2>Differences</h2>" + _list(lines, "bad")
    if speeds := list(_speeds(report)):
        yield "<h2>Speed</h2>" + _list(map(escape, speeds))
    if report.faults:
        yield "<h2>Faults</h2>" + _list(escape(fault_line(fault)) for fault in report.faults)
    yield from _drafts(report)
    if report.published:
        lines = (
            escape(f"{c.name} ({c.reports}): {f.verdict}: {f.why}") for c, f, _ in report.published
        )
        yield "<h2>Published failures</h2>" + _list(lines)
    yield "<h2>Prompts</h2>" + _table(
        ("prompt", *(f"tokens, {sampling}" for sampling in Sampling)),
        ((q.name, *(str(q.tokens[s]) for s in Sampling)) for q in report.questions),
    )
    if report.notes:
        yield "<h2>Notes</h2>" + _list(map(escape, report.notes))
    yield f"<h2>How</h2><p>{escape(_HOW)}</p>"


def _facts(report: VerifyReport) -> Iterator[tuple[str, str]]:
    yield "model", report.model
    if report.url is not None:
        yield "server", report.url
    yield "speculation", json.dumps(report.speculative_config)
    for name, value in report.flags.items():
        if name != "speculative_config":
            yield name, value if isinstance(value, str) else json.dumps(value)
    yield "Surestep", report.version
    yield "started", f"{report.started}, took {report.took_s:.0f} s"


def _drafts(report: VerifyReport) -> Iterator[str]:
    drafts = report.counts.drafts
    if not drafts.windows:
        return
    yield (
        f"<h2>Drafts</h2><p>{drafts.drafted} verified in {drafts.windows} steps of requests, "
        f"{drafts.accepted} accepted.</p>"
        "<table><tr><th>position</th><th>accepted</th><th></th></tr>"
    )
    for position, rate in enumerate(drafts.rates(), 1):
        bar = f'<span class="bar" style="width:{20 * rate:.2f}rem"></span>'
        yield f"<tr><td>{position}</td><td>{100 * rate:.0f} %</td><td>{bar}</td></tr>"
    yield "</table>"


def _table(headings: Iterable[str], lines: Iterable[Iterable[str]], *, head: bool = True) -> str:
    top = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if head else ""}{body}</table></div>'


def _list(lines: Iterable[str], kind: str = "") -> str:
    items = "".join(f'<li class="{kind}">{line}</li>' for line in lines)
    return f"<ul>{items}</ul>"
