"""The repository's Python files as syntax trees, for the gates."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "surestep_proto": "proto",
    "surestep_common": "common",
    "surestep_kernels": "kernels",
    "surestep_gateway": "gateway",
    "surestep_scheduler": "scheduler_svc",
    "surestep_worker": "worker_svc",
    "surestep_cli": "cli",
    "surestep": "client",
}
_CODE = {".py", ".c", ".h", ".proto"}


@dataclass(frozen=True)
class Source:
    """One file; `name` is its path from the root."""

    name: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is asked for: collecting the tests takes names alone."""
        return ast.parse(self.text, self.name)

    @property
    def package(self) -> str | None:
        """Import package the file belongs to; None outside the packages."""
        parts = Path(self.name).parts
        inside = len(parts) > 2 and PACKAGES.get(parts[1]) == parts[0]
        return parts[1] if inside else None


@functools.cache
def tracked() -> tuple[str, ...]:
    """Paths of all files that are committed or about to be."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(sorted(p for p in set(listing.stdout.splitlines()) if (ROOT / p).is_file()))


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file that people wrote."""
    names = [n for n in tracked() if n.endswith(".py") and "_pb2" not in n]
    return tuple(Source(name, (ROOT / name).read_text(encoding="utf-8")) for name in names)


def code(package: str) -> list[str]:
    """Paths of the Python, C and protocol files of a package that people wrote."""
    folder = f"{PACKAGES[package]}/{package}/"
    names = [name for name in tracked() if name.startswith(folder) and "_pb2" not in name]
    found = [name for name in names if Path(name).suffix in _CODE]
    assert found, f"no such package: {package}"
    return found


def product() -> tuple[Source, ...]:
    """Those inside the packages."""
    return tuple(source for source in sources() if source.package is not None)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import, lazy ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def eager_imports(source: Source) -> Iterator[str]:
    """Names imported when the module itself is imported: not in functions, not for typing only."""
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def calls(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every call whose target is a plain dotted name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
