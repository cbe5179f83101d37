"""Text that is written, or with --check compared: shared by the scripts beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def below(page: Path, heading: str, section: str) -> str:
    """A page with everything from a heading on replaced; the section begins with it."""
    return page.read_text().split(heading)[0].rstrip("\n") + "\n" + section


def bring_up_to_date(fresh: Mapping[Path, str]) -> int:
    """Write the files; with --check say which are out of date. Exit status: 1 when one is."""
    stale = [p for p, text in fresh.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if "--check" in sys.argv:
            script = Path(sys.argv[0]).name
            print(f"{path.relative_to(ROOT)} is out of date: run scripts/{script}")  # noqa: T201
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(fresh[path])
    return int("--check" in sys.argv and bool(stale))
