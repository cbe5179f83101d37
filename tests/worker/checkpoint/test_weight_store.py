"""Weights that outlive a rank: what the next one maps is what the first one loaded."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Row, pack
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InternalError, InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.checkpoint.weight_store import Record, WeightStore
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host import shared_memory as memory
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor


def _quantized(folder: Path, method: str) -> Path:
    source = make_tiny_hybrid(folder / "source", "qwen3_5")
    return quantize(source, method, plain=("in_proj_a", "in_proj_b")).quantized


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: make_tiny_checkpoint(folder / "m", attention_bias=True, mlp_bias=True),
    "dense-tied": lambda folder: make_tiny_checkpoint(folder / "m", "qwen3", tie=True),
    "hybrid": lambda folder: make_tiny_hybrid(folder / "m", "qwen3_5"),
    "moe": lambda folder: make_tiny_hybrid(folder / "m", "qwen3_next"),
    "fp8": lambda folder: _quantized(folder, "fp8"),
    "awq": lambda folder: _quantized(folder, "awq"),
}


@pytest.fixture
def fd() -> Iterator[int]:
    """Of a supervisor's memory for weights."""
    fd = memory.create("surestep-weights")
    yield fd
    os.close(fd)


def load(path: Path, fd: int, kernels: KernelSet | None = None, *, mtp: bool = False) -> Model:
    return load_model(
        ModelSource(path, WeightStore(os.dup(fd))),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels or load_kernels("cpu"),
        draft_head=mtp,
    )


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mapped_weights_give_the_bits_of_loaded_ones(
    tmp_path: Path, fd: int, name: str, kernels: Literal["auto", "reference"]
) -> None:
    path = CHECKPOINTS[name](tmp_path)
    loaded = run_steps(path, TensorParallel(), kernels, WeightStore(os.dup(fd)))
    assert memory.is_sealed(fd)
    (path / "model.safetensors").unlink()
    mapped = run_steps(path, TensorParallel(), kernels, WeightStore(os.dup(fd)))
    for part in loaded:
        assert torch.equal(loaded[part], mapped[part]), part


@torch.inference_mode()
def mtp_logits(model: Model) -> Tensor:
    assert model.draft_head is not None
    kv = KVCache(model.kv_spec(8), 4, load_kernels("cpu"), "cpu")
    ids = list(range(40, 52))
    batch, generator = pack([Row(ids, 0, (3, 1))], 8), torch.Generator().manual_seed(1)
    hidden = torch.randn(len(ids), model.config.hidden_size, generator=generator)
    return model.draft_head.logits(model.draft_head.forward(hidden, batch, Caches(kv)))


@pytest.mark.parametrize("name", ["hybrid", "fp8", "awq"])
def test_an_mtp_head_is_among_them(tmp_path: Path, fd: int, name: str) -> None:
    path = CHECKPOINTS[name](tmp_path)
    loaded = load(path, fd, mtp=True)
    mapped = load(path, fd, mtp=True)
    assert torch.equal(mtp_logits(loaded), mtp_logits(mapped))
    assert loaded.weight_bytes == mapped.weight_bytes


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_of(value, seen)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from tensors_of(getattr(thing, field.name), seen)
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("surestep_worker"):
        yield from tensors_of(vars(thing), seen)


def mappings() -> dict[range, dict[str, int]]:
    """Of memory for weights, read-only and shared: addresses -> kB by kind."""
    found: dict[range, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(
            r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*?(/memfd:\S+)?(?: \(deleted\))?$", line
        ):
            begin, end, flags, name = match.groups()
            current = {}
            if name == "/memfd:surestep-weights":
                assert flags == "r--s"
                found[range(int(begin, 16), int(end, 16))] = current
        elif match := re.match(r"(\w+): +(\d+) kB", line):
            current[match[1]] = int(match[2])
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_no_parameter_has_a_private_copy(
    tmp_path: Path, fd: int, name: str, kernels: Literal["auto", "reference"]
) -> None:
    path, ops = CHECKPOINTS[name](tmp_path), load_kernels("cpu", kernels)
    for _ in ("the rank that loads", "the rank after it"):
        model = load(path, fd, ops, mtp=name == "hybrid")
        ranges = mappings()
        tensors = list(tensors_of(model, set()))
        outside = [t for t in tensors if not any(t.data_ptr() in found for found in ranges)]
        rotary = [t for t in outside if t.shape[0] == 512]  # computed, not a parameter
        assert len(outside) == len({t.data_ptr() for t in rotary}) == 1
        assert len(tensors) > 10
        assert all(kinds["Anonymous"] == 0 for kinds in ranges.values())


def test_tied_weights_that_need_no_other_layout_lie_there_once(tmp_path: Path, fd: int) -> None:
    path = make_tiny_checkpoint(tmp_path, tie=True, vocab=2000)
    model = load(path, fd, load_kernels("cpu", "reference"))
    assert os.fstat(fd).st_size < 1.1 * model.weight_bytes


def test_a_stray_write_ends_the_process(tmp_path: Path, fd: int) -> None:
    store = WeightStore(os.dup(fd))
    store.put("a", Record({"data": torch.ones(1000)}, {}))
    before = store.get("a").tensors["data"]
    store.seal({})
    for tensor in (before, WeightStore(os.dup(fd)).get("a").tensors["data"]):
        if (pid := os.fork()) == 0:
            faulthandler.disable()
            tensor[0] = 2.0
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        assert tensor.sum() == 1000
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)


def test_weights_of_other_kernels_are_refused(tmp_path: Path, fd: int) -> None:
    path = make_tiny_checkpoint(tmp_path)
    load(path, fd, load_kernels("cpu", "reference"))
    with pytest.raises(InternalError, match="weights for torch reference kernels, not for C"):
        load(path, fd)


def test_a_load_that_fails_leaves_no_seal(tmp_path: Path, fd: int) -> None:
    path = make_tiny_checkpoint(tmp_path)

    def fail(done: int, total: int) -> None:
        if done > total / 2:
            raise InvalidRequest("enough")

    with pytest.raises(InvalidRequest, match="enough"):
        load_model(
            ModelSource(path, WeightStore(os.dup(fd))),
            dtype="auto",
            device="cpu",
            tp=TensorParallel(),
            kernels=load_kernels("cpu"),
            progress=fail,
        )
    assert not memory.is_sealed(fd)


def test_records_come_back_as_they_were_put(fd: int) -> None:
    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar-like": torch.tensor([7]),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "codes": torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float8_e4m3fn),
        "half": torch.randn(5, 5).bfloat16(),
    }
    store = WeightStore(os.dup(fd))
    store.put("a", Record(tensors, {"n": 3}))
    store.put("b", Record({"data": torch.ones(3)}, {}))
    store.seal({"layout": "x"})
    for again in (store, WeightStore(os.dup(fd))):
        assert again.names() == {"a", "b"}
        assert again.facts == {"layout": "x"}
        back, facts = again.get("a")
        assert facts == {"n": 3}
        for part, tensor in tensors.items():
            assert back[part].dtype is tensor.dtype
            assert back[part].shape == tensor.shape
            assert (
                back[part]
                .contiguous()
                .view(torch.uint8)
                .equal(tensor.contiguous().view(torch.uint8))
            )
            assert back[part].data_ptr() % 64 == 0 or not tensor.numel()
