"""Habits that a reader may rely on everywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from repo.source import PACKAGES, ROOT, Source, calls, imports, product, sources, tracked

_READS_ENVIRONMENT = {
    "common/surestep_common/config.py",
    "common/surestep_common/__init__.py",
    "common/surestep_common/healthcheck.py",  # which asks whether it has to import the former
}
# `owner.create_task` where the owner is a TaskGroup of the function or object.
_TASK_OWNERS = re.compile(r"^(self\.)?_?(tasks|group|task_group)\.create_task$")
_MACHINE_PATHS = re.compile(r"(?<![\w.])/(home|Users|root|work|mnt|tmp/[a-z]+-)/?[\w.-]*")
_KSERVE = (
    "deploy/kserve/llminferenceservice.yaml",
    "tests/e2e/test_vllm_command_line.py",
)  # its paths
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WAITS = re.compile(r"(What|That|Of|As|One|How|Who|Whom|Whose|Whether|Which|Those)\b")
_OWN_LAYOUT = re.compile(r"# fmt: (skip|off)$", re.MULTILINE)
_MOST_OWN_LAYOUTS = 13  # only ever lowered
_TEXT = {".py", ".md", ".sh", ".toml", ".yml", ".yaml", ".proto", ".txt", ".c", ".h", ""}


def _places(nodes: Iterator[tuple[Source, int, str]]) -> list[str]:
    return [f"{source.name}:{line} {what}" for source, line, what in nodes]


def test_only_config_reads_the_environment() -> None:
    found = (
        (source, node.lineno, ast.unparse(node))
        for source in product()
        if source.name not in _READS_ENVIRONMENT
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}
    )
    assert _places(found) == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """And with no word that waits for its noun, outside the tests."""
    found = (
        (source, node.body[0].lineno, text.split("\n")[0])
        for source in sources()
        if not source.name.startswith("tests/")
        for node in ast.walk(source.tree)
        if isinstance(node, _DOCUMENTED)
        and (text := ast.get_docstring(node)) is not None
        and _WAITS.match(text)
    )
    assert _places(found) == []


def test_the_formatter_wins() -> None:
    """No tuple is unpacked where it is written, to fill lines."""
    packed = (
        (source, node.lineno, ast.unparse(node))
        for source in product()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple)
    )
    assert _places(packed) == []
    assert [source.name for source in product() if _OWN_LAYOUT.search(source.text)] == []
    assert sum(len(_OWN_LAYOUT.findall(s.text)) for s in sources()) <= _MOST_OWN_LAYOUTS


def test_nothing_prints() -> None:
    found = ((s, line, name) for s in product() for line, name in calls(s) if name == "print")
    assert _places(found) == []


def test_no_global_statement() -> None:
    found = (
        (source, node.lineno, "global")
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    )
    assert _places(found) == []


def test_task_groups_own_every_task() -> None:
    found = (
        (source, line, name)
        for source in product()
        for line, name in calls(source)
        if name.endswith(("create_task", "ensure_future")) and not _TASK_OWNERS.match(name)
    )
    assert _places(found) == []


def test_statuses_are_set_in_one_place() -> None:
    found = (
        (source, line, name)
        for source in product()
        if source.name != "common/surestep_common/rpc.py"
        for line, name in calls(source)
        if name.endswith("context.abort")
    )
    assert _places(found) == []


def test_unit_folders_are_no_packages() -> None:
    folders = {*PACKAGES.values(), "tests", "benchmarks"}
    inits = [n for n in tracked() if Path(n).name == "__init__.py"]
    assert [n for n in inits if Path(n).parts[0] in folders and len(Path(n).parts) == 2] == []


def test_reexports_are_listed() -> None:
    """A package's `__init__` that imports names says in `__all__`, sorted, which are public."""
    wrong = []
    for source in product():
        if not source.name.endswith("__init__.py"):
            continue
        names = _imported_names(source.tree)
        if names and _listed_names(source.tree) != sorted(names):
            wrong.append(source.name)
    assert wrong == []


def _imported_names(tree: ast.Module) -> set[str]:
    froms = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module != "__future__"]
    return {alias.asname or alias.name for node in froms for alias in node.names}


def _listed_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return None


def test_no_path_of_one_machine() -> None:
    wrong = []
    for name in tracked():
        if Path(name).suffix not in _TEXT or name in {
            "LICENSE",
            "tests/repo/test_habits.py",
            *_KSERVE,
        }:
            continue
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
        wrong += [f"{name}: {m.group()}" for m in _MACHINE_PATHS.finditer(text)]
    assert wrong == []


_EXECUTES_DATA = {
    *("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"),
    "multiprocessing",  # its queues and pipes pickle
}
_LOADS_CODE = re.compile(
    r"(^|\.)(torch\.load|yaml\.(load|unsafe_load|full_load)|eval|exec"
    r"|(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?)$"  # torch's, by pickle
)


def test_no_data_is_code() -> None:
    """Nothing that arrives or lies on disk is ever run: no pickle, no unsafe YAML, no eval."""
    found = [
        (source, line, name)
        for source in product()
        for line, name in imports(source)
        if name.partition(".")[0] in _EXECUTES_DATA
    ]
    found += [
        (source, line, name)
        for source in product()
        for line, name in calls(source)
        if _LOADS_CODE.search(name) and not name.endswith(".eval")  # a module's eval() mode
    ]
    assert _places(iter(found)) == []
