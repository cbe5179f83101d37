"""How several models share a machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from surestep_cli.serve.shares import Demand, Shares, share_out, told, weight_bytes, with_shares
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_common.errors import InvalidRequest

GIB = 1 << 30


def demand(gib: float, *, stays: bool = False, name: str = "m") -> Demand:
    return Demand(name, int(gib * GIB), 1, stays)


@pytest.mark.parametrize(
    ("demands", "free", "wanted", "shares"),
    [
        ([demand(9)], 1, None, Shares(1, weights_stay=False)),  # the rank refuses it, if need be
        ([demand(9, stays=True)], 1, None, Shares(1, weights_stay=True)),
        ([demand(1), demand(1)], 8, None, Shares(2, weights_stay=True)),
        ([demand(1), demand(1)], 8, 1, Shares(1, weights_stay=True)),
        ([demand(1), demand(5)], 7, None, Shares(1, weights_stay=True)),
        ([demand(4), demand(5)], 7, None, Shares(1, weights_stay=False)),
        ([demand(1, stays=True), demand(5), demand(5)], 8, None, Shares(2, weights_stay=False)),
        ([demand(1, stays=True)] * 3, 8, None, Shares(3, weights_stay=True)),
    ],
)
def test_as_many_are_awake_as_fit(
    demands: list[Demand], free: float, wanted: int | None, shares: Shares
) -> None:
    assert share_out(demands, int(free * GIB), wanted) == shares


@pytest.mark.parametrize(
    ("demands", "wanted", "reason"),
    [
        ([demand(5, stays=True, name="a"), demand(5, stays=True, name="b")], None, "a and b take"),
        ([demand(1, stays=True), demand(1, stays=True)], 1, "2 models are always awake"),
        ([demand(1, stays=True), demand(1)], 1, "the others need room for one"),
    ],
)
def test_what_cannot_be_is_refused(demands: list[Demand], wanted: int | None, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        share_out(demands, 8 * GIB, wanted)


def test_each_is_told_its_share_unless_it_was_set() -> None:
    shares = Shares(2, weights_stay=False)
    plain = ServeSettings.of_flags(["m", "--device", "cpu"])
    own = ServeSettings.of_flags(["m", "--models-here", "3", "--unload-level", "1"])
    given = with_shares(plain, shares, 2)
    assert (given.models_here, given.unload_level, given.max_loaded_models) == (2, 2, 2)
    assert given.environ()["SURESTEP_MODELS_HERE"] == "2"
    kept = with_shares(own, shares, None)
    assert (kept.models_here, kept.unload_level, kept.max_loaded_models) == (3, 1, None)
    first, second = told([plain] * 3, shares)
    assert first.startswith("3 models, 2 awake at once, with ")
    assert "loaded from disk again" in second
    assert list(told([plain], Shares(1, weights_stay=True))) == []


def test_weights_are_the_files_that_hold_them(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 10), ("b.safetensors", 5), ("tokenizer.json", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weight_bytes(tmp_path) == 15
    (tmp_path / "m.gguf").write_bytes(bytes(7))
    assert weight_bytes(tmp_path / "m.gguf") == 7
    assert weight_bytes(tmp_path / "missing") == 0
