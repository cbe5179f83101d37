"""A reader finds every page, and no link leads nowhere."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from repo.source import ROOT, product, tracked

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(  # of a file or folder of the repository, with stars for some of it
    r"`((?:proto|common|kernels|gateway|scheduler_svc|worker_svc|cli|client|tests|tools|deploy|charts)"
    r"/[\w/.*-]+|benchmarks/[\w*]+\.py)`"
)
_MAX_FIRST_PAGE = 100  # lines
_MAX_WORDS = 37_000  # of the pages that are read, as `wc -w` counts
_MAX_REFERENCE_WORDS = 2_500  # of those in which a word, a question or a size is looked up
_MAX_FIRST_SENTENCE = 30  # words
_WAITING = "What|That|Of|As|One|How|Who|Whom|Whose|Whether|Which|Those"  # for their noun
_WAITING_SENTENCE = re.compile(
    rf"(?:^(?:[#*>\d. ]+ )?|[.:] |\| )(?:\*\*)?(?:{_WAITING})\b.*", re.MULTILINE
)
_PAGE_IN_FILE = re.compile(r"docs/[\w/-]+\.md(?:#[\w-]+)?")  # as alerts name theirs


def _text(page: Path) -> str:
    """Without code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def _leads_somewhere(page: Path, target: str) -> bool:
    """Whether there is what a link on a page names."""
    name, _, anchor = target.partition("#")
    goal = (page.parent / name).resolve() if name else page
    return goal.exists() and (not anchor or anchor in _anchors(goal))


def _links(page: Path) -> Iterator[str]:
    """Within the repository."""
    yield from (link for link in _LINK.findall(_text(page)) if "://" not in link)


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / name for name in tracked() if name.endswith(".md")]
    assert any(list(_links(page)) for page in pages)
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in _links(page)
        if not _leads_somewhere(page, link)
    ]
    assert lost == []


def test_first_pages_are_short() -> None:
    """What a newcomer reads first: at most as many lines as are read at once."""
    pages = ("README.md", "docs/change/structures.md", "docs/change/extend.md")
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in pages}
    assert {name: n for name, n in lengths.items() if n > _MAX_FIRST_PAGE} == {}


def _pages(folders: str = "use|run|change") -> list[Path]:
    """Return the pages that readers need: all but the notebook in docs/lab."""
    return [ROOT / name for name in tracked() if re.match(rf"docs/({folders})/.*\.md$", name)]


@pytest.mark.parametrize(
    ("folders", "least", "most"),
    [("use|run|change", 20, _MAX_WORDS), ("reference", 4, _MAX_REFERENCE_WORDS)],
)
def test_pages_are_few_words(folders: str, least: int, most: int) -> None:
    words = {page.name: len(page.read_text().split()) for page in _pages(folders)}
    assert len(words) > least
    assert sum(words.values()) <= most, words


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.stem)
def test_a_page_begins_with_what_the_reader_gets(page: Path) -> None:
    """In one sentence, and then with something to copy or a picture."""
    title, *paragraphs = page.read_text().split("\n## ")[0].split("\n\n")
    assert title.startswith("# ")
    sentence = re.split(r"(?<=[.:])\s", paragraphs[0])[0]
    assert re.fullmatch(r"[\w`].*[.:]", sentence, re.DOTALL)
    assert len(sentence.split()) <= _MAX_FIRST_SENTENCE
    assert any(paragraph.startswith("```") for paragraph in paragraphs[1:])


@pytest.mark.parametrize("page", _pages("use|run|change|reference"), ids=lambda page: page.stem)
def test_no_sentence_waits_for_its_noun(page: Path) -> None:
    assert _WAITING_SENTENCE.findall(_text(page)) == []


def test_the_readme_leads_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in _links(ROOT / "README.md")}
    pages = {name for name in tracked() if Path(name).match("docs/*/*.md")}
    assert len(pages) > 20
    assert pages - linked == set()


def test_pages_that_alerts_and_charts_name_are_there() -> None:
    lost = [
        f"{name}: {target}"
        for name in tracked()
        if name.startswith(("deploy/", "charts/"))
        for target in _PAGE_IN_FILE.findall((ROOT / name).read_text(encoding="utf-8"))
        if not _leads_somewhere(ROOT / "README.md", target)
    ]
    assert lost == []


def test_every_metric_is_on_a_page() -> None:
    metric = re.compile(r"surestep:[a-z0-9_]+")
    made = {
        node.value
        for source in product()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and metric.fullmatch(node.value)
    }
    pages = " ".join((ROOT / n).read_text() for n in tracked() if re.match("docs/(use|run)/", n))
    told = {re.sub(r"(_total|_)$", "", name) for name in metric.findall(pages)}
    assert made
    assert {name.removesuffix("_total") for name in made} - told == set()


def test_every_alert_that_wakes_somebody_has_a_section() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    critical = {a["alert"].lower() for a in alerts if a["labels"]["severity"] == "critical"}
    assert critical
    assert critical - _anchors(ROOT / "docs" / "run" / "operate.md") == set()


def test_pages_name_files_that_are_there() -> None:
    pages = [ROOT / name for name in tracked() if name == "README.md" or name.startswith("docs/")]
    named = {
        (page.name, name)
        for page in pages
        if page.suffix == ".md"
        for name in _PATH.findall(page.read_text())
        if "NAME" not in name
    }
    assert len(named) > 150
    assert sorted((page, name) for page, name in named if not any(ROOT.glob(name))) == []


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
