"""Files that a project has beside its code: changelog, workflows, issue forms, the site of its pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from repo.source import ROOT, tracked

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # of Keep a Changelog
_SCRIPT = re.compile(r"^\s*((?:scripts|\.ci|tests/deploy)/[\w.]+)|\$\((scripts/\w+)", re.MULTILINE)
_REGISTRIES = re.compile(r"\b(ghcr|docker|quay|gcr|nvcr|index\.docker)\.io\b")


def _commands(node: object) -> Iterator[str]:
    """Yield what a workflow runs."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "run")
        for value in node.values():
            yield from _commands(value)
    elif isinstance(node, list):
        for value in node:
            yield from _commands(value)


def test_the_changelog_has_the_newest_first() -> None:
    versions = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", CHANGELOG, re.MULTILINE)
    assert versions[0] == "Unreleased"
    numbers = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(versions) == CHANGELOG.count("\n## ")
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= KINDS


@pytest.mark.parametrize("arguments", [("notes", "99.0.0"), ("notes", VERSION), ("nonsense",)])
def test_notes_are_of_a_version_that_the_changelog_has(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "release", *arguments], capture_output=True, text=True, check=False
    )
    told = arguments == ("notes", VERSION) and f"## [{VERSION}]" in CHANGELOG
    assert (done.returncode == 0) == told
    assert bool(done.stdout) == told
    assert bool(done.stderr) != told


def test_notes_are_the_part_about_the_version(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/release"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n- later\n\n## [{VERSION}] - 2026-01-01\n\n- this\n\n"
        "## [0.0.1] - 2025-01-01\n\n- earlier\n"
    )
    command = [tmp_path / "scripts" / "release", "notes", VERSION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-", "this"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_scripts_that_are_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}  # jobs ask for more themselves
    runs = "\n".join(_commands(workflow))
    assert runs
    for names in _SCRIPT.findall(runs):
        script = ROOT / next(filter(None, names))
        assert script.stat().st_mode & 0o111, script


def test_every_gate_of_ci_is_in_a_workflow() -> None:
    runs = "\n".join(
        command for path in WORKFLOWS for command in _commands(yaml.safe_load(path.read_text()))
    )
    for script in (
        ".ci/run",
        "scripts/check",
        "scripts/wheels",
        "scripts/docs",
        "compose_e2e",
        "k8s_e2e",
    ):
        assert script in runs


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_workflows_are_right() -> None:
    done = subprocess.run(
        ["actionlint", "-no-color", *WORKFLOWS], capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert form["name"]
    assert form["description"]
    assert len(ids) == len(set(ids)) > 0
    assert all(field["attributes"]["label"] for field in form["body"] if "id" in field)


def test_no_registry_is_named() -> None:
    """Publishers say where images are."""
    named = [
        f"{name}: {found.group()}"
        for name in tracked()
        if Path(name).suffix in {".md", ".yml", ".yaml", ".tpl", ".txt", ".toml", ""}
        for found in _REGISTRIES.finditer((ROOT / name).read_text(errors="ignore"))
    ]
    assert named == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    flags = ("--strict", "--quiet", "--site-dir", str(tmp_path))
    command = [sys.executable, "-m", "mkdocs", "build", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.parent.name for path in tmp_path.rglob("index.html")}
