"""The same in a browser, where there is one: pages of a foreign site, and of one that is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.browser import CHROMIUM, needs_browser
from support.processes.gateway_stack import Stack, StartStack, stacks
from support.processes.ports import free_port

pytestmark = needs_browser

PAGE = """<!doctype html><body><script>
const url = "%(url)s", body = JSON.stringify({prompt: "x", max_tokens: 1});
const json = {"content-type": "application/json"};
async function tell(work) {
  try { const r = await work; return r.type === "opaque" ? "opaque" : [r.status, await r.json()]; }
  catch (error) { return error.name; }
}
async function all() {
  const told = {
    simple: await tell(fetch(url + "/v1/completions", {method: "POST", body, mode: "no-cors"})),
    form: await tell(fetch(url + "/v1/completions", {method: "POST", mode: "no-cors",
      body: new URLSearchParams({prompt: "x"})})),
    json: await tell(fetch(url + "/v1/completions", {method: "POST", body, headers: json})),
    models: await tell(fetch(url + "/v1/models")),
    refused: await tell(fetch(url + "/v1/completions", {method: "POST", body: "{", headers: json})),
  };
  document.body.textContent = JSON.stringify(told);
}
all();
</script></body>"""


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    async with stacks(model) as start:
        yield start


async def browse(url: str, profile: Path) -> str:
    """Text of a page after its scripts have run. Every name leads to this machine."""
    assert CHROMIUM is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
    )
    rules = "--host-resolver-rules=MAP * 127.0.0.1"
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *flags, rules, f"--user-data-dir={profile}", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(90):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


async def visit(stack: Stack, origin: str, port: int, profile: Path) -> dict[str, Any]:
    """What a page of `origin`, served at `port`, was told by the gateway."""
    page = (PAGE % {"url": stack.url}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head % len(page) + page)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        shown = await browse(f"{origin}/", profile)
    _, _, told = shown.partition("<body>")
    return dict(json.loads(told.partition("</body>")[0]))


@pytest.mark.timeout(180)
async def test_a_foreign_page_gets_nothing(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack()
    port = free_port()
    told = await visit(stack, f"http://evil.example:{port}", port, tmp_path)
    assert told == {
        "simple": "opaque",
        "form": "opaque",
        "json": "TypeError",
        "models": "TypeError",
        "refused": "TypeError",
    }
    assert stack.scheduler.requests == []


@pytest.mark.timeout(180)
async def test_an_allowed_page_is_answered(start_stack: StartStack, tmp_path: Path) -> None:
    port = free_port()
    origin = f"http://app.example:{port}"
    stack = await start_stack(allowed_origins=origin)
    told = await visit(stack, origin, port, tmp_path)
    assert told["json"][0] == told["models"][0] == 200
    assert told["refused"][0] == 400
    assert told["refused"][1]["error"]["type"] == "invalid_request_error"
    assert len(stack.scheduler.requests) == 1  # what was not declared to be JSON is none


@pytest.mark.timeout(180)
async def test_a_name_that_leads_here_is_not_ours(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack()
    port = stack.server.address.rpartition(":")[2]
    assert "--allowed-origins" in await browse(f"http://evil.example:{port}/v1/models", tmp_path)
    assert '"object":"list"' in await browse(f"http://localhost:{port}/v1/models", tmp_path)
