"""`surestep serve` with a model that is broken: a line that says what, soon, and no traceback."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints.changes import change_config, change_tensors
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import environment

pytestmark = pytest.mark.timeout(120)
LONGEST_S = 30.0  # three on a quiet machine; the start-up itself may take ten minutes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return make_tiny_checkpoint(folder / "model", seed=7, tokenizer=True)


def edit_config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: change_config(folder, **changes)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5000)


def spoil_weights(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan

    change_tensors(folder, spoil)


def grow_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{i}": len(vocabulary) + i for i in range(400)}
    path.write_text(json.dumps(tokenizer))


class Bomb:
    """Whoever unpickles it runs a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def pickle_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(pickle.dumps(Bomb()))


def bring_code(folder: Path) -> None:
    """Add remote code of transformers, and modules that Python would look for here."""
    for name in ("modeling", "torch", "numpy", "orjson", "surestep_worker", "sitecustomize"):
        (folder / f"{name}.py").write_text("open('executed', 'w')\n")
    names = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_config(auto_map=names, architectures=["OwnForCausalLM"])(folder)


def link_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("/etc/passwd")


def grow(name: str) -> Callable[[Path], object]:
    """A gigabyte that takes no disk."""
    return lambda folder: os.truncate(folder / name, 1 << 30)


def panic_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "absurd size": (edit_config(num_hidden_layers=10**9), ("rank 0", "num_hidden_layers")),
    "cut off": (cut_weights, ("rank 0", "model.safetensors", "layers.1.self_attn.v_proj.weight")),
    "not a number": (spoil_weights, ("rank 0", "model.safetensors", "layers.1.mlp.up_proj.weight")),
    "foreign tokenizer": (grow_tokenizer, ("gateway", "tokenizer.json", "vocabulary", "384")),
    "broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"),
        ("gateway", "chat template"),
    ),
    "endless template": (
        lambda folder: (folder / "chat_template.jinja").write_text(ENDLESS),
        ("gateway", "chat template: it did not end within 1 s"),
    ),
    "large template": (grow("chat_template.jinja"), ("gateway", "chat_template.jinja is not a")),
    "linked template": (link_template, ("gateway", "chat_template.jinja is a link to /etc/passwd")),
    "large tokenizer": (grow("tokenizer.json"), ("gateway", "tokenizer.json is not a file of")),
    "panicking tokenizer": (panic_tokenizer, ("gateway", "cannot read", "tokenizer.json")),
    "large configuration": (grow("config.json"), ("config.json is not a file of at most",)),
    "deep configuration": (
        lambda folder: (folder / "config.json").write_bytes(b"[" * (1 << 20)),
        ("config.json is not JSON",),
    ),
    "pickled weights": (pickle_weights, ("rank 0", "convert its pytorch_model.bin")),
    "pickled tokenizer": (pickle_tokenizer, ("gateway", "tokenizer.model is not read here")),
    "code": (bring_code, ("rank 0", "unknown architecture 'OwnForCausalLM'")),
}
MOST_BYTES = 1 << 30  # of a process, with what a rank imports


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.rotates(4)
def test_the_reason_is_given_soon(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    spoil, words = DAMAGES[damage]
    spoil(folder)
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "surestep_cli", "serve", ".", "--port", "0"]
    ended = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "logs")],
        cwd=folder,
        env=environment({}),
        preexec_fn=limit_memory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    took_s = time.monotonic() - began
    assert ended.returncode in (1, 2)  # 1 where the gateway sees it first
    assert took_s < LONGEST_S
    assert "Traceback" not in ended.stderr
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
    assert ended.stdout == ""
    assert not (folder / "executed").exists()
