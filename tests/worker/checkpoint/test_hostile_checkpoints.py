"""Whatever lies in a model folder: it is served, or refused with a line, and soon."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints.branches import make_branch_checkpoint
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.model_folder import ConfigFiles, fingerprint_of, read_entries
from surestep_worker.checkpoint.safetensors_header import read_header
from surestep_worker.configs.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ModelConfig,
    architecture_of,
    lookup,
)
from surestep_worker.configs.rope import MAX_POSITION
from surestep_worker.models import FAMILIES

T = TypeVar("T")
NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 1 << 31, 1 << 64, 10**30, -(10**30), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=5),
    st.sampled_from(["LlamaForCausalLM", "Qwen3NextForCausalLM", "linear", "llama3", "fp8", "awq"]),
    st.sampled_from(["GptOssForCausalLM", "yarn", "mxfp4", "sliding_attention"]),
)
VALUES = st.recursive(
    NASTY,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "quant_method", "weight_block_size", "x"]),
            inner,
        )
    ),
    max_leaves=6,
)
UNHURRIED = settings(deadline=1000, suppress_health_check=list(HealthCheck), max_examples=300)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("configs")
    made = [
        make_tiny_checkpoint(folder / "llama", hidden=32, layers=1),
        make_tiny_hybrid(folder / "hybrid", "qwen3_5"),
        make_tiny_hybrid(folder / "moe", "qwen3_next"),
        make_tiny_gpt_oss(folder / "gpt-oss"),
        *(make_branch_checkpoint(folder / name, name) for name in ("gemma2", "gemma3", "olmo3")),
        make_branch_checkpoint(folder / "granite", "granite"),
    ]
    return [json.loads((path / "config.json").read_text()) for path in made]


def tried(act: Callable[[], T]) -> T | str:
    """What it returns, or why it refuses."""
    try:
        return act()
    except InvalidRequest as error:
        return str(error)


def parse(files: ConfigFiles) -> ModelConfig:
    config: ModelConfig = lookup(architecture_of(files.config), FAMILIES).parse(files)
    return config


@UNHURRIED
@given(data=st.data())
def test_a_configuration_is_within_bounds_or_refused(
    configs: list[dict[str, Any]], data: st.DataObject
) -> None:
    raw = dict(data.draw(st.sampled_from(configs)))
    for key in data.draw(st.lists(st.sampled_from(sorted(raw)), min_size=1, max_size=3)):
        raw[key] = data.draw(VALUES)
    generation = {"eos_token_id": data.draw(VALUES)}
    config = tried(lambda: parse(ConfigFiles(raw, generation)))
    if isinstance(config, str):
        assert len(config) < 600
        return
    sizes = (config.vocab_size, MAX_VOCAB), (config.hidden_size, MAX_WIDTH)
    lengths = (config.num_layers, MAX_LAYERS), (config.max_position, MAX_POSITION)
    for size, most in (*sizes, *lengths, (config.head_dim, MAX_HEAD_DIM)):
        assert type(size) is int
        assert 0 < size <= most
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert 0 < config.rms_norm_eps <= 1


@UNHURRIED
@given(text=st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000]))
def test_no_text_is_more_than_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "texts"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(text)
    files = tried(lambda: ConfigFiles.read(folder))
    assert isinstance(files, str) or json.loads(text) == files.config


# -- safetensors -------------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.zeros(0, 4),
    "c": torch.ones(7, dtype=torch.bfloat16),
    "d": torch.arange(5),
}


def written(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def accepted(path: Path) -> bool:
    """Whether we take a file; what we take, the format's own library has to take, too."""
    entries = tried(lambda: read_header(path))
    if isinstance(entries, str):
        assert str(path) in entries
        assert len(entries) < 600
        return False
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == entries.keys()
        for name, entry in entries.items():
            assert tuple(file.get_slice(name).get_shape()) == entry.shape
    return True


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path.read_bytes()


def test_a_valid_file_is_taken(valid: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, valid)
    assert accepted(path)
    entry = read_header(path)["a"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("F32", (3, 4), 48)
    assert valid[entry.begin : entry.end] == TENSORS["a"].numpy().tobytes()


@UNHURRIED
@given(data=st.data())
def test_a_file_that_is_cut_off_or_changed_is_taken_only_if_the_library_does(
    valid: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    content = bytearray(valid[: data.draw(st.integers(0, len(valid)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] = data.draw(st.integers(0, 255))
    accepted(written(folder, bytes(content)))


def described(header: Any, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def tensor(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "longer than the file": ({"a": tensor(0, 1 << 60, shape=[1 << 58])}, 8, "tensor a"),
    "past the end": ({"a": tensor(0, 8), "b": tensor(8, 16)}, 8, "tensor b ends at byte"),
    "overlapping": ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "tensor b begins at byte"),
    "with a hole": ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20, "tensor b begins at byte"),
    "with something behind": ({"a": tensor(0, 8)}, 20, "12 bytes behind its tensors"),
    "backwards": ({"a": tensor(8, 0)}, 8, "tensor a has an impossible size"),
    "negative": ({"a": tensor(-8, 0)}, 8, "tensor a is described wrongly"),
    "of another size": ({"a": tensor(0, 8, shape=[3])}, 8, "tensor a has 8 bytes"),
    "of huge shape": ({"a": tensor(0, 8, shape=[1 << 61, 1 << 61])}, 8, "impossible size"),
    "of many dimensions": ({"a": tensor(0, 8, shape=[1] * 10_000)}, 8, "described wrongly"),
    "of no shape": ({"a": tensor(0, 8, shape="x")}, 8, "described wrongly"),
    "of no type": ({"a": tensor(0, 8, dtype=3)}, 8, "described wrongly"),
    "true": ({"a": tensor(False, True)}, 8, "described wrongly"),
    "no description": ({"a": 7}, 8, "described wrongly"),
    "a list": ([1], 0, "no JSON object"),
    "with a name for terminals": ({"\x1b[31m": 1}, 0, r"tensor '\\x1b\[31m'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_name_the_tensor(tmp_path: Path, case: str) -> None:
    header, num_bytes, message = HOSTILE[case]
    path = written(tmp_path, described(header, num_bytes))
    with pytest.raises(InvalidRequest, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes only"),
        (b"12345678", "8 bytes only"),
        (struct.pack("<Q", 1 << 62) + b"{}", "cut off, or another format"),
        (struct.pack("<Q", 200) + b"{}", "cut off, or another format"),
        (struct.pack("<Q", 2) + b"{[", "no JSON object"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "no JSON object"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_header(written(tmp_path, content))


def test_a_type_that_only_the_library_knows_is_for_it_to_judge(tmp_path: Path) -> None:
    path = written(tmp_path, described({"a": tensor(0, 8, dtype="F7")}, 8))
    assert read_header(path)["a"].dtype == "F7"
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "..", "", "a/b", "a\0b", 5])
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: object) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="files of the same folder"):
        read_entries(tmp_path)


def test_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidRequest, match="is not a file"):
        ConfigFiles.read(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_entries(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidRequest, match="is not a file of at most 67108864 bytes"):
        ConfigFiles.read(tmp_path)


def test_a_file_of_many_values_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[" + b"[]," * (2 << 20) + b"[]]")
    with pytest.raises(InvalidRequest, match="has more than 4194304 values"):
        ConfigFiles.read(tmp_path)


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "model"
    secret.write_text("{}")
    folder.mkdir()
    (folder / "config.json").symlink_to(secret)
    with pytest.raises(InvalidRequest, match=r"is a link to .*secret, outside the model folder"):
        ConfigFiles.read(folder)
    (folder / "inside.json").write_text('{"a": 1}')
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("inside.json")
    assert ConfigFiles.read(folder).config == {"a": 1}


def test_links_into_the_cache_of_the_hub_are_its_layout(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert ConfigFiles.read(snapshot).config == {"a": 1}


# -- fingerprints ------------------------------------------------------------------------------


def test_fingerprints_tell_models_apart_and_nothing_else(tmp_path: Path) -> None:
    def made(name: str, **options: Any) -> str:
        return fingerprint_of(make_tiny_checkpoint(tmp_path / name, hidden=32, **options))

    first = made("a")
    assert made("b") == first
    assert made("shards", max_shard_size="40KB") == first
    others = {
        made("seed", seed=1),
        made("dtype", dtype=torch.bfloat16),
        made("eos", eos_token_ids=(3,)),
        made("theta", rope_theta=20_000.0),
        made("layers", layers=1),
    }
    assert len(others | {first}) == 6


def test_a_fine_tune_of_one_layer_has_another_fingerprint(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=64)
    before = fingerprint_of(path)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    assert fingerprint_of(path) != before


def test_where_a_configuration_was_written_does_not_matter(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=32)
    before = fingerprint_of(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"transformers_version": "99", "_name_or_path": "elsewhere"}
    (path / "config.json").write_text(json.dumps(config))
    assert fingerprint_of(path) == before
