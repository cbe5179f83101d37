"""Hooks of mkdocs: README.md as first page, links that leave docs/ led into the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#:]+)(#[^)\s]*)?\)")
_HOME = "index.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the first page."""
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    page = re.sub(r"\]\(docs/", "](", readme)
    files.append(File.generated(config, _HOME, content=page))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ at the repository; without one, leave their text."""
    place = posixpath.dirname(page.file.src_uri)
    root = posixpath.dirname(_HOME) if page.file.src_uri == _HOME else "docs"
    known = {file.src_uri for file in files}

    def moved(match: re.Match[str]) -> str:
        head, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if posixpath.normpath(posixpath.join(place, target)) in known:
            return match.group()
        if (url := config.repo_url) is None or not url:
            return head.removeprefix("[").removesuffix("](")
        inside = posixpath.normpath(posixpath.join(root, place, target))
        return f"{head}{url.rstrip('/')}/blob/main/{inside}{anchor})"

    return _LINK.sub(moved, markdown)
