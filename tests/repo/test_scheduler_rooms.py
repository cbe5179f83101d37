"""The scheduler decides without knowing its shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from repo.source import PACKAGES, Source, product


def sources_of(package: str) -> list[Source]:
    return [source for source in product() if source.package == package]


def room(module: str) -> str:
    """The folder of a module, from its dotted name; a file beside the folders is a room itself."""
    return ".".join(module.split(".")[:2])


def module_of(source: Source) -> str:
    assert source.package is not None
    path = PurePath(source.name).relative_to(PACKAGES[source.package]).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")


def imported(source: Source) -> Iterator[str]:
    """Dotted names of what a module imports of its own package, for typing only included."""
    assert source.package is not None
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        home = node.module or ""
        if node.level:  # from a folder's own files: ruff forbids those of a parent
            parent = module_of(source).rpartition(".")[0]
            home = f"{parent}.{home}".removesuffix(".")
        if home == source.package or home.startswith(f"{source.package}."):
            yield from (f"{home}.{alias.name}" for alias in node.names)


def arrows(sources: list[Source]) -> Mapping[str, set[str]]:
    """The rooms that each room imports from."""
    rooms = {room(module_of(source)) for source in sources}
    found: dict[str, set[str]] = {name: set() for name in rooms}
    for source in sources:
        here = room(module_of(source))
        found[here] |= ({room(name) for name in imported(source)} & rooms) - {here}
    return found


def test_the_pure_folders_know_nothing_of_the_shell() -> None:
    """What decides imports no loop, no connection and no service."""
    found = arrows(sources_of("surestep_scheduler"))
    shell = {f"surestep_scheduler.{name}" for name in ("engine", "service", "vllm", "server")}
    assert shell <= set(found)
    for name in ("core", "cache", "speculation", "policy"):
        assert not found[f"surestep_scheduler.{name}"] & shell
