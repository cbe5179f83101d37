"""Weights that come while a model is served: whose they are, how they are put together and kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.checkpoint.model_folder import AS_IT_IS, fingerprint_of, read_entries
from surestep_worker.checkpoint.safetensors_header import read_header
from surestep_worker.checkpoint.weight_update import WeightUpdates, with_update
from surestep_worker.host import shared_memory as memory
from torch import Tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny", "llama", seed=7)


@pytest.fixture
def held(folder: Path) -> HeldWeights:
    """Weights that a supervisor holds behind its first rank."""
    held = HeldWeights(folder)
    memory.seal(held.fds.model)
    held.ready(fingerprint_of(folder))
    return held


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def caches_of(held: HeldWeights) -> int:
    return os.fstat(held.fds.caches).st_ino


def test_what_other_weights_have_computed_is_given_up(held: HeldWeights) -> None:
    """A fingerprint samples bytes: it may not tell two versions apart."""
    before = caches_of(held)
    held.replace(held.source._replace(version="second"), as_file({}))
    assert caches_of(held) != before
    held.roll_back()
    assert caches_of(held) != before


def as_file(tensors: Mapping[str, Tensor]) -> int:
    fd = memory.create("test")
    os.write(fd, save(dict(tensors)))
    return fd


def read(held: HeldWeights) -> dict[str, bytes]:
    """The bytes of every tensor that a rank would load."""
    folder = held.source.folder
    assert folder is not None
    update = Path(f"/proc/self/fd/{held.fds.update}") if held.has_update else None
    entries = with_update(read_entries(folder), update)
    return {
        name: entry.file.read_bytes()[entry.begin : entry.end] for name, entry in entries.items()
    }


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {
        name: bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        for name, tensor in tensors.items()
    }


def test_parts_are_put_together_and_keep_what_came_before(folder: Path, held: HeldWeights) -> None:
    updates, wanted = WeightUpdates(held, AS_IT_IS), tensors_of(folder)
    names = sorted(wanted)
    for version, chosen in enumerate((names[:2], names[1:4], names)):
        new = {name: torch.full_like(wanted[name], version + 1) for name in chosen}
        halves = [dict(list(new.items())[::2]), dict(list(new.items())[1::2])]
        updates.begin()
        for half in halves:
            assert updates.add(as_file(half)).num_tensors == len(half)
        assert read(held) == bytes_of(wanted)  # nothing is served of them yet
        updates.use(f"v{version}")
        wanted |= new
        assert read(held) == bytes_of(wanted)
        assert (held.source.version, held.sealed, held.checkpoint) == (f"v{version}", False, "")
        assert updates.loadable() != fingerprint_of(folder)
    held.roll_back()
    assert held.source.version == "v1"
    with pytest.raises(Unavailable, match="no version is held besides 'v1'"):
        held.roll_back()
    held.give_up()
    assert (held.source.version, held.has_update) == ("default", False)
    assert read(held) == bytes_of(tensors_of(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, tensor: {f"{name}.x": tensor}, "unexpected: "),
        (lambda name, tensor: {name: tensor[:1]}, "of another type or shape: "),
        (lambda name, tensor: {name: tensor.to(torch.float16)}, "of another type or shape: "),
    ],
)
def test_strangers_are_refused(
    folder: Path, held: HeldWeights, change: object, message: str
) -> None:
    assert callable(change)
    updates, (name, tensor) = WeightUpdates(held, AS_IT_IS), sorted(tensors_of(folder).items())[0]
    with pytest.raises(InvalidRequest, match=message):
        updates.add(as_file(change(name, tensor)))
    with pytest.raises(InvalidRequest, match="no weights have come"):
        updates.use("v1")
    assert held.source.version == "default"


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"\xff" * 64, save({})[:9]])
def test_what_is_no_safetensors_file_is_refused(held: HeldWeights, data: bytes) -> None:
    fd = memory.create("test")
    os.write(fd, data)
    with pytest.raises(InvalidRequest):
        WeightUpdates(held, AS_IT_IS).add(fd)


def test_another_folder_of_the_same_shape(folder: Path, held: HeldWeights, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", "llama", seed=8)
    updates = WeightUpdates(held, AS_IT_IS)
    staged = updates.stage(other)
    assert staged.digest == fingerprint_of(other)
    assert staged.num_tensors == len(read_entries(other))
    updates.use("v1")
    assert (held.source.folder, held.source.folder_version) == (other, "v1")
    held.ready(updates.loadable())
    held.give_up()
    assert held.source.version == "v1"  # a folder needs no memory


def test_a_file_of_a_trainer_beside_it(folder: Path, held: HeldWeights, tmp_path: Path) -> None:
    """It lies in shared memory, and is the trainer's again as soon as it was taken."""
    updates, wanted = WeightUpdates(held, AS_IT_IS), tensors_of(folder)
    name, tensor = sorted(wanted.items())[0]
    new = {name: torch.full_like(tensor, 3.0)}
    theirs = as_file(new)
    path = Path(f"/proc/{os.getpid()}/fd/{theirs}")
    assert updates.stage(path).digest == sha256(path.read_bytes()).hexdigest()
    os.pwrite(theirs, bytes(64), os.fstat(theirs).st_size - 64)  # the next one is being written
    updates.use("v1")
    assert read(held) == bytes_of(wanted | new)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for other in (pipe, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(InvalidRequest, match=str(other)):
            updates.stage(other)


def test_folders_of_other_models_are_refused(
    folder: Path, held: HeldWeights, tmp_path: Path
) -> None:
    updates = WeightUpdates(held, AS_IT_IS)
    with pytest.raises(InvalidRequest, match="no absolute path"):
        updates.stage(Path("tiny"))
    with pytest.raises(InvalidRequest):
        updates.stage(tmp_path)
    stranger = make_tiny_checkpoint(tmp_path / "qwen", "qwen2", seed=7)
    endless = make_tiny_checkpoint(tmp_path / "endless", "llama", seed=7)
    (endless / "generation_config.json").unlink()
    for other in (stranger, endless):
        with pytest.raises(InvalidRequest, match=r"another config\.json"):
            updates.stage(other)


def test_a_part_needs_the_folder_that_the_rest_is_from(
    folder: Path, held: HeldWeights, tmp_path: Path
) -> None:
    updates, tensors = WeightUpdates(held, AS_IT_IS), tensors_of(folder)
    other = make_tiny_checkpoint(tmp_path / "other", "llama", seed=8)
    for path in other.glob("*.safetensors"):
        path.rename(folder / path.name)  # a trainer saves where the server has read
    part = dict([sorted(tensors.items())[0]])
    updates.add(as_file(part))
    with pytest.raises(InvalidRequest, match="send all tensors"):
        updates.use("v1")
    updates.begin()
    updates.add(as_file(tensors))
    updates.use("v1")
    assert read_header(Path(f"/proc/self/fd/{held.fds.update}")).keys() == tensors.keys()
