"""Packages in rooms: folders of few files, and imports between folders that go one way."""

from __future__ import annotations

import ast
import graphlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest
from repo.source import PACKAGES, Source, product, tracked

_IN_ROOMS = [
    "surestep",
    "surestep_cli",
    "surestep_gateway",
    "surestep_kernels",
    "surestep_scheduler",
    "surestep_worker",
]
_MOST_RECORDS = 21
_MAX_FILES = 15  # modules in a folder, its door not counted
_TESTS_OF_MORE = {  # than one package
    *("abuse", "clients", "data", "deploy", "e2e", "promises", "repo", "support", "tools"),
}


def _files(package: str) -> list[Source]:
    found = [source for source in product() if source.package == package]
    assert found, f"no such package: {package}"
    return found


@pytest.mark.parametrize("package", _IN_ROOMS)
def test_folders_have_few_files(package: str) -> None:
    modules = (PurePath(source.name) for source in _files(package))
    counts = Counter(str(module.parent) for module in modules if module.name != "__init__.py")
    assert {folder: n for folder, n in counts.items() if n > _MAX_FILES} == {}


@pytest.mark.parametrize("package", _IN_ROOMS)
def test_every_folder_says_what_lives_there(package: str) -> None:
    by_name = {source.name: source for source in _files(package)}
    inits = {str(PurePath(name).parent / "__init__.py") for name in by_name}
    rooms = [name for name in inits if len(PurePath(name).parts) > 3]
    assert [n for n in rooms if n not in by_name or not ast.get_docstring(by_name[n].tree)] == []


@pytest.mark.parametrize("package", _IN_ROOMS)
def test_imports_between_folders_go_one_way(package: str) -> None:
    """A folder is a room; a file that lies directly in the package is one of its own."""
    modules = {_module(source): source for source in _files(package)}
    arrows: dict[str, dict[str, str]] = defaultdict(dict)  # room to room, with an import as proof
    for name, source in modules.items():
        for line, target in _imports(source, name, set(modules)):
            if _room(target, modules) != _room(name, modules):
                proof = f"{source.name}:{line} imports {target}"
                arrows[_room(name, modules)][_room(target, modules)] = proof
    assert _circle(arrows) == []


def _circle(arrows: dict[str, dict[str, str]]) -> list[str]:
    """The imports of a circle of rooms, if there is one."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        rooms: list[str] = error.args[1]
        return [arrows[b][a] for a, b in itertools.pairwise(rooms)]
    return []


def test_a_circle_is_found() -> None:
    line = {"a": {"b": "a imports b"}, "b": {"c": "b imports c"}}
    assert _circle(line) == []
    assert sorted(_circle(line | {"c": {"a": "c imports a"}})) == [
        "a imports b",
        "b imports c",
        "c imports a",
    ]


def _module(source: Source) -> str:
    """Dotted name of a file below its package's unit folder."""
    parts = Path(source.name).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str, modules: dict[str, Source]) -> str:
    is_folder = modules[module].name.endswith("__init__.py")
    parts = module.split(".")
    if is_folder or len(parts) <= 2:
        return module
    return ".".join(parts[:-1])


def _imports(source: Source, name: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and module of every import of a module of the same package, lazy ones included."""
    folder = name.split(".")
    if not source.name.endswith("__init__.py"):
        folder = folder[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                target = f"{base}.{alias.name}"
                if target in modules or base in modules:
                    yield node.lineno, target if target in modules else base


def test_packages_in_rooms_exist() -> None:
    assert set(_IN_ROOMS) <= set(PACKAGES)


def test_a_step_changes_its_clothes_seldom() -> None:
    """A ratchet on the records on the way of a step: each is one more thing to know."""
    step = [s for s in product() if s.name.startswith("worker_svc/surestep_worker/step/")]
    records = [
        node.name
        for source in step
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        and ("NamedTuple" in map(ast.unparse, node.bases) or node.decorator_list)
    ]
    assert len(records) <= _MOST_RECORDS, records


def test_tests_lie_where_their_subject_does() -> None:
    """What `gateway/surestep_gateway/http` does is tested in `tests/gateway/http`."""
    rooms = {str(PurePath(source.name).parent) for source in product()}
    houses = {
        folder.removesuffix("_svc"): f"{folder}/{package}" for package, folder in PACKAGES.items()
    }
    astray = []
    for folder in {PurePath(name).parent for name in tracked() if name.startswith("tests/")}:
        _, house, *room = (*folder.parts, ".")
        if house in houses:
            known = str(PurePath(houses[house], *room)) in rooms
        else:
            known = house in {".", *_TESTS_OF_MORE}
        astray += [] if known else [str(folder)]
    assert astray == []


def test_test_files_have_names_of_their_own() -> None:
    """Pytest imports them by these: of two with one name it collects the first."""
    names = Counter(PurePath(name).name for name in tracked() if "/test_" in name)
    assert [name for name, count in names.items() if count > 1] == []
