from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from surestep_kernels.columns.products.probe_results import (
    Identity,
    ProbeResult,
    default_folder,
    load_result,
    save_result,
)

CARD: Identity = {"device": "a card", "capability": [9, 0], "weights": [[2048, 8192, False]]}
EQUAL = ProbeResult("", frozenset({(2048, 8192), (3072, 2048)}), narrow=True)


@pytest.mark.parametrize("result", [EQUAL, ProbeResult("16 rows by a tile")], ids=["equal", "not"])
def test_a_verdict_is_kept(tmp_path: Path, result: ProbeResult) -> None:
    folder = tmp_path / "made" / "here"
    assert load_result(CARD, folder) is None
    save_result(result, CARD, folder)
    assert load_result(CARD, folder) == result
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_one_that_was_not_reached_is_not_kept(tmp_path: Path) -> None:
    unfinished = ProbeResult("", finished=False)
    assert not unfinished.equal
    save_result(unfinished, CARD, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"device": "another"}, {"capability": [9, 1]}, {"more": 1}])
def test_another_card_has_another_result(tmp_path: Path, change: Identity) -> None:
    save_result(EQUAL, CARD, tmp_path)
    assert load_result(CARD | change, tmp_path) is None


def _spoilt(content: str) -> dict[str, str]:
    good = json.loads(content)
    return {
        "empty": "",
        "cut": content[: len(content) // 2],
        "list": "[]",
        "null": "null",
        "of another card": json.dumps(good | {"identity": CARD | {"device": "another"}}),
        "lacks": json.dumps({"identity": CARD}),
        "no text": json.dumps(good | {"unequal": 0}),
        "no shapes": json.dumps(good | {"cublas": [[1, 2, 3]]}),
        "no numbers": json.dumps(good | {"cublas": 7}),
        "nested": "[" * 100_000,
        "no UTF-8": "\udcff",
    }


def test_a_file_that_is_anything_else_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_result(EQUAL, CARD, tmp_path)
    (file,) = tmp_path.iterdir()
    for name, content in _spoilt(file.read_text()).items():
        file.write_bytes(content.encode(errors="surrogateescape"))
        caplog.clear()
        assert load_result(CARD, tmp_path) is None, name
        assert [record.levelno for record in caplog.records] == [logging.WARNING], name
        save_result(EQUAL, CARD, tmp_path)
        assert load_result(CARD, tmp_path) == EQUAL
    file.unlink()
    file.mkdir()
    assert load_result(CARD, tmp_path) is None
    save_result(EQUAL, CARD, tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_costs_only_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("where a folder should be")
    save_result(EQUAL, CARD, file)
    assert "cannot be kept" in caplog.text
    assert load_result(CARD, file) is None


def test_many_write_at_once_and_whoever_reads_sees_a_whole_one(tmp_path: Path) -> None:
    def write_and_read(_: int) -> ProbeResult | None:
        save_result(EQUAL, CARD, tmp_path)
        return load_result(CARD, tmp_path)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write_and_read, range(64))) == {EQUAL}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_is_beside_what_else_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "surestep" / "products"
