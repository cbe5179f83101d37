"""Logits of Gemma, OLMo and Granite against transformers, however the tokens are cut into steps."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.branches import VARIANTS, make_branch_checkpoint, make_gemma3_with_images
from support.kernels.columns import triton_kernels
from support.kernels.triton_interpreter import repair
from support.parity.stepping import BLOCKS, Pair, Row, in_one_group, random_prompt, step
from surestep_kernels import load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from transformers import AutoModelForImageTextToText

LENGTH = 40  # several windows
BLOCK_SIZE = 8
CASES = [*(("auto", name) for name in VARIANTS), ("reference", "gemma2"), ("reference", "olmo3")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kernels, name = request.param
    folder = make_branch_checkpoint(tmp_path_factory.mktemp("branches"), name)
    return Pair(folder, load_kernels("cpu", kernels))


def test_prompts_cut_anywhere(pair: Pair) -> None:
    ids = random_prompt(LENGTH)
    expected = pair.expected(ids)
    for cuts in ([], [1], [7, 8, 30], range(1, LENGTH)):
        pair.assert_near(pair.consume(ids, cuts), expected)


def test_batches_and_windows(pair: Pair) -> None:
    for ids, logits in pair.together():
        pair.assert_near(logits, pair.expected(ids))
    pair.assert_windows_leave_no_trace(LENGTH)


@pytest.mark.parametrize("name", ["gemma2", "gemma3 capped", "olmo3", "granite"])
@pytest.mark.rotates(4)
def test_kernels_of_gpus(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their interpreter, which adds in another order."""
    repair(monkeypatch)
    folder = make_branch_checkpoint(tmp_path, name)
    pair, ids = Pair(folder, triton_kernels("cpu"), near=1e-3), random_prompt(20)
    pair.assert_near(pair.consume(ids, [7]), pair.expected(ids))


@pytest.fixture(scope="module", params=["gemma2", "gemma3 capped", "olmo3", "granite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_branch_checkpoint(tmp_path_factory.mktemp("bits"), request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_cuts_or_neighbours(folder: Path, dtype: str) -> None:
    kernels = load_kernels("cpu")
    if kernels.name != "C":
        pytest.skip("no C compiler")
    tp, rng = TensorParallel(), random.Random(5)
    source = ModelSource(folder)
    model = load_model(source, dtype=dtype, device="cpu", tp=tp, kernels=kernels)

    def cache() -> KVCache:
        return KVCache(in_one_group(model.kv_spec(BLOCK_SIZE)), 40, kernels, "cpu")

    ids, other = random_prompt(LENGTH), random_prompt(LENGTH, seed=4)
    whole = step(model, cache(), [Row(ids, 0, BLOCKS)])[0]
    for _ in range(6):
        cuts = sorted(rng.sample(range(1, LENGTH), rng.randint(1, 12)))
        kv, found = cache(), []
        for a, b in pairwise([0, *cuts, LENGTH]):
            beside = Row(other[: rng.randint(1, LENGTH)], 0, range(20, 31))
            found.append(step(model, kv, [beside, Row(ids[a:b], a, BLOCKS)])[1])
        assert torch.equal(torch.cat(found), whole), cuts


@pytest.mark.parametrize("older", [False, True])
def test_the_text_part_of_gemma3_with_images(tmp_path: Path, older: bool) -> None:
    """By the names of tensors since transformers 5, and by those of published files."""
    folder = make_gemma3_with_images(tmp_path)
    file = folder / "model.safetensors"
    published, newer = "language_model.model.", "model.language_model."
    tensors = load_file(file)
    assert any(name.startswith(published) for name in tensors)
    if not older:
        tensors = {name.replace(published, newer): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    pair = Pair(folder, load_kernels("cpu"), kind=AutoModelForImageTextToText)
    ids = random_prompt(LENGTH)
    pair.assert_near(pair.consume(ids, [7]), pair.expected(ids))
