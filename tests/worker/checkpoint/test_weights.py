from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.checkpoint.model_folder import read_entries
from surestep_worker.checkpoint.parameters import (
    CheckpointWeights,
    Parameter,
    Progress,
    TensorSource,
)
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor

NORM = "model.layers.1.input_layernorm.weight"


def load(path: Path, progress: Progress | None = None, dtype: str = "auto") -> Model:
    return load_model(
        ModelSource(path),
        dtype=dtype,
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
        progress=progress,
    )


def file_size(path: Path) -> int:
    return (path / "model.safetensors").stat().st_size


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path, hidden=32, intermediate=48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"missing: {NORM}"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), "unexpected: surplus"),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(31)}),
            rf"of another shape: {NORM} \[31\] instead of \[32\]",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(32, dtype=torch.int8)}),
            f"of another type: {NORM} I8 instead of F32 or BF16 or F16",
        ),
        (
            lambda tensors: tensors.update({f"x{i}": torch.zeros(1) for i in range(9)}),
            "unexpected: x0, x1, x2, x3, x4, x5 and 3 more",
        ),
        (
            lambda tensors: [tensors.pop(NORM), tensors.update(surplus=torch.zeros(2))],
            f"missing: {NORM}; unexpected: surplus",
        ),
    ],
)
def test_a_wrong_checkpoint_is_refused_before_reading(
    checkpoint: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit(checkpoint, change)
    reads: list[int] = []
    with pytest.raises(InvalidRequest, match=message):
        load(checkpoint, lambda done, total: reads.append(done))
    assert reads == []


def test_known_buffers_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(checkpoint)


def test_lm_head_is_ignored_only_when_tied(tmp_path: Path) -> None:
    tied = make_tiny_checkpoint(tmp_path / "tied", hidden=32, tie=True)
    edit(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tied)
    untied = make_tiny_checkpoint(tmp_path / "untied", hidden=32)
    edit(untied, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(InvalidRequest, match=r"missing: lm_head\.weight"):
        load(untied)


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    single = make_tiny_checkpoint(tmp_path / "single", hidden=32)
    sharded = make_tiny_checkpoint(tmp_path / "sharded", hidden=32, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(single).logits(hidden), load(sharded).logits(hidden))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=32, max_shard_size="40KB")
    first, second = sorted(path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(InvalidRequest, match=f"in more than one file: {name}"):
        load(path)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=32, max_shard_size="40KB")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(InvalidRequest, match=f"cannot read .*{lost.name}"):
        load(path)


def test_no_weights_and_broken_weights(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match=r"cannot read .*model\.safetensors"):
        load(checkpoint)
    weights.unlink()
    with pytest.raises(InvalidRequest, match=r"no model\.safetensors and no"):
        load(checkpoint)


def test_progress_counts_the_bytes_of_the_file(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(checkpoint, lambda done, total: calls.append((done, total)))
    total = sum(t.nbytes for t in load_file(checkpoint / "model.safetensors").values())
    assert calls[-1] == (total, total)
    assert {of for _, of in calls} == {total}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_model_knows_its_size(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert load(checkpoint).weight_bytes == file_size(checkpoint) - header


def test_dtype_is_converted(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=32, dtype=torch.float16)
    assert load(path).kv_spec(4).dtype is torch.bfloat16
    assert load(path, dtype="float32").kv_spec(4).dtype is torch.float32


def table_of(rows: slice, columns: slice) -> dict[str, Parameter]:
    stacked = (TensorSource("a", (4, 6), rows), TensorSource("b", (2, 6), slice(0, 2)))
    return {
        "stacked": Parameter((rows.stop - rows.start + 3, 6), stacked),
        "columns": Parameter(
            (4, columns.stop - columns.start), (TensorSource("c", (4, 6), columns, 1),)
        ),
    }


def test_slices_are_stacked_and_the_rest_is_zero(tmp_path: Path) -> None:
    tensors = {name: torch.randn(rows, 6) for name, rows in (("a", 4), ("b", 2), ("c", 4))}
    save_file(tensors, tmp_path / "model.safetensors")
    table = table_of(slice(1, 3), slice(2, 5))
    with CheckpointWeights(read_entries(tmp_path), table, dtype=torch.float32) as weights:
        assert torch.equal(weights.take("columns"), tensors["c"][:, 2:5])
        stacked = weights.take("stacked")
        assert "stacked" not in weights
    expected = torch.cat((tensors["a"][1:3], tensors["b"], torch.zeros(1, 6)))
    assert torch.equal(stacked, expected)


def test_a_parameter_never_taken_is_a_bug(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    table = {"p": Parameter((2,), (TensorSource("a", (2,), slice(0, 2)),))}
    with (
        pytest.raises(AssertionError, match=r"never taken: .'p'"),
        CheckpointWeights(read_entries(tmp_path), table, dtype=torch.float32),
    ):
        pass


def test_index_that_names_no_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(InvalidRequest, match=r"index\.json: weight_map must map tensors to files"):
        load(checkpoint)
