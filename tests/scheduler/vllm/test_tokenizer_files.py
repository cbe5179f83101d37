"""Which files of a folder make a tokenizer, and how large they may be."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from surestep_common.errors import InvalidRequest, NotFound, RequestTooLarge
from surestep_scheduler.vllm.tokenizer_files import MAX_BYTES, Bundles, archive

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


def test_a_link_out_of_the_folder_is_not_sent(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "model"
    secret.write_text("password")
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.txt").symlink_to(secret)
    with pytest.raises(InvalidRequest, match="outside the model folder"):
        archive(folder)


async def test_one_archive_is_made_and_shared(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    bundles = Bundles()
    first, second = await asyncio.gather(*(bundles.get(str(tmp_path), "a") for _ in range(2)))
    assert first.data is second.data
    (tmp_path / "tokenizer.json").write_text("[]")
    other = await bundles.get(str(tmp_path), "b")  # another model at the same place
    assert other.data != first.data
    assert other.digest == hashlib.sha256(other.data).hexdigest()


async def test_what_was_not_found_is_looked_for_again(tmp_path: Path) -> None:
    bundles = Bundles()
    with pytest.raises(NotFound):
        await bundles.get(str(tmp_path), "a")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert names((await bundles.get(str(tmp_path), "a")).data) == ["tokenizer.json"]
