"""GGUF files in parts, written by llama.cpp's own library."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints.least_gguf import write_least
from surestep_common.errors import InvalidRequest, NotFound
from surestep_common.gguf import model_folder, weights_of
from surestep_common.gguf.parts import part_files, read_whole, whole_name


def test_names() -> None:
    first = Path("a/b-Q4-00001-of-00002.gguf")
    assert whole_name(first) == "b-Q4"
    assert part_files(first) == [first, Path("a/b-Q4-00002-of-00002.gguf")]
    assert whole_name(Path("a/b-Q4.gguf")) == "b-Q4"
    assert part_files(Path("a/b-Q4.gguf")) == [Path("a/b-Q4.gguf")]


def test_parts_hold_what_one_file_does(tmp_path: Path) -> None:
    whole = read_whole(write_least(tmp_path / "whole.gguf", more_tensors=4))
    first = write_least(tmp_path / "parts.gguf", more_tensors=4, part=2)
    parts = read_whole(first)
    assert first.name == "parts-00001-of-00003.gguf"
    assert {place.file for place in parts.tensors.values()} == set(part_files(first))
    assert parts.tensors.keys() == whole.tensors.keys()
    for name, place in parts.tensors.items():
        assert parts.read(place) == whole.read(whole.tensors[name])


def test_a_folder_stands_for_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another one when any of them changes, and each part may be a link to a file that is
    called otherwise, as the hub's cache has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = write_least(tmp_path / "model.gguf", more_tensors=4, part=2)
    for part in part_files(first):
        part.rename(tmp_path / f"blob-{part.name[6:11]}")
        part.symlink_to(f"blob-{part.name[6:11]}")
    folder = model_folder(first)
    assert (folder.name, weights_of(folder)) == ("model", first)
    assert model_folder(first) == folder
    last = part_files(first)[-1]
    last.unlink()
    shutil.copy(tmp_path / f"blob-{last.name[6:11]}", last)
    assert model_folder(first) != folder
    last.unlink()
    with pytest.raises(NotFound, match=f"^cannot read {last}: No such file"):
        model_folder(first)


def swapped(files: list[Path]) -> None:
    shutil.copy(files[1], files[2])


def of_another_count(files: list[Path]) -> None:
    write_least(files[0].with_name("other.gguf"), more_tensors=1, part=1)
    shutil.copy(files[0].with_name("other-00002-of-00002.gguf"), files[1])


def missing(files: list[Path]) -> None:
    files[1].unlink()


def twice(files: list[Path]) -> None:
    data = files[2].read_bytes()
    assert b"tensor4" in data
    files[2].write_bytes(data.replace(b"tensor4", b"tensor1"))


def fewer(files: list[Path]) -> None:
    write_least(files[0].with_name("other.gguf"), more_tensors=3, part=1)
    for i, file in enumerate(files):
        wanted = files[0].with_name(f"other-{i + 1:05}-of-00004.gguf").read_bytes()
        file.write_bytes(wanted.replace(b"split.count\x02\0\0\0\4", b"split.count\x02\0\0\0\3"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swapped, "-00003-of-00003.gguf: it is not part 3 of 3$"),
        (of_another_count, "-00002-of-00003.gguf: it is not part 2 of 3$"),
        (missing, "-00002-of-00003.gguf: No such file or directory$"),
        (twice, "-00003-of-00003.gguf: tensor tensor1 stands in another part, too$"),
        (fewer, "-00001-of-00003.gguf: its parts hold 3 tensors of 4$"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, damage: Callable[[list[Path]], None], message: str
) -> None:
    first = write_least(tmp_path / "model.gguf", more_tensors=4, part=2)
    damage(part_files(first))
    with pytest.raises(InvalidRequest, match=message):
        read_whole(first)


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    first = write_least(tmp_path / "model.gguf", more_tensors=4, part=2)
    with pytest.raises(InvalidRequest, match=f"not the first of 3 parts: name {first.name}$"):
        read_whole(part_files(first)[1])
    renamed = tmp_path / "renamed.gguf"
    first.rename(renamed)
    with pytest.raises(
        InvalidRequest, match=r"must be called NAME-00001-of-00003\.gguf and so on$"
    ):
        read_whole(renamed)
