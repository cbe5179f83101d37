"""A draft model as the main argument, and the keys that say what is fetched of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from surestep_cli.main import Serve
from surestep_cli.serve.fetch import fetch as fetch_all
from surestep_cli.serve.fetch import with_drafter
from surestep_cli.serve.speculators import verifier_of
from surestep_common.errors import InvalidRequest, Unavailable

QUIET = Console(quiet=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
OURS = {
    "method": "eagle3",
    "model": "SmolLM2-135M-Instruct-eagle3",
    "num_speculative_tokens": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def speculator(folder: Path, verifier: object) -> Path:
    folder.mkdir(parents=True)
    about = {"verifier": {"name_or_path": verifier}, "proposal_methods": []}
    whole = {"speculators_model_type": "eagle3", "speculators_config": about}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def test_a_draft_model_that_names_its_model(folder: Path) -> None:
    """By its own place, by an absolute path, or one that only the hub knows."""
    near = speculator(folder.parent / "near", "../my-model")
    assert verifier_of(near) == str(folder)
    assert verifier_of(speculator(folder.parent / "far", str(folder))) == str(folder)
    assert verifier_of(speculator(folder.parent / "hub", "owner/name")) == "owner/name"
    assert verifier_of(folder) is None
    with pytest.raises(InvalidRequest, match="names no speculators_config"):
        verifier_of(speculator(folder.parent / "none", None))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(InvalidRequest, match="is a draft model, which drafts for another one"):
        verifier_of(folder)


def test_a_draft_model_is_served_with_its_model(folder: Path) -> None:
    head = speculator(folder.parent / "head", "../my-model")
    given = ["--speculative-config", '{"num_speculative_tokens": 2}']
    settings, model, _ = fetch_all(Serve.load([str(head), *given]), QUIET)
    assert model == ("my-model", folder, False)
    assert settings.speculative_config == {"model": str(head), "num_speculative_tokens": 2}
    assert settings.served_model_name == ("head", "my-model")
    other = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1}']
    settings = fetch_all(
        Serve.load([str(head), *other, "--served-model-name", "x"]), QUIET
    ).settings
    assert settings.speculative_config is not None
    assert settings.speculative_config["method"] == "ngram"
    assert settings.served_model_name == ("x",)
    lost = speculator(folder.parent / "lost", "/no/such/folder")
    with pytest.raises(Unavailable, match="lost is a draft model for /no/such/folder: "):
        fetch_all(Serve.load([str(lost), *given]), QUIET)


def test_keys_for_what_is_fetched_of_a_draft_model(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its revision and its quantisation are vLLM's keys; no rank is told of them."""
    asked = {}
    head = speculator(tmp_path / "eagle3-head", "../my-model")

    def download(model: str, *, revision: str | None, **options: Any) -> str:
        asked[model] = revision
        return str(head)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    about: dict[str, Any] = {"model": "x/head", "num_speculative_tokens": 2, "revision": "v3"}

    def fetched(**more: Any) -> dict[str, Any] | None:
        flags = ["--revision", "v1", "--speculative-config", json.dumps(about | more)]
        return fetch_all(Serve.load([str(folder), *flags]), QUIET).settings.speculative_config

    assert fetched(quantization=None, max_model_len=None) == {
        "model": str(head),
        "num_speculative_tokens": 2,
    }
    assert asked == {"x/head": "v3"}
    assert (fetched(method="draft_model") or {})["model"] == str(head)
    with pytest.raises(InvalidRequest, match="--quantization fp8: the checkpoint is not quantised"):
        fetched(quantization="fp8")
    with pytest.raises(InvalidRequest, match="unknown speculative method 'medusa'"):
        fetched(method="medusa")


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], None),
        (["m"], None),
        (["m", "--speculative-config", "auto"], None),
        (["--speculative-config", "none"], {}),
        (["--speculative-config", json.dumps(NGRAM)], NGRAM),
        (["m", "-sc", json.dumps(OURS)], OURS),
    ],
)
def test_drafts_are_chosen_by_the_worker_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], config: dict[str, Any] | None
) -> None:
    monkeypatch.delenv("SURESTEP_SPECULATIVE_CONFIG", raising=False)
    assert with_drafter(Serve.load(flags), QUIET).speculative_config == config


def test_draft_heads_are_looked_for_where_models_are_downloaded_to() -> None:
    flags = ["--download-dir", "/somewhere"]
    assert with_drafter(Serve.load([]), QUIET).drafters is None
    assert with_drafter(Serve.load(flags), QUIET).drafters == Path("/somewhere")
    flags += ["--drafters", "/here"]
    assert with_drafter(Serve.load(flags), QUIET).drafters == Path("/here")


def test_a_variable_turns_drafts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURESTEP_SPECULATIVE_CONFIG", "none")
    assert with_drafter(Serve.load([]), QUIET).speculative_config == {}


def test_a_head_in_a_folder_is_found_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a head that is called as one of ours."""
    name = str(OURS["model"])
    folder.rename(folder.with_name(name))
    monkeypatch.chdir(folder.parent)
    for given in (name, f"./{name}"):
        words = json.dumps(OURS | {"model": given})
        found = with_drafter(Serve.load(["m", "-sc", words]), QUIET).speculative_config
        assert found is not None
        assert found["model"] == str(folder.with_name(name))
