"""Heads that name a model: in which words, and where they are looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surestep_worker.heads.search import heads_for

EAGLE = {"architectures": ["LlamaForCausalLMEagle3"]}
CARD = "---\nlicense: mit\nbase_model:\n- {}\n---\n# A head\n"


def write(folder: Path, config: dict[str, Any], card: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if card:
        (folder / "README.md").write_text(card)
    return folder


def speculator(name: str) -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"name_or_path": name}}}


@pytest.mark.parametrize(
    ("model", "names", "fits"),
    [
        ("Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("qwen3-8b", "Qwen3-8B", True),
        ("Qwen3-8B-FP8", "Qwen/Qwen3-8B", True),
        ("Qwen3-8B-AWQ", "Qwen/Qwen3-8B", True),
        ("Qwen3-8B-UD-Q4_K_M", "Qwen/Qwen3-8B", True),
        ("Qwen3-8B.IQ4_XS", "Qwen/Qwen3-8B", True),
        ("Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("Qwen3-8B", "RedHatAI/Qwen3-8B-FP8-dynamic", True),
        ("Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
        ("Qwen3-4B", "Qwen/Qwen3-8B", False),
        ("Qwen3-8B-Instruct-2507", "Qwen/Qwen3-8B", False),
    ],
)
@pytest.mark.parametrize("kind", ["speculators", "card"])
def test_a_name_may_have_an_owner_and_a_number_format(
    tmp_path: Path, model: str, names: str, fits: bool, kind: str
) -> None:
    heads = tmp_path / "heads"
    config, card = (speculator(names), "") if kind == "speculators" else (EAGLE, CARD.format(names))
    head = write(heads / "head", config, card)
    folder = write(tmp_path / model, {})
    assert list(heads_for(folder, heads)) == [head] * fits


def test_a_model_is_also_called_as_its_config_and_the_hub_say(tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    head = write(heads / "head", speculator("Qwen/Qwen3-8B"))
    named = write(tmp_path / "mine", {"_name_or_path": "Qwen/Qwen3-8B"})
    cached = write(tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/0a1b", {})
    (tmp_path / "link").symlink_to(cached)
    for folder in (named, cached, tmp_path / "link"):
        assert list(heads_for(folder, heads)) == [head]
    assert not list(heads_for(write(tmp_path / "another", {}), heads))


def test_heads_of_the_hub_cache_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = write(tmp_path / "models--x--EAGLE3/snapshots/0a1b", EAGLE, CARD.format("a/Model"))
    monkeypatch.setattr("surestep_worker.heads.search.HF_HUB_CACHE", str(tmp_path))
    model = write(
        tmp_path / "Model", {"architectures": ["LlamaForCausalLM"]}, CARD.format("a/Model")
    )
    assert list(heads_for(model, None)) == [head]  # and not the model, whose card names its base
    assert not list(heads_for(model, tmp_path / "nowhere"))


@pytest.mark.parametrize("card", ["---\n- [\n---\n", "---\nbase_model: 3\n", "", "---\n3\n---\n"])
@pytest.mark.parametrize("config", ["{", "[]", '{"architectures": ["Eagle3"]}'])
def test_what_cannot_be_read_is_no_head(tmp_path: Path, config: str, card: str) -> None:
    head = write(tmp_path / "heads/head", {}, card)
    (head / "config.json").write_text(config)
    (head / "README.md").write_bytes(card.encode() + b"\xff")
    assert not list(heads_for(tmp_path, tmp_path / "heads"))


def test_ours_names_the_default_model(tmp_path: Path) -> None:
    model = write(tmp_path / "SmolLM2-135M-Instruct", {})
    (head,) = heads_for(model, tmp_path / "nowhere")
    assert head.name == "SmolLM2-135M-Instruct-eagle3"
