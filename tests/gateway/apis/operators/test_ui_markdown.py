"""Answers as Markdown in the chat of the status page: in Chromium, whatever a model writes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, expect
from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import replay
from support.processes.browser import async_browser, complaints, needs_browser
from support.processes.gateway_stack import Stack

pytestmark = [needs_browser, pytest.mark.timeout(120)]

PATIENCE_MS = 30_000
HTML = """async ([text, marks]) => {
  const { Marked, markdown } = await import(new URL("ui/markdown.js", location.origin));
  const shown = document.createElement("div");
  shown.append(...markdown(new Marked(text, marks || "p".repeat(text.length))));
  return shown.innerHTML;
}"""


@pytest.fixture
async def page(stack: Stack) -> AsyncIterator[Page]:
    async with async_browser() as running:
        opened = await running.new_page()
        opened.set_default_timeout(PATIENCE_MS)
        await opened.goto(f"{stack.url}/ui")
        yield opened


async def html(page: Page, text: str, marks: str = "") -> str:
    """What is made of a text, without the spans of what was not drafted."""
    made: str = await page.evaluate(HTML, [text, marks])
    return made if marks else made.replace("<span>", "").replace("</span>", "")


WRITTEN = [
    ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    ("# A\n### B", "<h4>A</h4><h6>B</h6>"),
    ("#hash", "<p>#hash</p>"),
    ("**b** *i* __b__ _i_", "<p><strong>b</strong> <em>i</em> <strong>b</strong> <em>i</em></p>"),
    ("~~d~~", "<p><del>d</del></p>"),
    ("***both*** **a *b***", "<p><strong><em>both</em></strong> <strong>a <em>b</em></strong></p>"),
    ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
    (r"\*plain\* `*code*` ``a`b``", "<p>*plain* <code>*code*</code> <code>a`b</code></p>"),
    ("- a\n- b\n  - c\n\nd", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("- a\n\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("In\n1984. A year", "<p>In\n1984. A year</p>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    (
        "```py\nx = '<b>'\n\n# no\n```\nz",
        "<pre tabindex=\"0\"><code>x = '&lt;b&gt;'\n\n# no</code></pre><p>z</p>",
    ),
    ("~~~\nopen", '<pre tabindex="0"><code>open</code></pre>'),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("&amp; <i>x</i>", "<p>&amp;amp; &lt;i&gt;x&lt;/i&gt;</p>"),
]
LINKS = [
    ("[a](https://x.example/p_(q)?r=1)", "https://x.example/p_(q)?r=1", "a"),
    ('[a](http://x.example "title")', "http://x.example/", "a"),
    ("[](https://x.example)", "https://x.example/", "https://x.example"),
    ("<https://x.example>", "https://x.example/", "https://x.example"),
    ("see https://x.example/a.", "https://x.example/a", "https://x.example/a"),
    ("[a](mailto:a@x.example)", "mailto:a@x.example", "a"),
    ("![a](https://x.example/a.png)", "https://x.example/a.png", "a"),
]
# A quadratic time over 60,000 characters of them would be minutes.
REPEATED = (
    *("*", "**a ", "_a ", "`", "``a ", "[", "[a](", "![a]", "> ", "- ", "#", "# \t ", "<", "h"),
    *("https://", "|a", "```\n", "1. a\n", "  - a\n", "-|", "\\", "~~a", "*a **b ", "- - "),
)


async def test_what_is_written(page: Page) -> None:
    assert {text: await html(page, text) for text, _ in WRITTEN} == dict(WRITTEN)


async def test_tables(page: Page) -> None:
    made = await html(page, "| a | b |\n|---|:-:|\n| 1 | `x` \\| y<br>z |\n\nend")
    assert '<th scope="col">a</th><th scope="col">b</th>' in made
    assert "<td>1</td><td><code>x</code> | y<br>z</td>" in made
    assert made.endswith("<p>end</p>")


async def test_links(page: Page) -> None:
    rel = 'target="_blank" rel="noopener noreferrer nofollow"'
    for text, href, shown in LINKS:
        made = await html(page, text)
        assert f'<a href="{href}" {rel} title="{href}">{shown}</a>' in made
        assert "<img" not in made


async def test_drafted_pieces_stay_marked_within_it(page: Page) -> None:
    made = await html(page, "**ab** c", "ppdpppdd")
    drafted = '<span class="drafted">'
    assert made == f"<p><strong>{drafted}a</span><span>b</span></strong>{drafted} c</span></p>"


ATTACKS = (
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "[click](javascript:document.title='taken')",
    "[click](JaVaScRiPt:document.title='taken')",
    "[click](java&#115;cript:alert(1)) [c](data:text/html,<script>alert(1)</script>)",
    "![x](javascript:alert(1)) ![x](http://127.0.0.1:1/leak.png)",
    "<javascript:alert(1)> <svg onload=alert(1)> <iframe src=https://x.example></iframe>",
    '[a](https://x.example/"onmouseover="alert(1))',
    "[x](vbscript:a) [x](file:///etc/passwd) [x](//x.example) [x](/admin/workers/restart)",
    "```\n</code></pre><script>document.title='taken'</script>\n```",
    "| <script>alert(1)</script> |\n|---|\n| <img src=x onerror=alert(1)> |",
    '<a href="javascript:alert(1)">x</a> <style>*{display:none}</style> <base href=//x.example>',
)


async def test_nothing_that_a_model_writes_runs_or_is_loaded(stack: Stack, page: Page) -> None:
    """As a chat, so that every path from the model to the screen is taken."""
    text = "\n\n".join(ATTACKS) + "\n\nover."
    ids = tiny_tokenizer.build().encode(text).ids
    stack.scheduler.info.max_model_len = 4 * len(ids)
    stack.scheduler.script = replay([*ids, tiny_tokenizer.EOS_ID], chunk=7)
    found, asked, dialogs = complaints(page), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    await page.get_by_label("Message").fill("hello")
    await page.get_by_label("Message").press("Enter")
    said = page.locator(".turn.assistant .said")
    await expect(said).to_contain_text("over.", timeout=PATIENCE_MS)
    await expect(page.locator(".turn.assistant[aria-busy]")).to_have_count(0)
    for attack in ("<script>document.title='taken'</script>", "[click](javascript:", "<svg onload"):
        await expect(said).to_contain_text(attack)
    names = "es => [...new Set(es.map(e => e.nodeName))]"
    elements = set(await said.locator("*").evaluate_all(names))
    harmless = {"P", "SPAN", "A", "PRE", "CODE", "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
    assert elements <= harmless
    attributes = "es => [...new Set(es.flatMap(e => e.getAttributeNames()))]"
    known = {"class", "href", "target", "rel", "title", "tabindex", "role", "scope", "aria-label"}
    assert set(await said.locator("*").evaluate_all(attributes)) <= known
    for link in await said.locator("a").all():
        target = await link.get_attribute("href")
        assert target is not None
        assert target.startswith(("http://", "https://"))
        assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
    own = [url for url in asked if url.startswith(stack.url)]
    assert asked == own
    assert dialogs == found == []
    assert "Surestep" in await page.title()


async def test_no_text_takes_long(page: Page) -> None:
    for part in REPEATED:
        text = part * (60_000 // len(part))
        began = time.monotonic()
        for whole in (text, text.replace("\n", "") + "x", f"|{text}|\n|---|\n"):
            await html(page, whole)
        assert time.monotonic() - began < 10, part
