"""A browser without a window, where there is one: Chromium, as Debian and others package it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from playwright import async_api, sync_api

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

_OPTIONS: dict[str, Any] = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}


@contextmanager
def browser() -> Iterator[sync_api.Browser]:
    """One for tests that are no coroutines."""
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(**_OPTIONS)
        try:
            yield running
        finally:
            running.close()


@asynccontextmanager
async def async_browser() -> AsyncIterator[async_api.Browser]:
    """One for those that are."""
    async with async_api.async_playwright() as playwright:
        running = await playwright.chromium.launch(**_OPTIONS)
        try:
            yield running
        finally:
            await running.close()


def complaints(page: Any) -> list[str]:
    """What the page's console and its scripts complain about, from now on."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda said: found.extend([said.text] if said.type == "error" else []))
    return found
