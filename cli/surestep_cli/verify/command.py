"""`surestep verify`: starts a server, sends the requests, compares, reports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from surestep_common.config import secret_fields
from surestep_common.errors import SurestepError, Unavailable
from surestep_common.releases import package_version

from surestep_cli.api.http import api_root
from surestep_cli.api.sessions import open_session
from surestep_cli.serve.serving import key_of, serving
from surestep_cli.settings.sections import SECTIONS
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.terminal.output import report_console, write_file
from surestep_cli.zoo import case as zoo
from surestep_cli.zoo.run import survey
from surestep_cli.zoo.target import Target

from .cases import PUBLISHED, Sampling
from .faults import LocalServer
from .options import VerifyArguments, VerifyOptions
from .prompts import built_in, parameters, prepared, read_prompts
from .report import Question, Verdict, VerifyReport
from .run import Findings, Plan, Tell, Verification
from .server import About, ServerUnderTest, about, shortened
from .show import show, to_html

_MOST_AT_ONCE = 32
_NOT_FOUND_OUT = Verdict.NOT_SHOWN.exit_status
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What is computed, and no secret.
_FLAGS = {
    name
    for section in ("Model", "Speculation", "Memory", "Steps", "Devices")
    for name in SECTIONS[section]
} - set(secret_fields(ServeSettings))


def verify(asking: VerifyArguments, console: Console) -> int:
    """Return the exit status: 0 equal, 1 different, 2 inconclusive. Raise KeyboardInterrupt when
    stopped.
    """
    try:
        report = asyncio.run(_interruptible(_verify(asking, console)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except SurestepError as error:
        console.print(f"surestep verify: {error}", markup=False, soft_wrap=True)
        return _NOT_FOUND_OUT
    options = asking.options
    if options.json_output:
        sys.stdout.write(report.to_json() + "\n")
    else:
        show(report, report_console())
    if options.report is not None:
        as_json = options.report.suffix.lower() == ".json"
        write_file(options.report, report.to_json() if as_json else to_html(report))
        console.print(f"Report: {options.report}", markup=False, soft_wrap=True)
    return report.verdict.exit_status


async def _interruptible(work: Any) -> VerifyReport:
    """Run `work`; a signal that ends this command first ends the server that it has started."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    report: VerifyReport = await work
    return report


async def _verify(asking: VerifyArguments, console: Console) -> VerifyReport:
    options = asking.options
    given = options.prompts
    prompts = [*built_in(), *parameters()] if given is None else read_prompts(given)
    asked = _speculative_config(asking)
    began, moment = time.monotonic(), datetime.now(UTC)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.patience_s)
    limit = shortened(asking, console)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(_server(asking, limit))
        session = await stack.enter_async_context(
            open_session(
                server.url, api_key=server.api_key, timeout=timeout, certificate=server.certificate
            )
        )
        known = await about(session, asking.serve.model if options.url is not None else None)
        in_use = known.speculative_config
        local = LocalServer(session, server.pid) if server.pid is not None else None
        plan = Plan(
            temperature=options.temperature or known.temperature or 1.0,
            speculation=_speculates(asked),
            at_once=min(_MOST_AT_ONCE, asking.serve.max_concurrent_requests),
            most_open=max(1, asking.serve.max_concurrent_requests - len(prompts)),
            faults=options.faults if local is not None else (),
            quick=options.quick,
            reference=options.reference,
            has_keys=server.api_key is not None,
        )
        with _progress(console) as (bar, tell):
            ready = prepared(prompts, known.model, options.max_tokens)
            verification = Verification(session, ready, plan, known, tell)
            bar.update(bar.task_ids[0], total=verification.num_answers)
            found = await verification.run(local)
            published = await _published(session, known, options, found.skipped, tell)
    return VerifyReport(
        version=package_version(),
        started=moment.isoformat(timespec="seconds"),
        took_s=time.monotonic() - began,
        model=known.model,
        url=api_root(options.url) if options.url is not None else None,
        is_surestep=known.is_surestep,
        flags=_flags(asking.serve) if options.url is None else {},
        speculative_config=asked if in_use is None else in_use,
        speculates=plan.speculation,
        temperature=plan.temperature,
        questions=[
            Question(prompt.name, {s: found.main.references[s][i].num_tokens for s in Sampling})
            for i, prompt in enumerate(found.main.prompts)
        ],
        results=found.results,
        faults=found.faults,
        counts=found.counts,
        reference_windows=found.reference_windows,
        checks=found.checks,
        published=published,
        skipped=found.skipped,
        notes=list(_notes(asking, known, found, limit)),
    )


async def _published(
    session: aiohttp.ClientSession,
    known: About,
    options: VerifyOptions,
    skipped: dict[str, str],
    tell: Tell,
) -> list[zoo.CaseResult]:
    """Look for the failures of `surestep zoo`; where that is not done, say why in `skipped`."""
    if options.quick:
        skipped[PUBLISHED] = "not asked with --quick"
        return []
    target = Target(session, known.model, is_ours=known.is_surestep)
    try:
        return await survey(target, known.max_model_len, lambda name: tell(name, 0))
    except Unavailable as error:
        skipped[PUBLISHED] = str(error)
        return []


@contextlib.asynccontextmanager
async def _server(asking: VerifyArguments, limit: int | None) -> AsyncIterator[ServerUnderTest]:
    if asking.options.url is not None:
        yield ServerUnderTest(asking.options.url, key_of(asking.serve))
        return
    words = [] if limit is None else ["--max-model-len", str(limit)]
    words += ["--tool-call-parser", "hermes"] if asking.adds_tools else []
    async with serving(words=[*asking.arguments, *words]) as server:
        settings = server.settings
        key, certificate = key_of(settings), settings.ssl_certfile
        yield ServerUnderTest(server.url, key, certificate, server.process.pid)


def _speculates(config: dict[str, Any] | None) -> bool:
    """Return whether answers with speculation can differ from those without."""
    return config is None or config.get("num_speculative_tokens") != 0


def _speculative_config(asking: VerifyArguments) -> dict[str, Any] | None:
    """Return the configuration; None for a server that this command has not started."""
    if asking.options.url is not None:
        return None
    settings = ServeSettings.of_flags(asking.arguments)
    asked = settings.speculative_config
    return {"method": "auto"} if asked is None else asked


def _flags(settings: ServeSettings) -> dict[str, Any]:
    document = settings.model_dump(mode="json", include=_FLAGS & settings.model_fields_set)
    return dict(sorted(document.items()))


def _notes(
    asking: VerifyArguments, known: About, found: Findings, limit: int | None
) -> Iterator[str]:
    """Yield remarks that a reader of the figures needs."""
    if asking.adds_drafts:
        yield (
            "Speculation was turned off: n-gram drafts (num_speculative_tokens 4) were added. "
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 0}\' verifies '
            "without."
        )
    if limit is not None:
        yield (
            f"No --max-model-len was asked for: {limit} tokens were taken, so that prompts run "
            "into it within seconds."
        )
    if asking.adds_tools:
        yield "No --tool-call-parser was asked for: hermes was taken, so that a tool can be called."
    windows = found.counts.drafts.windows
    if not windows and asking.options.url is None:
        yield (
            "No draft was verified: the server speculates not at all, or found no draft worth its "
            "price. --no-adaptive-draft-length always drafts."
        )
    if asking.options.url is not None:
        yield "A server that runs already is not disturbed: no process was killed or stopped."
        if not known.is_surestep:
            yield (
                "This server is not Surestep: it may speculate although requests ask for none "
                "(`speculative`). Windows in the reference tell."
            )
        elif windows:
            yield "Figures of drafts are those of all clients of the server in that time."
    for name, why in found.skipped.items():
        yield f"Left out: {name}: {why}"


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tuple[Progress, Tell]]:
    """Show a bar in a terminal, a line for each stage elsewhere."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("asking")

    def tell(what: str, answers: int) -> None:
        bar.advance(task, answers)
        if what:
            bar.update(task, description=what)
            if not console.is_terminal:
                console.print(what, markup=False)

    with bar:
        yield bar, tell
