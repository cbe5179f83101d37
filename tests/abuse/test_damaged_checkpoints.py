"""`surestep serve` with a model that is broken: a line that says what, soon, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import environment

pytestmark = pytest.mark.timeout(120)
LONGEST_S = 30.0  # three on a quiet machine; the start-up itself may take ten minutes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return make_tiny_checkpoint(folder / "model", seed=7, tokenizer=True)


def edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5000)


def spoil_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def grow_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{i}": len(vocabulary) + i for i in range(400)}
    path.write_text(json.dumps(tokenizer))


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "absurd size": (edit_config(num_hidden_layers=10**9), ("rank 0", "num_hidden_layers")),
    "cut off": (cut_weights, ("rank 0", "model.safetensors", "layers.1.self_attn.v_proj.weight")),
    "not a number": (spoil_weights, ("rank 0", "model.safetensors", "layers.1.mlp.up_proj.weight")),
    "foreign tokenizer": (grow_tokenizer, ("gateway", "tokenizer.json", "vocabulary", "384")),
    "broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"),
        ("gateway", "chat template"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.rotates(2)
def test_the_reason_is_given_soon(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    spoil, words = DAMAGES[damage]
    spoil(folder)
    began = time.monotonic()
    command = [sys.executable, "-m", "surestep_cli", "serve", str(folder), "--port", "0"]
    ended = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "logs")],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    took_s = time.monotonic() - began
    assert ended.returncode == 1
    assert took_s < LONGEST_S
    assert "Traceback" not in ended.stderr
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
    assert ended.stdout == ""
