"""What the user may call a model, and what is said when there is none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from rich.console import Console
from support.checkpoints.least_gguf import write_least
from surestep_cli.commands import Fetch
from surestep_cli.main import Serve
from surestep_cli.serve.fetch import fetch as fetch_all
from surestep_cli.serve.hub import ModelSource, hub_name
from surestep_cli.serve.model_source import (
    DEFAULT_MODEL,
    held_quantization,
    resolve,
    resolve_tokenizer,
)
from surestep_common.errors import InvalidRequest, NotFound, Unavailable
from surestep_common.gguf import model_folder

QUIET = Console(quiet=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_folder(folder: Path) -> None:
    assert resolve(str(folder), QUIET) == ("my-model", folder, False)


def test_a_relative_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert resolve(".", QUIET) == ("my-model", folder, False)


def default_folder(cache: Path) -> Path:
    """Put a file where the default model is kept."""
    models = cache / "surestep" / "models"
    models.mkdir(parents=True, exist_ok=True)
    file = models / f"{DEFAULT_MODEL}.gguf"
    return model_folder(file if file.exists() else write_least(file))


def test_the_default_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = default_folder(tmp_path)
    resolved = resolve(None, QUIET)
    assert resolved == (DEFAULT_MODEL, folder, False)
    assert resolved.path.name == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("said", "temperature"),
    [(None, 0.2), ({"eos_token_id": [2]}, 0.2), ({"eos_token_id": [2], "temperature": 0.9}, 0.9)],
)
def test_the_default_is_sampled_as_recommended_unless_its_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any] | None, temperature: float
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = default_folder(tmp_path)
    file = cached / "generation_config.json"
    names = {path.name for path in cached.iterdir()}
    if said is not None:
        file.write_text(json.dumps(said))
    for _ in range(2):
        resolve(None, QUIET)
        now = json.loads(file.read_text())
        assert now["temperature"] == temperature
        assert now.items() >= (said or {}).items()
    assert {path.name for path in cached.iterdir()} == names


def test_a_default_that_cannot_be_told_so_is_served_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = default_folder(tmp_path)
    (cached / "generation_config.json").write_text("[]")
    assert resolve(None, Console()).path == cached
    assert "is sampled at temperature 1" in capsys.readouterr().out


def test_the_default_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(Unavailable, match="cannot download the default model"):
        resolve(None, QUIET)
    left = [path.name for path in (tmp_path / "surestep" / "models").iterdir()]
    assert left == [f".{DEFAULT_MODEL}.lock"]


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        resolve(str(tmp_path / "nothing"), QUIET)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        resolve(str(tmp_path), QUIET)


def test_a_gguf_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at all; tests/worker/checkpoint/test_gguf_config.py looks at what is in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(InvalidRequest, match=r"model\.gguf: it is not a GGUF file"):
        resolve(str(path), QUIET)
    with pytest.raises(
        NotFound, match=r"no config\.json: .*; .*model\.gguf can be served by itself"
    ):
        resolve(str(tmp_path), QUIET)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match=r"cannot read nothing\.gguf: No such file"):
        resolve("nothing.gguf", QUIET)  # no model of the hub


def test_fetch_leaves_a_link(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = folder.parent / "served"
    link.symlink_to("/nowhere")
    Fetch(model=str(folder), link=link).run(QUIET)
    assert link.resolve() == folder
    assert capsys.readouterr().out == f"{folder}\n"


def test_fetch_replaces_no_folder(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no symbolic link"):
        Fetch(model=str(folder), link=folder).run(QUIET)


def test_a_cache_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=f"cannot keep {DEFAULT_MODEL} in .*: Not a directory$"):
        resolve(None, QUIET)


def test_an_error_of_the_disk_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path / "hub"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    told = f"^cannot keep 'owner/name' in {tmp_path / 'hub'}: Permission denied$"
    with pytest.raises(Unavailable, match=told):
        resolve("owner/name", QUIET)


def test_a_link_that_cannot_be_written_is_told_in_a_line(folder: Path) -> None:
    link = folder / "nowhere" / "served"
    with pytest.raises(Unavailable, match=f"^cannot write the link {link}: No such file"):
        Fetch(model=str(folder), link=link).run(QUIET)


def test_bars_are_for_terminals(tmp_path: Path) -> None:
    code = (
        "from surestep_cli.main import run; run(['proto', '" + str(tmp_path) + "']);"
        "from tqdm import tqdm; from huggingface_hub.utils import are_progress_bars_disabled as d;"
        "list(tqdm(range(9))); assert d()"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TQDM", "HF_"))}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_what_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(model: str, **options: Any) -> str:
        asked[model] = options
        (tmp_path / "tokenizer.json").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = ModelSource("v2", tmp_path / "cache", "token")
    assert resolve("some/model", QUIET, source) == ("some/model", tmp_path, True)
    assert resolve_tokenizer("some/tokenizer", QUIET, source) == tmp_path
    for options in asked.values():
        assert (options["revision"], options["token"]) == ("v2", "token")
        assert options["cache_dir"] == tmp_path / "cache"
    assert "*.safetensors" in asked["some/model"]["allow_patterns"]
    assert "*.safetensors" not in asked["some/tokenizer"]["allow_patterns"]


def test_weights_of_another_layout_are_left_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has them twice more: 61 GiB each of the larger model."""
    asked = {}

    def download(model: str, **options: Any) -> str:
        asked[model] = options
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    wanted = [
        *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"),
        *("model-00000-of-00002.safetensors", "model.safetensors.index.json"),
        *("modules.json", "1_Pooling/config.json"),  # of an embedding model
    ]
    others = [
        *("original/model--00001-of-00007.safetensors", "metal/model.bin", "LICENSE"),
        *("onnx/model.safetensors", "a/b/model.safetensors", "pytorch_model.bin"),
    ]
    resolve("owner/name", QUIET)
    patterns = {name: asked["owner/name"][name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*others, *wanted], **patterns)) == wanted


@pytest.mark.parametrize(
    ("written", "name", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("https://huggingface.co/owner/name", "owner/name", None),
        ("huggingface.co/owner/na.me-1/", "owner/na.me-1", None),
        ("https://www.huggingface.co/owner/name/tree/v2", "owner/name", "v2"),
        ("https://hf.co/owner/name/blob/main/config.json", "owner/name", "main"),
        ("hf.co/owner/name-GGUF:Q4_K_M", "owner/name-GGUF:Q4_K_M", None),
        ("http://hf.co/o/n/resolve/main/n-Q8_0.gguf?download=true", "o/n:Q8_0", "main"),
        ("https://hf.co/o/n/blob/main/Q8_0/n.Q8_0-00001-of-00002.gguf", "o/n:Q8_0", "main"),
    ],
)
def test_urls_of_the_hub_are_names(written: str, name: str, revision: str | None) -> None:
    assert hub_name(written, ModelSource()) == (name, ModelSource(revision))
    assert hub_name(written, ModelSource("mine")).source.revision == "mine"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("llama3.2:3b", "ollama's library, .* as owner/name:Q4_K_M"),
        ("ollama.com/library/qwen3", "ollama's library"),
        ("https://example.com/model.gguf", "no URL of the Hugging Face hub"),
        ("https://huggingface.co/datasets/owner/name/x", "no URL of the Hugging Face hub"),
    ],
)
def test_names_of_other_places_are_refused(written: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        resolve(written, QUIET)


@pytest.mark.parametrize(
    ("flags", "config", "told"),
    [
        (
            ["-tp", "7"],
            {"num_attention_heads": 12},
            "7 does not divide .* 12 heads: 1, 2, 3, 4, 6, 12",
        ),
        (["-tp", "2"], {"text_config": {"num_attention_heads": 9}}, "does not divide .* 9 heads"),
        (["-tp", "2", "--hf-overrides", '{"num_attention_heads": 9}'], {}, "9 heads: 1, 3, 9 do"),
        (["-tp", "3"], {"num_attention_heads": 9}, None),
        (["-tp", "3"], {"num_attention_heads": "9"}, None),  # a rank says what is wrong with it
        (["--device", "cuda"], {}, "--device cuda: "),
    ],
)
def test_ranks_and_devices_are_refused_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    config: dict[str, Any],
    told: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (folder / "config.json").write_text(json.dumps(config))
    settings = Serve.load([str(folder), *flags])
    if told is None:
        fetch_all(settings, QUIET)
        return
    with pytest.raises(InvalidRequest, match=told):
        fetch_all(settings, QUIET)


def test_a_tokenizer_that_is_none(folder: Path) -> None:
    with pytest.raises(NotFound, match=r"holds no tokenizer\.json"):
        resolve_tokenizer(str(folder), QUIET)


def test_the_quantisation_of_a_checkpoint(folder: Path) -> None:
    for said in ("{}", "{", "[]", '{"quantization_config": 3}'):
        (folder / "config.json").write_text(said)
        assert held_quantization(folder) is None


@pytest.mark.parametrize(
    ("held", "wanted", "refusal"),
    [
        (None, "int8", ""),
        (None, "fp8", ""),
        (None, "awq", "the checkpoint is not quantised, and on cpu it can be rounded"),
        ("awq", "awq_marlin", ""),
        ("awq", "int4", "the checkpoint is quantised by 'awq', and it is served as it is stored"),
    ],
)
def test_quantisation_is_refused_before_anything_starts(
    folder: Path, held: str | None, wanted: str, refusal: str
) -> None:
    about = {"quantization_config": {"quant_method": held}} if held else {}
    (folder / "config.json").write_text(json.dumps(about))
    settings = Serve.load([str(folder), "--device", "cpu", "--quantization", wanted])
    if refusal:
        with pytest.raises(InvalidRequest, match=f"--quantization {wanted}: {refusal}"):
            fetch_all(settings, QUIET)
    else:
        assert fetch_all(settings, QUIET).settings.quantization == wanted


def test_revisions(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the tokenizer too, where it is the model's own; a folder has none."""
    asked = []

    def download(model: str, *, revision: str | None, **options: Any) -> str:
        asked.append((model, revision))
        (tmp_path / "tokenizer.json").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    flags = ["--revision", "v1", "--tokenizer-revision", "v2"]
    _, _, tokenizer = fetch_all(Serve.load(["some/model", *flags]), QUIET)
    assert (asked, tokenizer) == ([("some/model", "v1"), ("some/model", "v2")], tmp_path)
    told = Console(file=io.StringIO(), width=200)
    assert fetch_all(Serve.load([str(folder), *flags]), told)[1:] == (
        ("my-model", folder, False),
        None,
    )
    assert isinstance(told.file, io.StringIO)
    assert told.file.getvalue().count("does nothing") == 2


@pytest.mark.parametrize("text_only", [False, True])
def test_a_gateway_can_do_without_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_only: bool
) -> None:
    asked = {}

    def snapshot(model: str, **about: Any) -> str:
        asked[model] = about
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    link = tmp_path / "link"
    Fetch(model="owner/name", link=link, revision="v2", text_only=text_only).run(QUIET)
    assert asked["owner/name"]["revision"] == "v2"
    assert ("*.safetensors" in asked["owner/name"]["allow_patterns"]) is not text_only
    assert "*.json" in asked["owner/name"]["allow_patterns"]
    assert link.resolve() == tmp_path.resolve()
