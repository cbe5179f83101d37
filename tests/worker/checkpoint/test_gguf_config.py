"""What a GGUF file says of its model, and what of it is not served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from support.checkpoints.gguf_files import write_gguf
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import own_cache
from surestep_common.config import Settings
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.gguf import model_folder
from surestep_gateway.settings.config import GatewaySettings
from surestep_kernels import load_kernels
from surestep_worker.checkpoint.model_folder import ConfigFiles, fingerprint_of
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.models import ModelSource, load_model
from surestep_worker.models.gemma.config import GemmaConfig
from surestep_worker.models.granite.config import GraniteConfig
from surestep_worker.models.llama.config import LlamaConfig


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(path, tokenizer=True, max_position=8192, rope_theta=50_000.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = own_cache(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def write(source: Path, tmp_path: Path, **metadata: Any) -> Path:
    path = tmp_path / "tiny-model.gguf"
    write_gguf(source, path, lambda name: Type.Q8_0, **metadata)
    return path


def test_it_says_what_the_checkpoint_did(source: Path, tmp_path: Path) -> None:
    folder = model_folder(write(source, tmp_path))
    ours = LlamaConfig.parse(ConfigFiles.read(folder))
    theirs = LlamaConfig.parse(ConfigFiles.read(source))
    apart = {"quantization", "checkpoint_dtype", "rms_norm_eps"}
    for field in dataclasses.fields(theirs):
        name = field.name
        assert name in apart or getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert ours.checkpoint_dtype == "bfloat16"
    assert folder.name == "tiny-model"
    assert (folder / "model.gguf").resolve() == tmp_path / "tiny-model.gguf"


@pytest.mark.parametrize("layers", [7, 62])
def test_a_gemma3_says_what_the_checkpoint_did(tmp_path: Path, layers: int) -> None:
    """The largest one divides scores by the root of the width of a head, were all of the model's
    width; the end of a turn is known by its text."""
    sizes: Any = {"hidden": 32, "heads": 4, "head_dim": 16, "layers": layers, "tie": True}
    more: Any = {"query_pre_attn_scalar": 8 if layers == 62 else 16, "sliding_window": 9}
    source = make_tiny_checkpoint(tmp_path / "gemma", "gemma3_text", **sizes, **more)
    tokens = [*(f"[PAD{i}]" for i in range(383)), "<end_of_turn>"]
    ours, theirs = (
        GemmaConfig.parse(ConfigFiles.read(folder))
        for folder in (
            model_folder(write(source, tmp_path, **{"tokenizer.ggml.tokens": tokens})),
            source,
        )
    )
    apart = {"quantization", "checkpoint_dtype", "rms_norm_eps", "zero_centred_norms"}
    for name in {field.name for field in dataclasses.fields(theirs)} - apart - {"eos_token_ids"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.zero_centred_norms, theirs.zero_centred_norms) == (False, True)
    assert ours.eos_token_ids == (2, 383)
    (without := tmp_path / "without").mkdir()
    with pytest.raises(InvalidRequest, match=r"gemma3\.attention\.sliding_window is missing"):
        write(source, without, **{"gemma3.attention.sliding_window": None})


@pytest.mark.parametrize(("written", "meant"), [(0.5, 0.5), (0.0, 0.25), (None, 0.25)])
def test_a_granite_without_a_scale_has_the_usual_one(
    tmp_path: Path, written: float | None, meant: float
) -> None:
    """Of heads of 16."""
    source = make_tiny_checkpoint(tmp_path / "granite", "granite", logits_scaling=3.0)
    file = write(source, tmp_path, **{"granite.attention.scale": written})
    config = GraniteConfig.parse(ConfigFiles.read(model_folder(file)))
    assert (config.attention_scale, config.logits_divisor) == (meant, 3.0)


def test_a_file_has_one_folder_until_it_changes(source: Path, tmp_path: Path) -> None:
    path = write(source, tmp_path)
    folder = model_folder(path)
    written = (folder / "config.json").stat().st_ino
    assert model_folder(path) == folder
    assert (folder / "config.json").stat().st_ino == written
    before = fingerprint_of(folder)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q", b"blk.0.attn_x"))
    assert model_folder(path) != folder
    with pytest.raises(InvalidRequest, match=r"missing: model\.layers\.0\.self_attn\.q_proj"):
        load(model_folder(path))
    path.write_bytes(content)
    assert fingerprint_of(model_folder(path)) == before
    assert not list((tmp_path / "cache").rglob(".[0-9a-f]*"))


def load(folder: Path) -> None:
    about: dict[str, Any] = {"dtype": "auto", "device": "cpu", "tp": TensorParallel()}
    load_model(ModelSource(folder), **about, kernels=load_kernels("cpu"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is not supported as GGUF"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
        ({"llama.rope.dimension_count": 8}, "heads that are rotated in part"),
        ({"llama.attention.head_count": None}, "attention.head_count is missing"),
        ({"llama.attention.head_count": 0}, "attention.head_count is no number of heads"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.context_length": "long"}, "context_length is no number"),
        ({"split.count": 3}, r"one of 3 parts, which must be called NAME-00001-of-00003\.gguf"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer bert is not supported"),
    ],
)
def test_refusals(source: Path, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^cannot read .*tiny-model.gguf: .*{message}[^\n]*$"):
        write(source, tmp_path, **metadata)


@pytest.mark.parametrize("count", [0, 3, 1 << 20])
def test_experts_are_as_many_as_the_file_says(tmp_path: Path, count: int) -> None:
    source = make_tiny_checkpoint(
        tmp_path / "mixtral", "mixtral", num_local_experts=4, tokenizer=True
    )
    path, said = tmp_path / "mixtral.gguf", dict[str, Any]({"llama.expert_count": count})
    write_gguf(source, path, lambda name: Type.Q8_0, **said)
    message = rf"blk\.0\.ffn_gate_exps\.weight \[4, 96, 64\] does not go with {count} experts"
    with pytest.raises(InvalidRequest, match=message):
        fingerprint_of(model_folder(path))


def test_every_service_takes_a_file(source: Path, tmp_path: Path) -> None:
    path = write(source, tmp_path)
    folder = model_folder(path)
    assert GatewaySettings.load(["--model", str(path)]).model == folder
    assert WorkerSettings.load(["--model", str(path)]).model == folder


@pytest.mark.parametrize("cls", [GatewaySettings, WorkerSettings])
def test_a_broken_file_ends_a_service_in_a_line(
    tmp_path: Path, cls: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model" * 99)
    with pytest.raises(SystemExit) as ended:
        cls.load(["--model", str(tmp_path / "broken.gguf")])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "broken.gguf: it is not a GGUF file" in told
    assert told.count("\n") == 1


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "phi.gguf", "phi2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    served = "llama, qwen2, qwen3, qwen3moe, phi3, gemma3, granite, olmo2"
    message = f"architecture phi2 is not supported as GGUF; supported: {served}$"
    with pytest.raises(InvalidRequest, match=message):
        model_folder(tmp_path / "phi.gguf")


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path, cache: Path) -> None:
    path = write(source, tmp_path)
    (cache / "surestep" / "gguf").rename(cache / "surestep" / "away")
    (cache / "surestep" / "gguf").touch()
    with pytest.raises(
        Unavailable, match=r"cannot keep the tokenizer of .*: (Not a dir|File exists)"
    ):
        model_folder(path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_a_tensor(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = make_tiny_checkpoint(
        tmp_path / "llama3",
        max_position=1 << 16,
        head_dim=64,
        tokenizer=True,
        rope_parameters=scaling,
    )
    expected = LlamaConfig.parse(ConfigFiles.read(source))
    path, tensors = tmp_path / "llama3.gguf", {"rope_freqs.weight": _factors(scaling, 64)}
    write_gguf(source, path, lambda name: Type.Q8_0, tensors=tensors)
    config = LlamaConfig.parse(ConfigFiles.read(model_folder(path)))
    assert expected.rope.llama3 is not None
    assert len(config.rope.divisors) == 32
    ours, theirs = (rotary_table(c.rope, 64, 4096, "cpu") for c in (config, expected))
    assert (ours - theirs).abs().max() < 2e-3  # angles of thousands, in float32
    assert not torch.equal(ours, rotary_table(config.rope.__class__(theta=5e5), 64, 4096, "cpu"))
    load(model_folder(path))  # the tensor is not one too many


def _factors(scaling: dict[str, Any], dim: int) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    base = 1.0 / scaling["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    original, factors = scaling["original_max_position_embeddings"], []
    low, high = (original / scaling[f"{end}_freq_factor"] for end in ("low", "high"))
    for frequency in base:
        wavelength = 2 * np.pi / frequency
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1.0 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def test_sampling_and_ends_are_the_files(source: Path, tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.25, "general.sampling.top_k": 20}
    ends = {"tokenizer.ggml.eot_token_id": 0}
    folder = model_folder(write(source, tmp_path, **said, **ends))
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [0, 2], "temperature": 0.25, "top_k": 20}
