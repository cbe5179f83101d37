"""Entries of tiers: what is not exactly what was asked for is refused, in every tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.processes.redis_server import redis_server
from surestep_worker.tiers import entry as form
from surestep_worker.tiers.entry import HEAD_BYTES, Entry, EntryForm, Kind, Name, Refused
from surestep_worker.tiers.folder import FolderTier
from surestep_worker.tiers.host import HostTier
from surestep_worker.tiers.stack import Stack
from surestep_worker.tiers.store import StoreTier
from surestep_worker.tiers.tier import Tier

MINE, OTHERS = EntryForm.of("model a"), EntryForm.of("model b")
SIZE, MOST = 96, 10 * (HEAD_BYTES + 96)
Make = Callable[[EntryForm], Tier]


def name(number: int, kind: Kind = Kind.BLOCK) -> Name:
    return Name(kind, number.to_bytes(16))


def content(number: int) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.int64).add(number).to(torch.uint8)


def entry(number: int, kind: Kind = Kind.BLOCK, of: EntryForm = MINE) -> Entry:
    return of.pack(name(number, kind), content(number))


@pytest.fixture(params=["folder", "store"])
def make(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    opened: Callable[[str, int, EntryForm], StoreTier],
) -> Iterator[Make]:
    """Makes tiers of one place with room for ten entries."""
    if request.param == "folder":
        yield lambda form: FolderTier(tmp_path / "tier", MOST, form)
        return
    with redis_server(tmp_path) as (url, _):
        yield lambda form: opened(url, MOST, form)


def test_what_is_written_is_read_by_another(make: Make) -> None:
    writer, reader = make(MINE), make(MINE)
    assert reader.present([name(1)]) == [False]
    assert reader.read(name(1), SIZE) is None
    writer.write(name(1), entry(1))
    assert reader.present([name(1), name(2), name(1, Kind.DRAFTED)]) == [True, False, False]
    found = reader.read(name(1), SIZE)
    assert found is not None
    assert found.payload.equal(content(1))
    assert make(OTHERS).present([name(1)]) == [False]
    writer.remove([name(1), name(3)])
    assert reader.present([name(1)]) == [False]


def test_the_bound_holds_and_what_is_used_stays(make: Make) -> None:
    tier = make(MINE)
    for number in range(9):
        tier.write(name(number), entry(number))
        if isinstance(tier, FolderTier):
            os.utime(tier._path(name(number)), (number, number))
    assert all(tier.present([name(number) for number in range(9)]))
    assert tier.read(name(0), SIZE) is not None  # used now
    for number in range(9, 12):
        tier.write(name(number), entry(number))
    left = tier.present([name(number) for number in range(12)])
    assert left[0]
    assert not left[1]
    assert left[-1]
    assert sum(left) <= 10


def test_models_share_the_bound(make: Make) -> None:
    first, second = make(MINE), make(OTHERS)
    for number in range(8):
        first.write(name(number), entry(number))
    for number in range(9):
        second.write(name(number), entry(number, of=OTHERS))
    numbers = [name(number) for number in range(9)]
    assert sum(first.present(numbers)) + sum(second.present(numbers)) <= 10
    assert second.present(numbers[-1:]) == [True]


def stored(number: int, data: bytes) -> Entry:
    """Bytes as an entry that a tier writes without looking at them."""
    return Entry(
        data[:HEAD_BYTES], torch.frombuffer(bytearray(data[HEAD_BYTES:]), dtype=torch.uint8)
    )


def flipped(at: int) -> bytes:
    data = bytearray(b"".join(entry(1).parts))
    data[at] ^= 4
    return bytes(data)


def of_version(version: int, patch: pytest.MonkeyPatch) -> bytes:
    with patch.context() as changed:
        changed.setattr(form, "VERSION", version)
        return b"".join(entry(1).parts)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (flipped(HEAD_BYTES), "content is corrupted"),
        (flipped(HEAD_BYTES + SIZE - 1), "content is corrupted"),
        (flipped(20), "head is corrupted"),
        (flipped(HEAD_BYTES - 1), "head is corrupted"),
        (flipped(0), "no entry"),
        (b"".join(entry(1).parts)[:-1], "bytes"),
        (b"".join(entry(1).parts) + b"x", "bytes"),
        (b"x" * (HEAD_BYTES + SIZE), "no entry"),
        (b"".join(entry(2).parts), "of another prefix"),
        (b"".join(entry(1, Kind.DRAFTED).parts), "of another prefix"),
        (b"".join(entry(1, of=OTHERS).parts), "of another model"),
        (None, "form has version 2"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_removed(
    make: Make,
    data: bytes | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = make(MINE)
    tier.write(name(1), stored(1, data or of_version(2, monkeypatch)))
    with pytest.raises(Refused, match=why):
        tier.read(name(1), SIZE)
    stack = Stack(MINE, None, [tier])
    assert stack.read(name(1), SIZE) is None
    assert stack.num_refused == 1
    stack.close(30)
    assert tier.present([name(1)]) == [False]


def test_memory_that_changed_is_refused() -> None:
    near = HostTier(MOST)
    stack = Stack(MINE, near, [])
    kept = entry(1)
    stack.write(name(1), kept)
    assert stack.read(name(1), SIZE) is not None
    kept.payload[5] += 1
    assert stack.read(name(1), SIZE) is None


def test_memory_is_bounded() -> None:
    near = HostTier(MOST)
    for number in range(30):
        near.write(name(number), entry(number))
        near.read(name(0))
    assert near.nbytes == MOST
    assert near.present([name(0), name(1), name(29)]) == [True, False, True]


def test_a_folder_leaves_other_files_alone(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, MOST, MINE)
    (tmp_path / "notes").mkdir()
    mine = tmp_path / "notes" / ("0" * 32 + ".block")
    mine.write_bytes(b"n" * MOST)
    for number in range(30):
        tier.write(name(number), entry(number))
    assert mine.exists()
    assert sum(tier.present([name(number) for number in range(30)])) >= 9
    assert oct(os.stat(tier._path(name(29))).st_mode)[-3:] == "600"
    assert oct(os.stat(tier._mine).st_mode)[-3:] == "700"


def test_files_that_were_never_finished_go(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, MOST, MINE)
    tier.write(name(1), entry(1))
    torn = Path(f"{tier._path(name(2))}.77-1")
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"x")
    os.utime(torn, (1, 1))
    for number in range(10, 30):
        tier.write(name(number), entry(number))
    assert not torn.exists()
