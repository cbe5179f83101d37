"""An op is a folder of kernels/surestep_kernels: its reference, its kernels, and a test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from repo.source import PACKAGES, ROOT, tracked

_PACKAGE = ROOT / PACKAGES["surestep_kernels"] / "surestep_kernels"
_SHARED = {"columns"}  # what the implementations of all ops in one language share
# Which is made of it; which has one test with it.
_TESTED_WITHIN = {"gather_tokens": "gather_step", "gelu_and_mul": "silu_and_mul"}
_COLUMNS = {"reference.py", "cpu.c", "cpu.py", "triton.py"}
_SYMBOL = re.compile(r"^\w[\w ]*\bsurestep_(\w+)\([^;{]*\{", re.MULTILINE)


def _files() -> list[Path]:
    names = [ROOT / name for name in tracked()]
    return [path.relative_to(_PACKAGE) for path in names if path.is_relative_to(_PACKAGE)]


def _ops() -> set[str]:
    ops = {path.parts[0] for path in _files() if len(path.parts) > 1} - _SHARED
    assert len(ops) > 20
    return ops


def _with(name: str) -> set[str]:
    """Ops whose folder has such a file."""
    found = {path.parts[0] for path in _files() if path.name == name and len(path.parts) > 1}
    assert len(found) > 10
    return found


def test_an_op_has_a_door_and_a_reference() -> None:
    files = {path.as_posix() for path in _files()}
    needed = {f"{op}/{name}" for op in _ops() for name in ("__init__.py", "reference.py")}
    assert needed - files == set()


def test_an_op_is_in_one_folder() -> None:
    """No other file or folder has its name, and its columns lie beside its door."""
    ops, files = _ops(), _files()
    code = [path for path in files if path.suffix != ".h"]  # others include headers
    below = [path for path in code if ops & {path.stem, *path.parts[1:-1]}]
    assert [path.as_posix() for path in below] == []
    columns = [path for path in files if path.name in _COLUMNS and len(path.parts) > 1]
    assert [p.as_posix() for p in columns if len(p.parts) != 2 or p.parts[0] not in ops] == []


def test_c_is_called_from_the_folder_that_has_it() -> None:
    assert _with("cpu.c") == _with("cpu.py")
    called = re.compile(r"library\.(?:short|long)\(")
    outside = [path for path in _files() if path.name != "cpu.py" and path.suffix == ".py"]
    assert [p for p in outside if called.search((_PACKAGE / p).read_text())] == []


def test_c_functions_are_defined_once() -> None:
    sources = [path for path in _files() if path.suffix == ".c"]
    found = [name for path in sources for name in _SYMBOL.findall((_PACKAGE / path).read_text())]
    assert len(found) > 20
    assert [name for name, count in Counter(found).items() if count > 1] == []


@pytest.mark.parametrize("op", sorted(_ops()))
def test_an_op_is_tested_in_every_column(op: str) -> None:
    """By a file that is named after it, whose cases take each column from one fixture."""
    test = ROOT / "tests" / "kernels" / f"test_{_TESTED_WITHIN.get(op, op)}.py"
    fixtures = set(re.findall(r"\b(\w+): (?:KernelSet|str)\b", test.read_text()))
    if op in _with("cpu.c") & _with("triton.py"):
        assert fixtures & {"column", "kernels"}
    elif op in _with("triton.py"):
        assert "gpu" in fixtures
