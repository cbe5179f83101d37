"""Which files of a folder make a tokenizer, and how large they may be."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from surestep_common.errors import NotFound, RequestTooLarge
from surestep_scheduler.tokenizer_files import MAX_BYTES, archive

_OTHERS = ("model.safetensors", "README.md", "modeling.py", "secrets.env")


def names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        return files.namelist()


@pytest.mark.parametrize(
    "enough", ["tokenizer.json", "tokenizer.model", "qwen.tiktoken", "vocab.json"]
)
def test_what_a_tokenizer_is_made_of(tmp_path: Path, enough: str) -> None:
    for name in (*_OTHERS, "config.json", "chat_template.jinja", enough):
        (tmp_path / name).write_text(name)
    (tmp_path / "vocab.txt").mkdir()
    data = archive(tmp_path)
    assert names(data) == sorted(["chat_template.jinja", "config.json", enough])
    assert archive(tmp_path) == data  # so that who has it already sees so by its hash


@pytest.mark.parametrize("files", [(), ("config.json", "chat_template.jinja"), _OTHERS])
def test_no_tokenizer_is_not_found(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(NotFound, match="no tokenizer"):
        archive(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        archive(tmp_path / "nowhere")


def test_too_large_to_send(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # a hole
    with pytest.raises(RequestTooLarge):
        archive(tmp_path)
