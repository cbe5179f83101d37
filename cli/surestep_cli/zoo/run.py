"""The run of the zoo: its cases one after the other, a table of findings, files."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text
from surestep_common.errors import InvalidRequest

from surestep_cli.api.http import model_card
from surestep_cli.api.sessions import get_json, open_session
from surestep_cli.terminal.output import report_console, write_file

from . import acceptance, constraints, edges, equality, lifecycle
from .case import Case, CaseResult, Verdict, run
from .command import Zoo
from .report import Findings, counted, to_html, to_json, to_junit
from .target import Subject, Target, max_len_of, tried_out

CASES: tuple[Case, ...] = (
    *equality.CASES,
    *acceptance.CASES,
    *edges.CASES,
    *constraints.CASES,
    *lifecycle.CASES,
)
_OURS = "surestep"  # owner of our models
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.CANNOT_TELL: "yellow"}
_FORMATS = {".json": to_json, ".html": to_html, ".xml": to_junit}
_REQUEST_CHARACTERS = 500
_PATIENCE_S = 300.0
_WIDTH = 2 + max(len(case.name) for case in CASES)


def zoo(asked: Zoo, console: Console) -> int:
    """Return the exit status. Raise SurestepError."""
    cases = chosen(asked.case)
    if asked.list_cases:
        _list(cases)
        return 0
    out = report_console(soft_wrap=True)
    out.quiet = asked.json_output
    found = asyncio.run(_run(asked, cases, console, out))
    if asked.json_output:
        sys.stdout.write(to_json(found) + "\n")
    _conclude(found.results, out)
    if asked.report is not None:
        write_file(asked.report, _FORMATS[asked.report.suffix.lower()](found))
        console.print(f"Report: {asked.report}", markup=False, soft_wrap=True)
    return int(any(result.finding.verdict is Verdict.FAIL for result in found.results))


def chosen(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, all without any. Raise InvalidRequest."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(f"no case {unknown[0]!r}: {', '.join(known)}", param="case")
    return [known[name] for name in names] if names else list(CASES)


async def _run(asked: Zoo, cases: Sequence[Case], console: Console, out: Console) -> Findings:
    """Run the cases, and print each finding as it comes."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=asked.patience_s)
    url = asked.server or asked.url
    async with contextlib.AsyncExitStack() as stack:

        async def opened(address: str) -> tuple[Target, dict[str, Any]]:
            session = open_session(address, api_key=asked.key(), timeout=timeout)
            await stack.enter_async_context(session)
            card = model_card(await get_json(session, "v1/models"), asked.model)
            is_ours = card.get("owned_by") == _OURS
            return Target(session, str(card["id"]), is_ours=is_ours), card

        target, card = await opened(url)
        plain = target if target.is_ours else None
        if asked.without is not None:
            plain = (await opened(asked.without))[0]
            await tried_out(plain)
        repeats, pace = await tried_out(target)
        subject = Subject(
            target, plain, repeats, pace, max_len_of(card), asked.long_tokens, asked.stop_pid
        )
        results = []
        for number, case in enumerate(cases, start=1):
            with console.status(f"{number} of {len(cases)}: {case.name}, about {case.seconds} s"):
                results.append(await run(case, subject, asked.patience_s))
            out.print(_line(results[-1]))
        return Findings(target.model, str(card.get("owned_by") or "?"), results)


async def survey(
    target: Target, max_len: int | None, tell: Callable[[str], object]
) -> list[CaseResult]:
    """Run all cases, telling which one is run. Raise Unavailable for a server without texts."""
    plain = target if target.is_ours else None
    subject = Subject(target, plain, *await tried_out(target), max_len)
    results = []
    for case in CASES:
        tell(case.name)
        results.append(await run(case, subject, _PATIENCE_S))
    return results


def _list(cases: Sequence[Case]) -> None:
    out = report_console(soft_wrap=True)
    for case in cases:
        out.print(f"{case.name} ({case.reports}), about {case.seconds} s", markup=False)
        needs = f" Needs {', '.join(case.needs)}." if case.needs else ""
        out.print(f"    {case.does} Right: {case.right}.{needs}", markup=False)
    out.print("V, S, L: issues of vLLM, SGLang, llama.cpp; others by their repository's name")


def _line(result: CaseResult) -> Text:
    case, finding, took_s = result
    verdict = Text(f"{finding.verdict:15}", style=_STYLES.get(finding.verdict, ""))
    return Text.assemble(f"{case.name:{_WIDTH}}", verdict, f"{took_s:6.1f} s  {finding.why}")


def _conclude(results: Sequence[CaseResult], out: Console) -> None:
    """Print the requests that show a failure, and how many verdicts there are of each kind."""
    for case, finding, _ in results:
        if finding.verdict is Verdict.FAIL and finding.request is not None:
            shown = str(finding.request)[:_REQUEST_CHARACTERS]
            out.print(f"{case.name} ({case.reports}): {shown}", markup=False)
    out.print(Text(counted(results), style="bold"))
