"""The status page as it is served: by itself, from anywhere, and open to nobody's scripts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import pytest
import surestep_gateway
from support.processes.gateway_stack import Stack, StartStack

FOLDER = Path(surestep_gateway.__path__[0]) / "apis" / "operators" / "static"
FILES = sorted(path.name for path in FOLDER.iterdir())
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Seen(HTMLParser):
    """What a page refers to, and how."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.inline = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._inside = tag
        self.attributes |= given.keys()
        self.links += [given[name] or "" for name in ("href", "src") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []
        for name in ("for", "aria-labelledby"):
            if given.get(name):
                self.labelled.add(given[name] or "")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.inline += data


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("path", ["/ui", "/ui/"])
async def test_whatever_it_needs_is_found_from_where_it_is(
    start_stack: StartStack, root: str, path: str
) -> None:
    stack = await start_stack(root_path=root)
    page = await stack.client.get(root + path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    assert "{base}" not in page.text
    seen = Seen(page.text)
    assert not [link for link in seen.links if re.match("[a-z]+:|/", link)]
    for link in seen.links:
        if not link.startswith("#"):
            url = urljoin(f"{stack.url}{root}{path}", link)
            assert url.startswith(f"{stack.url}{root}/")
            assert (await stack.client.get(url)).status_code == 200, url


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.html"])
async def test_files_are_what_they_are_said_to_be(stack: Stack, name: str) -> None:
    reply = await stack.client.get(f"/ui/{name}")
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert reply.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    assert reply.headers["content-security-policy"] == POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.content == (FOLDER / name).read_bytes()
    assert len(reply.text.splitlines()) <= 300
    others = re.findall(r"""(?:from|import|url)\s*\(?["'](.+?)["']""", reply.text)
    assert all(re.fullmatch(r"\./[a-z]+\.js", other) for other in others)
    assert {other.removeprefix("./") for other in others} <= set(FILES)


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "..%2Fui.py", "%2e%2e/ui.py", ""])
async def test_nothing_else_is_served(stack: Stack, name: str) -> None:
    reply = await stack.client.get(f"/ui/{name or '.hidden'}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_url"


def test_text_stays_text() -> None:
    """Nothing in the scripts makes elements, styles or code of strings."""
    page = Seen((FOLDER / "index.html").read_text())
    assert page.inline == ""
    assert not [name for name in page.attributes if name.startswith("on") or name == "style"]
    assert page.labelled <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    makers = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|Function|srcdoc|DOMParser"
    for path in FOLDER.glob("*.js"):
        assert not re.search(rf"\b({makers}|createContextualFragment)\b", path.read_text()), path


async def test_the_page_is_open_and_its_figures_are_not(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="right", admin_api_key="admin")
    for path in ("/ui", "/ui/", "/ui/app.js"):
        assert (await stack.client.get(path)).status_code == 200
    for key, status in (("wrong", 401), ("right", 200), ("admin", 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await stack.client.get("/overview", headers=headers)).status_code == status
    assert (await stack.client.get("/overview")).status_code == 401
    for path in ("/uix", "/ui/../overview", "/ui/..%2Foverview"):
        assert (await stack.client.get(path)).status_code in (401, 404)
    other = {"host": "evil.example", "user-agent": "Mozilla/5.0"}
    assert (await stack.client.get("/ui", headers=other)).status_code == 403


async def test_it_can_be_switched_off(start_stack: StartStack) -> None:
    stack = await start_stack(ui=False)
    for path in ("/ui", "/ui/", "/ui/app.js", "/overview"):
        assert (await stack.client.get(path)).status_code == 404
    known = (await stack.client.get("/openapi.json")).json()["paths"]
    assert not known.keys() & {"/ui", "/overview"}
    assert "/ui" not in Seen((await stack.client.get("/")).text).links
