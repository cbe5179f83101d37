"""docs/extend.md holds: what its recipes say, and no more, adds a working toy to a copy of the tree.

Each recipe has a patch beside this file: the toy, in the files that the recipe names, and its tests.
Where a patch no longer applies because the code around it has changed, apply it by hand in a clean
checkout and write it again with `git add -A; git diff --cached -U1 -- . ':!*_pb2*'`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
PAGE = (ROOT / "docs" / "extend.md").read_text()
COPIED = (
    *("proto", "common", "kernels", "gateway", "scheduler_svc", "worker_svc", "cli", "client"),
    *("docs", "tests"),
)
RUN_S = 500.0  # on a machine with much else to do; a quiet one takes a twentieth


class Recipe(NamedTuple):
    """A section of the page, the patch that follows it, and the tests that must pass then."""

    heading: str
    patch: str
    tests: tuple[str, ...]

    @property
    def section(self) -> str:
        return PAGE.split(f"## {self.heading}\n")[1].split("\n## ")[0]

    @property
    def steps(self) -> list[str]:
        return re.split(r"^\d+\. ", self.section, flags=re.MULTILINE)[1:]

    @property
    def files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(.+)$", (HERE / self.patch).read_text(), re.MULTILINE)


MATRIX = "tests/integration/parity/test_parity_matrix.py"
FIELDS = "tests/integration/gateway/test_gateway_schema_fields.py"
REFUSALS = "tests/integration/scheduler/test_scheduler_generate.py"
RECIPES = (
    Recipe(
        "A drafter",
        "drafter.patch",
        (
            "tests/e2e/test_repeat_last_served.py",
            "tests/unit/worker/test_spec_config.py",
            "tests/unit/worker/test_speculative_equality.py",
            f"{MATRIX}::test_speculation_changes_nothing[repeat-last-4-mixed]",
        ),
    ),
    Recipe(
        "A sampling parameter",
        "sampling_parameter.patch",
        (
            "tests/e2e/test_even_penalty_served.py",
            "tests/kernels/test_shape_logits.py",
            "tests/unit/worker/test_sampling_pipeline.py",
            "tests/unit/worker/test_speculative_equality.py",
            f"{FIELDS}::test_the_page_says_what_the_code_does",
            f"{REFUSALS}::test_bad_requests_name_the_parameter",
            f"{MATRIX}::test_every_parameter_changes_the_answer_it_is_compared_by",
            f"{MATRIX}::test_speculation_changes_nothing[ngram-4-mixed]",
        ),
    ),
    Recipe(
        "An endpoint",
        "endpoint.patch",
        (
            "tests/integration/gateway/test_gateway_fits.py",
            "tests/integration/gateway/test_gateway_pages.py",
        ),
    ),
)


def named(text: str) -> list[re.Pattern[str]]:
    """Files and folders in code quotes; a path may leave out its beginning, and NAME is any."""
    names = re.findall(r"`([\w/]+(?:\.\w+)?)`", text)
    return [
        re.compile(rf"(.*/)?{re.escape(name).replace('NAME', '[a-z_]+')}(/.*)?")
        for name in names
        if "/" in name or "." in name
    ]


def covers(text: str, file: str) -> bool:
    return any(pattern.fullmatch(file) for pattern in named(text))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is needed to serve and test."""
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt", "node_modules")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(tree: Path, *command: str | Path) -> None:
    """Run a command in the copy, whose own modules come first; no test run around it is felt."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GIT_"))}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def add(recipe: Recipe, tree: Path) -> None:
    """Follow the steps: change the files, and generate what is generated."""
    run(tree, "git", "apply", "-C1", HERE / recipe.patch)
    out = [f"--{kind}_out=proto" for kind in ("python", "pyi", "grpc_python")]
    protos = [str(path.relative_to(tree)) for path in sorted(tree.glob("proto/*/*.proto"))]
    run(tree, sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *out, *protos)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.patch)
def test_the_patch_of_a_recipe_applies(recipe: Recipe) -> None:
    run(ROOT, "git", "apply", "--check", "-C1", HERE / recipe.patch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.patch)
@pytest.mark.rotates(len(RECIPES))
def test_the_toy_of_a_recipe_works(recipe: Recipe, tree: Path) -> None:
    add(recipe, tree)
    pytest_here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--share", "0")
    run(tree, sys.executable, *pytest_here, *recipe.tests)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.patch)
def test_a_recipe_names_the_files_of_its_toy(recipe: Recipe) -> None:
    """Every file, and a reason for every step."""
    assert [file for file in recipe.files if not covers(recipe.section, file)] == []
    idle = [step for step in recipe.steps if not any(covers(step, f) for f in recipe.files)]
    assert idle == []


def test_recipes_are_short() -> None:
    for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE):
        assert 3 <= len(Recipe(heading, "", ()).steps) <= 8, heading


def test_names_on_the_page_stand_for_files() -> None:
    text = "`kernels/k/choose.py`, `request/NAME.py` or `gpu/sampling`, `propose`"
    assert len(named(text)) == 3
    assert covers(text, "gateway/g/request/fits_body.py")
    assert covers(text, "kernels/k/gpu/sampling/choose.py")
    assert not covers(text, "gateway/g/request.py")
    assert not covers(text, "kernels/k/other_choose.py")
