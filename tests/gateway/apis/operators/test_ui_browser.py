"""The status page in Chromium, before schedulers that say and do whatever they like."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect
from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import default_info, failing, replay
from support.processes.browser import async_browser, complaints, needs_browser
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault, QueueFull
from surestep_proto import supervisor_pb2
from surestep_proto.scheduler_pb2 import (
    RECOVERING,
    AdapterLoad,
    DraftingValue,
    Incident,
    SchedulerStats,
    SchedulerStatus,
)

pytestmark = [needs_browser, pytest.mark.timeout(120), pytest.mark.rotates(4, turn=3)]

PATIENCE_MS = 30_000
HOSTILE = '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script>'
NARROW = {"width": 360, "height": 740}


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with async_browser() as running:
        yield running


@asynccontextmanager
async def visit(chromium: Browser, stack: Stack, path: str = "/ui", **options: Any) -> Any:
    """The page at its first look."""
    context = await chromium.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    await page.goto(stack.url + path)
    try:
        yield page
    finally:
        await context.close()


async def serve(stack: Stack, **facts: Any) -> None:
    """Have every scheduler serve another model, and the gateway know."""
    for scheduler in stack.schedulers:
        scheduler.info = default_info(**facts)
        await scheduler.set_serving(False)
    await stack.until_serving(0)
    for scheduler in stack.schedulers:
        await scheduler.set_serving(True)
    await stack.until_serving(len(stack.schedulers))


async def shows(page: Page, where: str, text: str) -> None:
    """Wait until it does."""
    await expect(page.locator(where).first).to_contain_text(text, timeout=PATIENCE_MS)


async def test_hostile_text_stays_text(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack(served_model_name=HOSTILE)
    stack.scheduler.script = replay(
        [*tiny_tokenizer.build().encode(HOSTILE).ids, tiny_tokenizer.EOS_ID]
    )
    await serve(stack, model_path=f"/m/{HOSTILE}", drafter=HOSTILE)
    stack.scheduler.status = SchedulerStatus(
        waiting_for=HOSTILE,
        state=RECOVERING,
        incidents=[Incident(cause=HOSTILE, reason=HOSTILE, epoch=1)],
        supervisors=[
            supervisor_pb2.SupervisorStatus(failure=HOSTILE, rank_state=supervisor_pb2.DEAD)
        ],
    )
    async with visit(chromium, stack) as page:
        found = complaints(page)
        await shows(page, "#faults", HOSTILE)
        await page.get_by_label("Message").fill(HOSTILE)
        await page.get_by_label("Message").press("Enter")
        await shows(page, ".turn.assistant .said", HOSTILE)
        await shows(page, ".turn.user .said", HOSTILE)
        await shows(page, ".turn.assistant .who", HOSTILE)
        await shows(page, ".scheduler .says", HOSTILE)
        await shows(page, ".ranks", HOSTILE)
        await shows(page, "#server b", HOSTILE)
        assert await page.locator("img:not([src$='icon.svg'])").count() == 0
        assert await page.locator("body script").count() == 0
        assert "Surestep" in await page.title()
        assert found == []


async def test_keys(start_stack: StartStack, chromium: Browser) -> None:
    """The page comes without one and says what it needs; a key lives as long as its tab."""
    stack = await start_stack(api_key="right", admin_api_key="admin")
    async with visit(chromium, stack) as page:
        await shows(page, "#problem", "asks for an API key")
        field = page.get_by_label("Key, kept in this tab")
        await field.fill("wrong")
        await field.press("Enter")
        await shows(page, "#problem", "does not accept this API key")
        await page.get_by_text("API key", exact=True).click()
        await field.fill("admin")
        await field.press("Enter")
        await shows(page, ".scheduler header .state", "serving")
        await expect(page.locator("#problem")).to_be_hidden()
        await page.get_by_label("Message").fill("hello")
        await page.get_by_label("Message").press("Enter")
        await shows(page, ".turn .wrong", "admin key")
        await page.get_by_text("API key", exact=True).click()
        await field.fill("right")
        await field.press("Enter")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_label("Message").press("Enter")
        await shows(page, ".turn.assistant >> nth=1", "token")
        await page.reload()
        await shows(page, ".scheduler header .state", "serving")
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"


async def test_states_in_plain_words(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack(replicas=2)
    first, second = stack.schedulers
    async with visit(chromium, stack) as page:
        await shows(page, ".scheduler >> nth=0", "No drafter")
        second.stats = SchedulerStats(num_running=5)
        await shows(page, ".tile >> nth=2", "5 running")
        await serve(stack, drafter="ngram", max_draft_tokens=4)
        heartbeat = supervisor_pb2.Heartbeat(phase=supervisor_pb2.LOADING)
        loading = supervisor_pb2.SupervisorStatus(
            rank_state=supervisor_pb2.STARTING, heartbeat=heartbeat
        )
        first.status = SchedulerStatus(
            state=RECOVERING, waiting_for="epoch 3 is lost: gone", supervisors=[loading]
        )
        await second.stop()
        await shows(page, ".scheduler header .state >> nth=0", "recovering")
        await shows(page, ".scheduler .says >> nth=0", "Open requests wait and go on")
        await shows(page, ".ranks", "loading the model")
        await shows(page, ".scheduler header .state >> nth=1", "does not answer")
        await shows(page, "#announce", "does not answer")
        await shows(page, ".tile >> nth=2", "0 running")  # what it had is not there any more
        await shows(page, "#faults", f"The scheduler did not answer (127.0.0.1:{second.port})")
        first.stats = SchedulerStats(speculation_suspended=True)
        first.status = SchedulerStatus()
        await shows(page, ".scheduler >> nth=0", "Drafts are suspended")
        await second.start()
        await shows(page, ".scheduler header .state >> nth=1", "serving")
        await stack.server.gateway.admission.leave()
        await shows(page, "#server", "shutting down")


async def test_when_the_gateway_goes_away(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack()
    async with visit(chromium, stack) as page:
        await shows(page, ".scheduler header .state", "serving")
        await page.route("**/overview", lambda route: route.abort())
        await shows(page, "#problem", "The gateway does not answer. It is asked again every second")
        await shows(page, "#problem", "The figures are those of")
        await page.unroute("**/overview")
        await expect(page.locator("#problem")).to_be_hidden(timeout=PATIENCE_MS)


async def break_streams(stack: Stack, count: int) -> None:
    """Answers with a status of 200, in which a client reads an error."""
    stack.scheduler.script = failing(ModelFault("no logits"), after=[70])
    for _ in range(count):
        events = await stack.stream("/v1/completions", prompt="hello", max_tokens=4)
        assert events[-1]["error"]["code"] == "server_error"


async def test_the_page_says_what_clients_see(start_stack: StartStack, chromium: Browser) -> None:
    """Health says OK all the while: the process answers, and its scheduler serves."""
    stack = await start_stack()
    await stack.stream("/v1/completions", prompt="hello", max_tokens=4)
    async with visit(chromium, stack) as page:
        await shows(page, "#server .state", "serving")
        await expect(page.locator("#server .state")).to_have_text("serving")
        tiles = page.locator("#clients .tile")
        await expect(tiles).to_have_count(5)
        for number, unit in enumerate(("s", "s", "s", "/s", "/s")):
            axes = tiles.nth(number).locator(".plot")
            await expect(axes.locator(".most")).to_contain_text(unit)
            await expect(axes.locator(".zero")).to_have_text("0")
            await expect(axes.locator(".axis")).to_contain_text("ago")
        await shows(page, "#clients .tile >> nth=0", "p95")
        await break_streams(stack, 3)
        assert (await stack.client.get("/health/ready")).status_code == 200
        await shows(page, "#server .state", "serving; 3 of 4 answers failed in the last minute")
        await expect(page.locator("#server .state")).to_have_class("state bad")
        await shows(page, "#clients .tile.bad", "server_error 3; 3 inside streams")
        stack.scheduler.script = failing(QueueFull("full"))
        await stack.complete()
        await shows(page, "#clients .tile >> nth=4", "1 with 429")
        assert (await page.title()).startswith("! ")


async def test_a_gateway_that_is_gone_is_not_serving(
    start_stack: StartStack, chromium: Browser
) -> None:
    """Nobody knows what it is: neither what was green is green, nor what was red is red."""
    stack = await start_stack()
    ranks = [supervisor_pb2.SupervisorStatus(rank_state=supervisor_pb2.READY, rank_pid=7)]
    stack.scheduler.status = SchedulerStatus(supervisors=ranks)
    async with visit(chromium, stack) as page:
        await shows(page, ".ranks .state", "ready")
        answer: list[Any] = []  # routes that are never answered

        async def hang(route: Any) -> None:
            answer.append(route)

        away = ("abort", lambda route: route.abort()), ("hang", hang)
        for how, handler in away:
            await page.route("**/overview", handler)
            for where in ("#server .state", ".scheduler header .state", ".ranks .state"):
                state = page.locator(where).first
                await expect(state).to_have_text("unknown", timeout=PATIENCE_MS)
                await expect(state).to_have_class("state unknown")
                colour = "e => getComputedStyle(e, '::before').borderTopColor"
                red, green, blue = rgb(await state.evaluate(colour))
                assert max(red, green, blue) - min(red, green, blue) < 24, how
            await shows(page, "#server", "“serving” when last seen")
            await shows(page, "#server", " s ago")
            await shows(page, ".scheduler .says", "“serving” when last seen")
            assert (await page.title()).startswith("? ")
            for route in answer:
                await route.abort()
            await page.unroute("**/overview", handler)
            await expect(page.locator("#server .state")).to_have_text(
                "serving", timeout=PATIENCE_MS
            )
            await expect(page.locator(".unknown, .outdated")).to_have_count(0)


def rgb(colour: str) -> list[int]:
    """The three channels of what a browser calls a colour."""
    return [int(part) for part in re.findall(r"\d+", colour)[:3]]


async def test_nobody_looks_at_a_hidden_page(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack()
    async with visit(chromium, stack) as page:
        await shows(page, ".scheduler header .state", "serving")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        async with asyncio.timeout(10):
            while not asked:
                await asyncio.sleep(0.05)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.evaluate(hide % "true" + tell)
        await page.wait_for_load_state("networkidle")
        asked.clear()
        await page.wait_for_timeout(2500)  # two looks, if somebody looked
        assert asked == []
        await page.evaluate(hide % "false" + tell)
        async with asyncio.timeout(10):
            while not asked:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_narrow_screens_have_nothing_beside_them(
    start_stack: StartStack, chromium: Browser, scheme: str
) -> None:
    stack = await start_stack(replicas=2, served_model_name="a" * 90)
    ranks = [supervisor_pb2.SupervisorStatus(rank=rank, rank_pid=rank + 1) for rank in range(3)]
    reason = "rank 1: " + "x" * 300
    await serve(stack, model_path="/" + "m" * 120, drafter="mtp")
    for scheduler in stack.schedulers:
        scheduler.status = SchedulerStatus(
            supervisors=ranks, incidents=[Incident(cause="worker_exit", reason=reason, epoch=1)]
        )
        scheduler.stats = SchedulerStats(
            num_drafts=9,
            num_accepted_tokens_per_pos=[5] * 16,
            drafting=[DraftingValue(rows=8, value=0.93, num_trials=7)],
            adapters=[AdapterLoad(name="poet" * 9, num_running=2)],
        )
    options = {"viewport": NARROW, "color_scheme": scheme}
    async with visit(chromium, stack, "/ui/", **options) as page:
        await shows(page, ".scheduler >> nth=1", "draft 16")
        await shows(page, ".scheduler >> nth=1", "0.93 times")
        await shows(page, ".scheduler >> nth=1", "poet" * 9)
        await page.get_by_label("Message").fill("hello")
        await page.get_by_label("Message").press("Enter")
        await shows(page, ".turn.assistant .foot", "tokens")
        await page.get_by_text("Options").click()
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == NARROW["width"]


async def test_the_keyboard_reaches_everything(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack()
    async with visit(chromium, stack) as page:
        await shows(page, ".scheduler header .state", "serving")
        seen = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            outline = await page.evaluate(
                "[document.activeElement.id || document.activeElement.textContent.trim(),"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            seen.append(outline[0])
            assert outline[1] != "none", outline
        assert seen[:2] == ["Skip to the figures", "Skip to the chat"]
        for name in ("API key", "new-chat", "talk", "prompt", "Options", "send"):
            assert name in seen
        for _ in range(30):  # what has the focus keeps it, however often figures are renewed
            await page.wait_for_timeout(50)
        focused = await page.evaluate(
            "document.activeElement.id || document.activeElement.textContent.trim()"
        )
        assert focused == seen[-1]
        await page.get_by_label("Message").fill("one")
        await page.get_by_label("Message").press("Shift+Enter")
        assert await page.get_by_label("Message").input_value() == "one\n"
        named = await page.evaluate(
            "[...document.querySelectorAll('button, input, select, textarea')].filter("
            "e => !(e.labels?.length || e.textContent.trim())).length"
        )
        assert named == 0


async def test_a_model_that_writes_no_text(start_stack: StartStack, chromium: Browser) -> None:
    stack = await start_stack()
    await serve(stack, headless=True)
    async with visit(chromium, stack) as page:
        await shows(page, "#hint", "makes vectors and writes no text")
        await expect(page.get_by_label("Message")).to_be_disabled()
