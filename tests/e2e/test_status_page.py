"""The status page of a real server in Chromium: figures, a chat, and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.faults.server import FaultyServer, serve_for_faults
from support.processes.browser import browser, complaints, needs_browser

pytestmark = [needs_browser, pytest.mark.timeout(180), pytest.mark.rotates(3, turn=1)]

MODEL = Path(__file__).parents[1] / "data" / "tiny-hybrid"
STORY = "Tell me a story about a bear."  # which the model has learnt
PATIENCE_MS = 60_000  # the machine may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """Steps take a while, so that things can happen during an answer."""
    flags = ("--speculative-config", "auto", "--no-adaptive-draft-length")
    folder = tmp_path_factory.mktemp("page")
    with serve_for_faults(MODEL, folder, *flags, variables={"FAULT_PACE_S": "0.1"}) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(server: FaultyServer, chromium: Browser) -> Iterator[Page]:
    """The page, loaded, without a complaint at any time."""
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    found = complaints(opened)
    opened.goto(f"{server.stack.url}/ui")
    expect(opened.locator(".scheduler header .state")).to_have_text("serving", timeout=PATIENCE_MS)
    yield opened
    context.close()
    assert found == []


def ask(page: Page, text: str) -> None:
    """Send a message; the answer is always the same."""
    if not page.locator("#temperature").is_visible():
        page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def finished(page: Page) -> Any:
    """The newest answer, once it is whole."""
    answer = page.locator(".turn.assistant").last
    expect(answer).not_to_have_attribute("aria-busy", "true", timeout=PATIENCE_MS)
    return answer


def test_the_page_shows_what_the_server_is(page: Page, server: FaultyServer) -> None:
    status = server.stack.scheduler()
    row = page.locator(".ranks tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text(f"pid {status['supervisors'][0]['rank_pid']}")
    expect(page.locator("#server")).to_contain_text("tiny")
    expect(page).to_have_title("tiny · Surestep")
    expect(page.locator("#faults")).to_contain_text("None since")
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#schedulers")).to_contain_text("mtp (the checkpoint has an MTP head)")


def test_a_chat_streams_and_shows_what_was_drafted(page: Page, server: FaultyServer) -> None:
    ask(page, STORY)
    said = page.locator(".turn.assistant .said").last
    expect(said).not_to_have_text("", timeout=PATIENCE_MS)
    early = said.text_content() or ""
    answer = finished(page)
    text = said.text_content() or ""
    assert text.startswith(early)
    assert len(text) > len(early)  # it came in pieces
    drafted = "".join(answer.locator(".said .drafted").all_text_contents())
    assert 0 < len(drafted) < len(text)
    figures = answer.locator(".foot").text_content() or ""
    tokens, accepted = map(int, re.findall(r"(\d+) tokens.*?, (\d+) of them drafted", figures)[0])
    assert 50 < accepted < tokens
    expect(page.locator(".bars").first).to_contain_text("draft 1")
    expect(page.get_by_text(re.compile(r"[1-9]\d* steps, [1-9]\d* tokens"))).to_be_visible()
    page.get_by_label("Drafts").select_option("0")
    page.get_by_role("button", name="New").click()
    ask(page, STORY)
    plain = finished(page)
    assert plain.locator(".said").text_content() == text  # the same, without drafts
    assert plain.locator(".drafted").count() == 0


def test_an_answer_can_be_stopped(page: Page, server: FaultyServer) -> None:
    ask(page, STORY)
    expect(page.locator(".turn.assistant .said").last).not_to_have_text("", timeout=PATIENCE_MS)
    page.get_by_role("button", name="Stop").click()
    expect(finished(page).locator(".foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    server.stack.wait_until(server.idle, "idleness", timeout_s=30)


def test_a_killed_worker_shows_up_and_comes_back(page: Page, server: FaultyServer) -> None:
    ask(page, STORY)
    expected = finished(page).locator(".said").text_content()
    page.get_by_role("button", name="New").click()
    old = server.stack.scheduler()
    ask(page, STORY)
    expect(page.locator(".turn.assistant .said span").nth(5)).to_be_attached(timeout=PATIENCE_MS)
    os.kill(old["supervisors"][0]["rank_pid"], signal.SIGKILL)
    fault = page.locator("#faults li").first
    expect(fault).to_contain_text("A worker ended", timeout=PATIENCE_MS)
    expect(fault).to_contain_text("SIGKILL")
    expect(page.locator("#announce")).to_contain_text("A worker ended", timeout=PATIENCE_MS)
    expect(fault).to_contain_text("serving again after", timeout=PATIENCE_MS)
    answer = finished(page)
    assert answer.locator(".said").text_content() == expected
    assert answer.locator(".wrong").count() == 0
    row = page.locator(".ranks tbody tr")
    expect(row).to_contain_text("ready", timeout=PATIENCE_MS)
    restarts = str(old["supervisors"][0]["restarts"] + 1)
    expect(row.locator('[data-label="Restarts"]')).to_have_text(restarts, timeout=PATIENCE_MS)
    epoch = row.locator('[data-label="Epoch"]')
    expect(epoch).to_have_text(str(old["epoch"] + 1), timeout=PATIENCE_MS)
    assert page.locator(".wide .band").count() >= 1


def test_it_goes_on_when_the_scheduler_is_lost(page: Page, server: FaultyServer) -> None:
    os.kill(server.stack.scheduler()["pid"], signal.SIGKILL)
    fault = page.locator("#faults li").first
    expect(fault).to_contain_text("The scheduler did not answer", timeout=PATIENCE_MS)
    expect(fault).to_contain_text("It was back after", timeout=PATIENCE_MS)
    state = page.locator(".scheduler header .state")
    expect(state).to_have_text("serving", timeout=PATIENCE_MS)
