"""The header of a GGUF file: read as it was written; damaged and hostile ones are refused in a line."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from surestep_common.errors import InvalidRequest, NotFound, SurestepError
from surestep_common.gguf import model_folder
from surestep_common.gguf.header import read_header

COUNT_OF_TENSORS, COUNT_OF_PAIRS, FIRST_KEY = 8, 16, 24  # offsets within a file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "some.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.large", 1 << 40)
    writer.add_array("some.texts", ["ä", "", "b c"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    blocks = np.zeros((3, 40), dtype=np.uint8)
    writer.add_tensor("matrix", blocks, raw_dtype=Type.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_was_written(file: Path) -> None:
    header = read_header(file)
    assert header.metadata == {
        "general.architecture": "llama",
        "a.number": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.large": 1 << 40,
        "some.texts": ["ä", "", "b c"],
        "some.numbers": [1, -2, 3],
    }
    for theirs in GGUFReader(file).tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(theirs.shape[::-1])
        assert (ours.begin, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.type.name == theirs.tensor_type.name


def changed(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + data + content[at + len(data) :]


def after(name: str, skip: int, data: bytes) -> Callable[[bytes], bytes]:
    """Change what stands so many bytes behind a name."""

    def change(content: bytes) -> bytes:
        at = content.index(name.encode()) + len(name) + skip
        return content[:at] + data + content[at + len(data) :]

    return change


HUGE = struct.pack("<Q", 1 << 60)
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "not a GGUF file"),
    "another format": (lambda content: b"PK\3\4" * 20, "not a GGUF file"),
    "an old version": (changed(4, struct.pack("<I", 1)), "GGUF version 1 is not supported"),
    "the other byte order": (changed(4, struct.pack(">I", 3)), "version 50331648 is not"),
    "many tensors": (changed(COUNT_OF_TENSORS, HUGE), "counts 1152921504606846976 things"),
    "many pairs": (changed(COUNT_OF_PAIRS, HUGE), "counts 1152921504606846976 things"),
    "a long key": (changed(FIRST_KEY, HUGE), "header is cut off"),
    "a key twice": (lambda c: c.replace(b"a.large", b"a.float"), "a.float stands in it twice"),
    "a tensor twice": (lambda c: c.replace(b"matrix", b"vector"), "vector stands in it twice"),
    "a kind of value": (after("a.number", 0, struct.pack("<I", 77)), r"a\.number is of a kind"),
    "many texts": (after("some.texts", 8, HUGE), r"some\.texts has 1152921504606846976 items"),
    "no UTF-8": (after("llam", 0, b"\xff"), "is not UTF-8"),
    "many dimensions": (after("vector", 0, struct.pack("<I", 9)), "vector has 9 dimensions"),
    "a large dimension": (after("vector", 4, HUGE), "vector ends at byte .*: the file is cut off"),
    "more than large": (after("matrix", 4, HUGE + HUGE), "matrix has an impossible size"),
    "a broken row": (after("matrix", 4, struct.pack("<Q", 33)), "no whole Q4_1 blocks"),
    "an unknown type": (after("vector", 12, struct.pack("<I", 99)), "of type 99, which is not"),
    "a type not served": (after("matrix", 20, struct.pack("<I", 10)), "of type Q2_K, which is not"),
    "another place": (after("matrix", 24, struct.pack("<Q", 0)), "tensors .* overlap"),
    "a far place": (after("matrix", 24, HUGE), "the file is cut off"),
    "cut off": (lambda content: content[:-20], "matrix ends at byte .*: the file is cut off"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_refuses_in_a_line(file: Path, tmp_path: Path, name: str) -> None:
    change, message = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(file.read_bytes()))
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"^cannot read {path}: .*({message})[^\n]*$"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_is_refused_or_read(file: Path, tmp_path: Path, seed: int) -> None:
    """Bytes changed at random, and files cut off anywhere, raise no other error."""
    content, refused = file.read_bytes(), list[str]()
    rng = random.Random(seed)
    path = tmp_path / "bad.gguf"
    for trial in range(600):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(content) * 3 // 4)] = rng.choice(
                (0, 1, 127, 255, rng.randrange(256))
            )
        path.write_bytes(damaged if trial % 3 else damaged[: rng.randrange(len(content))])
        try:
            read_header(path)
        except InvalidRequest as error:
            refused.append(error.message)
    assert len(refused) > 200
    assert all(map(str.isprintable, refused))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="it is not a file"):
        read_header(tmp_path)
    with pytest.raises(NotFound, match=r"cannot read .*none\.gguf: No such file"):
        model_folder(tmp_path / "none.gguf")
    assert issubclass(NotFound, SurestepError)
