"""The default model's greedy text, its weights packed, against transformers' generate with those
dequantised, in float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints.gguf_files import transformers_tokenizer
from support.parity.stepping import generate
from surestep_common.gguf import model_folder
from surestep_kernels import load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from transformers import AutoModelForCausalLM, GgufConfig

pytestmark = pytest.mark.slow

MAX_TOKENS = 32
BLOCK_SIZE = 16
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 17 + 25?",
    "List three colours.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "Write a Python function that adds two numbers.",
    "What is the boiling point of water in Celsius?",
    "Give me a title for a story about a dog.",
    "Name a mammal that can fly.",
    "Count from 1 to 10.",
    "What do bees make?",
    'Return {"ok": true} and nothing else.',
    "Summarise: The cat sat on the mat. The mat was red.",
    "Is the Earth flat?",
    "Repeat after me: one two three one two three.",
    "What language is spoken in Brazil?",
    "How many  days  are in a week?",
    "Schreibe einen Satz über Käse. 🧀",
)


class Default(NamedTuple):
    """The default model, loaded by us and by transformers."""

    ours: Model
    theirs: Any
    tokenizer: Any


def _file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "surestep" / "models" / "SmolLM2-135M-Instruct.gguf"


@pytest.fixture(scope="module")
def default() -> Default:
    file = _file()
    if not file.exists():
        pytest.skip(f"no {file}: `surestep fetch` downloads it")
    ours = load_model(
        ModelSource(model_folder(file)),
        dtype="float32",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
        max_model_len=512,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return Default(ours, theirs, transformers_tokenizer(file))


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
@pytest.mark.rotates(10)
def test_greedy_ids_equal_transformers(default: Default, prompt: str) -> None:
    encoded = default.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = encoded["input_ids"][0].tolist()
    theirs = default.theirs.generate(**encoded, max_new_tokens=MAX_TOKENS, do_sample=False)
    kv = KVCache(default.ours.kv_spec(BLOCK_SIZE), 12, load_kernels("cpu"), "cpu")
    ours = generate(default.ours, kv, ids, MAX_TOKENS, chunk=24)
    assert default.tokenizer.decode(ours) == default.tokenizer.decode(theirs[0, len(ids) :])
    assert ours == theirs[0, len(ids) :].tolist()


def test_special_tokens_of_the_chat_template_stay_whole(default: Default) -> None:
    text = default.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    ids = default.tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = default.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert ids.count(start) == 3  # system, user, assistant
    assert ids.count(end) == 2
    assert end in default.ours.config.eos_token_ids
