"""Findings as JSON, as JUnit's XML and as one HTML file without scripts or other resources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple
from xml.etree import ElementTree

from surestep_common.releases import package_version

from .case import CaseResult, Verdict

_CSS = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
table { border-collapse: collapse } .wide { overflow-x: auto }
td, th { text-align: left; vertical-align: top; padding: .3em 1em .3em 0 }
tr { border-bottom: 1px solid #8884 }
.pass { color: #0a7d33 } .fail { color: #c02222; font-weight: 600 } .cannot { color: #9a6700 }
"""


class Findings(NamedTuple):
    """A server and what was found in it."""

    model: str
    owner: str  # of the model, by its server: vllm, llamacpp, surestep
    results: list[CaseResult]


def to_json(found: Findings) -> str:
    """Return all there is to know."""
    return json.dumps(
        {
            "version": package_version(),
            "model": found.model,
            "owned_by": found.owner,
            "date": _today(),
            "cases": [documented(result) for result in found.results],
        },
        indent=2,
    )


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def documented(result: CaseResult) -> dict[str, Any]:
    """Return a finding for programs."""
    case, finding, took_s = result
    return {
        "case": case.name,
        "reports": case.reports.split(),
        "does": case.does,
        "right": case.right,
        "needs": case.needs,
        "verdict": finding.verdict,
        "why": finding.why,
        "request": finding.request,
        "seconds": round(took_s, 2),
    }


def counted(results: Sequence[CaseResult]) -> str:
    """Return how many verdicts there are of each kind."""
    counts = Counter(result.finding.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def to_junit(found: Findings) -> str:
    """Return the findings as tests; what does not apply, or cannot be told, is skipped."""
    results = found.results
    failures = sum(result.finding.verdict is Verdict.FAIL for result in results)
    suite = ElementTree.Element(
        "testsuite", name="surestep zoo", tests=str(len(results)), failures=str(failures)
    )
    for case, finding, took_s in results:
        test = ElementTree.SubElement(
            suite, "testcase", classname="zoo", name=case.name, time=f"{took_s:.2f}"
        )
        if finding.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(test, "failure", message=_printable(finding.why))
            failure.text = json.dumps(finding.request)
        elif finding.verdict is not Verdict.PASS:
            ElementTree.SubElement(test, "skipped", message=_printable(finding.why))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    """Return the text without what XML cannot hold."""
    return "".join(one if one.isprintable() else "?" for one in text)


def to_html(found: Findings) -> str:
    """Return a page to share."""
    rows = "".join(_row(result) for result in found.results)
    heads = "".join(f"<th>{head}</th>" for head in ("case", "reports", "verdict", "why"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>surestep zoo</title>'
        f"<style>{_CSS}</style><h1>Published failures, looked for</h1>"
        f"<p>{escape(found.model)} by {escape(found.owner)}, {_today()}: {counted(found.results)}. "
        f"Looked for by surestep zoo {escape(package_version())}.</p>"
        f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div></html>\n'
    )


def _row(result: CaseResult) -> str:
    case, finding, _ = result
    request = f"<br><code>{escape(json.dumps(finding.request))}</code>" if finding.request else ""
    return (
        f"<tr><td>{escape(case.name)}<br><small>{escape(case.does)} Right: {escape(case.right)}."
        "</small></td>"
        f"<td>{escape(case.reports)}</td>"
        f'<td class="{finding.verdict}">{finding.verdict}</td>'
        f"<td>{escape(finding.why)}{request}</td></tr>"
    )
