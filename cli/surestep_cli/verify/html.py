"""The report as one HTML file, without scripts or external resources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape

from .cases import Sampling
from .report import VerifyReport, differences_of
from .table import HEADINGS, fault_line, label, rows

_STYLE = """
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
    "it is asked with speculation, together with all others, and while a worker process is killed "
    "(SIGKILL) or stopped (SIGSTOP) in mid-stream. Answers are equal if all token ids and the "
    "reason to end are. Speed counts the tokens behind the first of each answer. A pause is the "
    "time between two arrivals of an answer. Sampled answers have fixed seeds."
)


def to_html(report: VerifyReport) -> str:
    title = f"surestep verify: {report.model}"
    body = "".join(_body(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _body(report: VerifyReport) -> Iterator[str]:
    yield f'<p class="verdict {report.verdict}">{escape(report.summary)}</p>'
    yield _table(("", ""), _facts(report), head=False)
    yield "<h2>Answers</h2>" + _table(HEADINGS, rows(report))
    wrong = differences_of(report.results)
    if wrong:
        lines = (f"<b>{escape(label(result))}</b>: {escape(text)}" for result, text in wrong)
        yield "<h2>Differences</h2>" + _list(lines, "bad")
    if report.faults:
        yield "<h2>Faults</h2>" + _list(escape(fault_line(fault)) for fault in report.faults)
    yield from _drafts(report)
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
    drafts = report.drafts
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
