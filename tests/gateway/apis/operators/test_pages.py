"""The pages for people, as a browser would see them."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest

PAGES = ("/", "/docs")


class Seen(HTMLParser):
    """What a page refers to, and its text; an end tag must close the last open one."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_comes_from_elsewhere_and_nothing_runs(stack: Stack, path: str) -> None:
    response = await stack.client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    seen = Seen(response.text)
    assert not seen.tags & {"script", "iframe", "form", "img", "link", "object", "base"}
    assert not [name for name in seen.attributes if name.startswith("on") or name == "style"]
    policy = response.headers["content-security-policy"]
    (style,) = re.findall(r"<style>(.*)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not [link for link in seen.links if re.match("[a-z]+:|//", link)]


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("hidden", [False, True])
async def test_links_lead_somewhere_from_wherever_they_are_read(
    start_stack: StartStack, root: str, hidden: bool
) -> None:
    stack = await start_stack(root_path=root, disable_fastapi_docs=hidden)
    for path in (f"{root}/", *([root] if root else ()), f"{root}/docs", f"{root}/docs/"):
        page = await stack.client.get(path)
        assert (page.status_code == 404) == (hidden and "docs" in path)
        links = [] if page.status_code == 404 else Seen(page.text).links
        assert all(link.startswith(f"{root}/") for link in links)
        for link in links:
            assert (await stack.client.get(link)).status_code == 200, link


async def test_the_home_page_says_what_is_served(start_stack: StartStack) -> None:
    stack = await start_stack(served_model_name="one,<b>two</b>&")
    html = (await stack.client.get("/")).text
    assert "one" in Seen(html).text
    assert "<b>two</b>&" in Seen(html).text
    assert "&lt;b&gt;two&lt;/b&gt;&amp;" in html
    assert "SERVING" in html
    await stack.scheduler.stop()
    await stack.until_serving(0)
    assert (await stack.client.get("/")).status_code == 200


async def test_the_docs_have_every_path_and_every_field(stack: Stack) -> None:
    text = Seen((await stack.client.get("/docs")).text).text
    document = (await stack.client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in text
    for kind in (ChatRequest, CompletionRequest):
        for field in kind.model_fields:
            assert field in text
    assert "number (≥ 0, ≤ 2)" in text
    assert "'left', 'right'" in text


async def test_every_endpoint_is_on_a_page_of_the_documentation(start_stack: StartStack) -> None:
    docs = Path(__file__).parents[4] / "docs"
    text = "".join(page.read_text() for page in docs.glob("*/*.md"))
    stack = await start_stack(admin_api_key="admin")
    paths = (await stack.client.get("/openapi.json")).json()["paths"]
    assert "/admin/workers/restart" in paths
    assert [
        path for path in paths if not re.search(rf"(?<!\w){re.escape(path)}(?![\w/])", text)
    ] == []


@pytest.mark.parametrize("path", PAGES)
async def test_pages_ask_for_keys_as_the_status_does(start_stack: StartStack, path: str) -> None:
    stack = await start_stack(api_key="right", admin_api_key="admin")
    for key, status in (("wrong", 401), ("right", 200), ("admin", 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await stack.client.get(path, headers=headers)).status_code == status
    assert (await stack.client.get(path)).status_code == 401
    other = {"host": "evil.example", "user-agent": "Mozilla/5.0"}
    other["authorization"] = "Bearer right"
    assert (await stack.client.get(path, headers=other)).status_code == 403
