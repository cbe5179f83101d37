"""A tiny GGUF file, imported and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.checkpoint.import_gguf import import_gguf
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="the import-gguf extra is not installed")

_BYTES = sorted(bytes_to_unicode().values())
HIDDEN, INTERMEDIATE, HEADS, LAYERS = 64, 96, 4, 1
TOKENS = [*SPECIAL_TOKENS, *_BYTES, "ĠĠ"]
CONTROL, NORMAL = 3, 1


def write_gguf(path: Path) -> Path:
    """A one-layer Llama, in float32 but for one Q4_1 and one Q8_0 tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: Any) -> None:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }
    types = {
        "token_embd": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_down": gguf.GGMLQuantizationType.Q4_1,
    }
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32)
        kind = types.get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    stages: list[str] = []
    import_gguf(write_gguf(path / "tiny.gguf"), path / "models" / "tiny", stages.append)
    assert len(stages) == len(set(stages)) == 4
    assert [entry.name for entry in (path / "models").iterdir()] == ["tiny"]
    return path / "models" / "tiny"


def test_the_import_serves_what_transformers_reads(folder: Path) -> None:
    model = load_model(
        ModelSource(folder),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = theirs.lm_head(hidden).float()
    assert model.kv_spec(16).dtype is torch.bfloat16
    assert model.config.eos_token_ids == (0, 2)  # end of turn and end of sequence
    torch.testing.assert_close(model.logits(hidden), expected, rtol=2e-2, atol=2e-2)


def test_tokenizer_and_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.model_max_length == 128
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, TOKENS.index("a"), 2]
    spaces = tokenizer("a  1")["input_ids"]  # digits part from the spaces before them
    assert spaces == [TOKENS.index(token) for token in ("a", "ĠĠ", "1")]
    assert tokenizer.decode(spaces) == "a  1"


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no GGUF file at"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(InvalidRequest, match="is not a GGUF file"):
        import_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    with pytest.raises(InvalidRequest, match="exists already"):
        import_gguf(tmp_path / "bad.gguf", tmp_path / "taken")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.gguf", "taken"]
