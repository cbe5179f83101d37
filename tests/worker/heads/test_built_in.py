"""Heads that come with the program: where they are, how large, and that the package has them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from repo.source import ROOT
from surestep_worker import heads
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.heads import head_folder

NAME = "SmolLM2-135M-Instruct-eagle3"
_MAX_MB = 12


def test_a_name_means_the_head_of_that_name() -> None:
    folder = head_folder(NAME)
    assert folder.parent == Path(heads.__file__).parent
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] > 0
    assert (folder / "README.md").is_file()
    assert (folder / "model.safetensors").stat().st_size < _MAX_MB * 1_000_000
    asked = SpeculativeConfig.from_json(f'{{"model": "{NAME}", "num_speculative_tokens": 2}}')
    assert asked.method == "eagle3"


@pytest.mark.parametrize("name", ["/nowhere", "nothing", ".", "", f"../heads/{NAME}", f"x/{NAME}"])
def test_any_other_name_means_a_folder(name: str) -> None:
    assert head_folder(name) == Path(name)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert head_folder(NAME) == Path(NAME)


def test_the_package_contains_them() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = about["package-data"]["surestep_worker.heads"]
    packed = {path for pattern in patterns for path in Path(heads.__file__).parent.glob(pattern)}
    assert {path.name for path in packed} >= {"config.json", "model.safetensors"}
