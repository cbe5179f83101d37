"""`surestep verify`: starts a server, sends the requests, compares, reports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from surestep_common.config import secret_fields
from surestep_common.errors import SurestepError

from surestep_cli.api.http import api_root
from surestep_cli.api.sessions import open_session
from surestep_cli.serve.model_source import DEFAULT_SPECULATION
from surestep_cli.settings.sections import SECTIONS
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.terminal.output import write_file

from .cases import Sampling
from .fault_injection import LocalWorkers
from .html import to_html
from .options import VerifyArguments
from .prompts import built_in, read_prompts
from .report import Question, Verdict, VerifyReport
from .run import About, CaseResults, Tell, Verification, about, prepared
from .server import ServerUnderTest, key_of, started
from .table import show

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
        show(report, Console(highlight=False))
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
    prompts = built_in() if options.prompts is None else read_prompts(options.prompts)
    speculative_config = _speculative_config(asking)
    speculates = _speculates(speculative_config)
    began, moment = time.monotonic(), datetime.now(UTC)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.patience_s)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(_server(asking))
        session = await stack.enter_async_context(
            open_session(
                server.url, api_key=server.api_key, timeout=timeout, certificate=server.certificate
            )
        )
        known = await about(session, asking.serve.model if options.url is not None else None)
        temperature = options.temperature or known.temperature or 1.0
        ready = prepared(prompts, known.model, options.max_tokens)
        victims = LocalWorkers(session, server.pid) if server.pid is not None else None
        with _progress(console) as (bar, tell):
            verification = Verification(
                *(session, ready),
                temperature=temperature,
                speculation=speculates,
                at_once=min(_MOST_AT_ONCE, asking.serve.max_concurrent_requests),
                tell=tell,
            )
            faults = options.faults if victims is not None else ()
            bar.update(bar.task_ids[0], total=verification.num_answers(len(faults)))
            found = await verification.run(faults, victims)
    return VerifyReport(
        version=version("surestep"),
        started=moment.isoformat(timespec="seconds"),
        took_s=time.monotonic() - began,
        model=known.model,
        url=api_root(options.url) if options.url is not None else None,
        flags=_flags(asking.serve) if options.url is None else {},
        speculative_config=speculative_config,
        temperature=temperature,
        questions=[
            Question(prompt.name, {s: found.references[s][i].num_tokens for s in Sampling})
            for i, prompt in enumerate(ready)
        ],
        results=found.results,
        faults=found.faults,
        drafts=found.drafts,
        notes=list(_notes(asking, known, found, speculates=speculates)),
    )


@contextlib.asynccontextmanager
async def _server(asking: VerifyArguments) -> AsyncIterator[ServerUnderTest]:
    if asking.options.url is not None:
        yield ServerUnderTest(asking.options.url, key_of(asking.serve))
        return
    async with started(asking) as server:
        yield server


def _speculates(config: dict[str, Any] | None) -> bool:
    """Return whether answers with speculation can differ from those without."""
    return config is None or config.get("num_speculative_tokens") != 0


def _speculative_config(asking: VerifyArguments) -> dict[str, Any] | None:
    """Return the configuration; None for a server that this command has not started."""
    if asking.options.url is not None:
        return None
    settings = ServeSettings.of_flags(asking.arguments)
    return DEFAULT_SPECULATION if settings.drafts_by_default else settings.speculative_config


def _flags(settings: ServeSettings) -> dict[str, Any]:
    document = settings.model_dump(mode="json", include=_FLAGS & settings.model_fields_set)
    return dict(sorted(document.items()))


def _notes(
    asking: VerifyArguments, known: About, found: CaseResults, *, speculates: bool
) -> Iterator[str]:
    """Yield remarks that a reader of the figures needs."""
    if asking.adds_drafts:
        yield (
            "No speculation was asked for: n-gram drafts (num_speculative_tokens 4) were added. "
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 0}\' verifies '
            "without."
        )
    if not speculates:
        yield "Speculation is off: company and faults were verified, speculation was not."
    elif not found.drafts.windows:
        yield (
            "No draft was verified: the server speculates not at all, or found no draft worth its "
            "price. --no-adaptive-draft-length always drafts."
        )
    if asking.options.url is not None:
        yield "A server that runs already is not disturbed: no worker was killed or stopped."
        if not known.is_surestep:
            yield (
                "This server is not Surestep: it may speculate although requests ask for none "
                "(`speculative`), and then the rows with and without say the same."
            )
        elif found.drafts.windows:
            yield "Figures of drafts are those of all clients of the server in that time."


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
